"""Copies of the bodies of If, Loop and Scan, in which gradients are computed."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.masked_softmax import read_replacements
from onnxtrain.autodiff.node import describe
from onnxtrain.errors import GradientError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.clone import Values, clone_nodes, subgraphs
from onnxtrain.ir.passes import remove_dead_nodes
from onnxtrain.ir.sharing import RANDOM
from onnxtrain.ir.value import constant_tensor


def copy_body(graph: ir.Graph, op: Builder, values: Values) -> list[Value]:
    """Copy the nodes of a body to another; ``values`` says what stands for its inputs. Returns its outputs.

    Raises:
        GradientError: A node draws random numbers: the copy would draw others.
    """
    for inner in graph:
        if draws(inner):
            raise GradientError(
                f"{describe(inner)} draws random numbers in the body of an operator, which the gradient computes "
                "again and would draw differently; draw outside of the body and hand the numbers in."
            )
    for initializer in graph.initializers.values():
        tensor = initializer.const_value
        assert tensor is not None
        values[initializer] = op.constant(tensor.numpy()).ir
    op.graph.extend(clone_nodes(graph, values, rename=op.copied_name))
    outputs = [values.get(value, value) for value in graph.outputs]
    return [op.wrap(value) for value in outputs if value is not None]


def finish_body(op: Builder) -> None:
    """What is done in a body when its gradient stands: in the main graph, passes do it."""
    read_replacements(op)
    remove_dead_nodes(op.graph)


def draws(node: ir.Node) -> bool:
    """Whether a node, or one in its bodies, gives other values each time that it runs."""
    if any(draws(inner) for graph in subgraphs(node) for inner in graph):
        return True
    if node.op_type == "Dropout" and not node.domain:
        training = node.inputs[2] if len(node.inputs) > 2 else None
        known = None if training is None else constant_tensor(training)
        return training is not None and (known is None or bool(known.numpy()))
    return node.op_type in RANDOM and not node.domain


def input_like(op: Builder, like: ir.Value, values: Values | None = None) -> ir.Value:
    """A new value with the type and shape of another, to become an input of a body; ``values`` is told."""
    made = ir.Value(name=f"{op.unique_prefix()}{op.bare_name(like.name or '')}", type=like.type, shape=like.shape)
    if values is not None:
        values[like] = made
    return made


def new_input(op: Builder, name: str, dtype: ir.DataType, *, scalar: bool = False) -> Value:
    """A new input of a body, at its end: a sequence of tensors, or one number."""
    tensor = ir.TensorType(dtype)
    value = ir.Value(name=f"{op.unique_prefix()}{name}", type=tensor if scalar else ir.SequenceType(tensor))
    value.shape = ir.Shape(()) if scalar else None
    op.graph.inputs.append(value)
    return op.wrap(value)
