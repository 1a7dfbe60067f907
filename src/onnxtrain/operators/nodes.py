"""Checks and type inference of optimizer nodes in a graph."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import OperatorError
from onnxtrain.graph import Builder
from onnxtrain.graph.shapes import register_inference
from onnxtrain.graph.value import attributes_of
from onnxtrain.operators.checks import check_output_count, check_scalars, check_variable, group
from onnxtrain.operators.evaluation import describe
from onnxtrain.operators.measures import BUILT_IN
from onnxtrain.operators.registry import find


def check_node(node: ir.Node, version: int = 1) -> None:
    """Check the version, attributes, inputs and outputs of an optimizer node."""
    schema = find(node.domain, node.op_type)
    assert schema is not None
    if version != schema.version:
        raise OperatorError(
            f"{schema.name} is an operator of version {schema.version} of the domain {schema.domain!r}, "
            f"but the model imports version {version}."
        ).about(schema.name, got=version, wanted=schema.version)
    if len(node.inputs) < 2 or any(value is None for value in node.inputs):
        absent = [str(index) for index, value in enumerate(node.inputs) if value is None] or ["0 and 1"]
        raise OperatorError(
            f"{schema.name} lacks its input {', '.join(absent)}; it takes R, T, then all X, all G and all states."
        )
    attributes = schema.complete(attributes_of(node))
    variables = group(schema, attributes, len(node.inputs) - 2)
    builder = Builder(ir.Graph([], [], nodes=[]), 1)
    inputs = [describe(builder.wrap(value)) for value in node.inputs if value is not None]
    check_scalars(schema, inputs[0], inputs[1])
    for index in range(variables):
        check_variable(schema, attributes, index, inputs[2 + index :: variables])
    check_output_count(schema, attributes, variables, len(node.outputs))


def infer_optimizer_types(node: ir.Node) -> bool:
    """Copy the types and shapes of X and the states to the outputs of an optimizer node; other nodes do not change.

    Returns:
        True if an output got a type or shape that was unknown before.
    """
    schema = find(node.domain, node.op_type)
    if schema is None:
        return False
    states = len(schema.used_states(schema.complete(attributes_of(node))))
    count = (len(node.inputs) - 2) // (2 + states)
    own = list(node.inputs[2:])
    learned = False
    for source, output in zip(own[:count] + own[2 * count :], node.outputs, strict=False):  # all but the G
        if source is not None and output.type is None and source.type is not None:
            output.type, learned = source.type, True
        if source is not None and output.shape is None and source.shape is not None:
            output.shape, learned = source.shape.copy(), True
    return learned


def name_skipped_outputs(node: ir.Node) -> list[ir.Value]:
    """Name the unnamed outputs of an optimizer node and return them."""
    if find(node.domain, node.op_type) is None:
        return []
    skipped = [output for output in node.outputs if not output.name]
    for index, output in enumerate(skipped):
        output.name = f"skipped output {index} of {node.name or node.op_type} {id(node)}"
    return skipped


def has_kernel(node: ir.Node) -> bool:
    """Return whether native kernels implement an optimizer node; they lack registered measures."""
    return "measure" not in node.attributes or node.attributes["measure"].as_string() in BUILT_IN


register_inference(infer_optimizer_types, name_skipped_outputs)
