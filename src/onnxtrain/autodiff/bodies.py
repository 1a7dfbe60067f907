"""Copy the bodies of If, Loop and Scan, to compute gradients in the copies."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.masked_softmax import read_replacements
from onnxtrain.autodiff.node import describe
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import Values, clone_nodes, subgraphs
from onnxtrain.graph.passes import RANDOM, remove_dead_nodes
from onnxtrain.graph.value import constant_tensor


def copy_body(graph: ir.Graph, op: Builder, values: Values) -> list[Value]:
    """Copy the nodes of a body into another; ``values`` holds substitutes for its inputs. Returns its outputs."""
    for inner in graph:
        if is_random(inner):
            raise GradientError(
                f"{describe(inner)} samples random numbers in the body of an operator. The gradient recomputes the "
                "body and would sample different ones; sample outside of the body and pass the numbers in."
            ).about(describe(inner))
    for initializer in graph.initializers.values():
        tensor = initializer.const_value
        assert tensor is not None
        values[initializer] = op.constant(tensor.numpy()).ir
    op.graph.extend(clone_nodes(graph, values, rename=op.copied_name))
    outputs = [values.get(value, value) for value in graph.outputs]
    return [op.wrap(value) for value in outputs if value is not None]


def finish_body(op: Builder) -> None:
    """Clean a body after its gradient is written, as passes do in the main graph."""
    read_replacements(op)
    remove_dead_nodes(op.graph)


def is_random(node: ir.Node) -> bool:
    """Return whether a node, or one in its bodies, gives other values each time that it runs."""
    if any(is_random(inner) for graph in subgraphs(node) for inner in graph):
        return True
    if node.op_type == "Dropout" and not node.domain:
        training = node.inputs[2] if len(node.inputs) > 2 else None
        known = None if training is None else constant_tensor(training)
        return training is not None and (known is None or bool(known.numpy()))
    return node.op_type in RANDOM and not node.domain


def input_like(op: Builder, like: ir.Value, values: Values | None = None) -> ir.Value:
    """A new value for an input of a body, with the type and shape of another; ``values`` maps the other to it."""
    made = ir.Value(name=f"{op.unique_prefix()}{op.bare_name(like.name or '')}", type=like.type, shape=like.shape)
    if values is not None:
        values[like] = made
    return made


def new_input(op: Builder, name: str, dtype: ir.DataType, *, scalar: bool = False) -> Value:
    """Append an input to a body: a sequence of tensors, or a scalar."""
    tensor = ir.TensorType(dtype)
    value = ir.Value(name=f"{op.unique_prefix()}{name}", type=tensor if scalar else ir.SequenceType(tensor))
    value.shape = ir.Shape(()) if scalar else None
    op.graph.inputs.append(value)
    return op.wrap(value)
