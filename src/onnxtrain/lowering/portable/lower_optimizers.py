"""Replace optimizer nodes by their bodies in standard operators."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.graph import Builder
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.passes import clean
from onnxtrain.graph.replace import remove_nodes, replace_values
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.operators.body import emit
from onnxtrain.operators.checks import group
from onnxtrain.operators.nodes import attributes_of, check_node
from onnxtrain.operators.registry import OPTIMIZERS, find
from onnxtrain.operators.schema import OptimizerSchema

OPSET_WITHOUT_IMPORT = 18
"""Version of ONNX's own operators for a model that imported none, because it had only optimizers."""


def lower_optimizers(model: ir.Model, kept: Collection[ir.Node] = ()) -> ir.Model:
    """Replace every optimizer node by its body in standard operators, in place.

    Nodes in subgraphs and in functions are replaced, too (such functions are inlined). A model-local function
    that defines an operator of the same domain and name has precedence: its calls stay.

    Requires: a graph without Gradient nodes. Ensures: a sorted graph without dead nodes.

    Args:
        model: A working copy.
        kept: Nodes that stay as they are.

    Raises:
        OperatorError: A node has inputs, outputs or attributes that its operator does not accept.
    """
    _inline_functions(model)
    if not any(True for _ in _optimizer_nodes(model, model.graph)):
        _drop_unused_domains(model)
        return model
    _check_optimizers(model)
    model.graph.opset_imports.setdefault("", OPSET_WITHOUT_IMPORT)
    infer_shapes(model)
    opset, lowered = model.graph.opset_imports[""], 0
    for graph in [model.graph, *model.graph.subgraphs()]:
        for node in list(graph):
            schema = _schema_of(model, node)
            if schema is not None and node not in kept:
                builder = Builder(graph, opset, before=node)
                builder.scope = f"{node.name or schema.name}_{lowered}"  # the runtime wants unique names
                _lower(builder, node, schema)
                lowered += 1
        graph.sort()
    clean(model)
    _drop_unused_domains(model)
    return infer_shapes(model)


def _check_optimizers(model: ir.Model) -> None:
    """Check every optimizer node of a model: counts, grouping, attributes, known types and shapes.

    Raises:
        OperatorError: A node has inputs, outputs or attributes that its operator does not accept.
    """
    for graph in [model.graph, *model.graph.subgraphs()]:
        for node in _optimizer_nodes(model, graph, deep=False):
            check_node(node, model.graph.opset_imports.get(node.domain, 1))


def _lower(builder: Builder, node: ir.Node, schema: OptimizerSchema) -> None:
    attributes = schema.complete(attributes_of(node))
    R, T, *tensors = [builder.wrap(value) for value in node.inputs if value is not None]
    count = group(schema, attributes, len(tensors))
    results = emit(builder, schema, R, T, [tensors[index::count] for index in range(count)], attributes)
    news = [value for role in zip(*results, strict=True) for value in role]
    pairs = [(old, new.ir) for old, new in zip(node.outputs, news, strict=True) if old.name]
    replace_values(builder.graph, pairs)
    remove_nodes(builder.graph, [node])


def _schema_of(model: ir.Model, node: ir.Node) -> OptimizerSchema | None:
    return None if node.op_identifier() in model.functions else find(node.domain, node.op_type)


def _optimizer_nodes(model: ir.Model, graph: ir.Graph | ir.Function, deep: bool = True) -> Iterator[ir.Node]:
    nodes = all_nodes(graph) if deep else iter(graph)
    return (node for node in nodes if _schema_of(model, node) is not None)


def _inline_functions(model: ir.Model) -> None:
    """Inline the functions that contain optimizer nodes, and those that call such functions."""
    holding: set[ir.OperatorIdentifier] = set()
    while True:
        found = {
            name
            for name, function in model.functions.items()
            if name not in holding
            and any(
                node.op_identifier() in holding or _schema_of(model, node) is not None for node in all_nodes(function)
            )
        }
        if not found:
            break
        holding |= found
    if holding:
        common.InlinePass(criteria=lambda function: function.identifier() in holding)(model)


def _drop_unused_domains(model: ir.Model) -> None:
    used = {node.domain for node in all_nodes(model.graph)}
    used |= {node.domain for function in model.functions.values() for node in all_nodes(function)}
    for domain in {entry.schema.domain for entry in OPTIMIZERS.values()} - used:
        model.graph.opset_imports.pop(domain, None)
