"""Keep optimizer nodes that a provider other than the CPU has kernels for."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.updates import variables_of
from onnxtrain.operators.nodes import check_node, has_kernel
from onnxtrain.operators.registry import find


def keep_provider_optimizers(model: ir.Model, operators: Collection[str]) -> frozenset[ir.Node]:
    """Return the optimizer nodes that a provider has kernels for, with their gradients expanded in place.

    The kernels accept only gradients of their parameter's shape: where the shape is not certain, an Expand is added.
    Nodes in subgraphs, of other operators, with blocks of weights or a registered measure, and of types other than
    float and double are not returned.

    Requires: a graph without Gradient nodes. Ensures: the order of the nodes.

    Args:
        model: A working copy.
        operators: The names of the optimizers that have such kernels.

    Raises:
        OperatorError: A node has inputs, outputs or attributes that its operator does not accept.
    """
    candidates = [
        node
        for node in model.graph
        if node.op_type in operators
        and _is_optimizer(model, node)
        and has_kernel(node)
        and "block" not in node.attributes
    ]
    if not candidates:
        return frozenset()
    for node in candidates:
        check_node(node, model.graph.opset_imports.get(node.domain, 1))
    infer_shapes(model)
    kept = frozenset(node for node in candidates if _is_floating(node))
    for node in kept:
        _fit_gradients(model.graph, node)
    return kept


def _is_optimizer(model: ir.Model, node: ir.Node) -> bool:
    return node.op_identifier() not in model.functions and find(node.domain, node.op_type) is not None


def _is_floating(node: ir.Node) -> bool:
    schema = find(node.domain, node.op_type)
    return schema is not None and variables_of(node, schema) is not None


def _fit_gradients(graph: ir.Graph, node: ir.Node) -> None:
    schema = find(node.domain, node.op_type)
    assert schema is not None
    count = len(variables_of(node, schema) or ())
    op = Builder(graph, graph.opset_imports[""], before=node)
    op.scope = f"{node.name or node.op_type}/gradients"
    for index in range(2 + count, 2 + 2 * count):
        x, gradient = node.inputs[index - count], node.inputs[index]
        assert x is not None
        assert gradient is not None
        if not _has_shape_of(gradient, x):
            expanded = op.Expand(op.wrap(gradient), op.Shape(op.wrap(x)))
            expanded.ir.type, expanded.ir.shape = x.type, x.shape
            node.replace_input_with(index, expanded.ir)


def _has_shape_of(gradient: ir.Value, x: ir.Value) -> bool:
    if gradient.shape is None or x.shape is None:
        return False
    return gradient.shape.is_static() and list(gradient.shape) == list(x.shape)
