"""Correct the gradient of a softmax whose NaN the model replaces.

A softmax is NaN where every x along the axis is -inf (all keys of a query are masked). Models that replace this NaN, as
exported attention does, need the gradient of the replacement. The rule writes SoftmaxGradient nodes without regard to
that; the function here lets them read the replacement.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.value import constant_tensor


def read_replacements(op: Builder) -> list[ir.Node]:
    """Let each SoftmaxGradient node of a graph read zeros where the model replaces the softmax's NaN, in place."""
    emitted: list[ir.Node] = []
    for node in list(op.graph):
        y = node.inputs[1] if node.op_type == "SoftmaxGradient" and node.domain == ONNXTRAIN_DOMAIN else None
        if y is None or not _is_softmax(y.producer()):
            continue
        before = op.before(node)
        before.scope = (node.name or "").rpartition("/")[0]
        cleaned = _without_nan(before, before.wrap(y))
        if cleaned.ir is not y:
            node.replace_input_with(1, cleaned.ir)
            emitted += before.emitted
    return emitted


def _is_softmax(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Softmax" and not node.domain


def _without_nan(op: Builder, y: Value) -> Value:
    """The softmax y if the model uses its NaN, else Where(IsNaN(y), 0, y): the model's own node if there is one."""
    for test in y.ir.consumers():
        for choice in test.outputs[0].consumers() if test.op_type == "IsNaN" else ():
            if choice.graph is op.graph and _replaces_by_zero(choice, test.outputs[0], y.ir):
                return op.wrap(choice.outputs[0]).with_shape(y.shape)
    return op.Where(op.IsNaN(y), op.scalar(0, y), y).with_shape(y.shape) if _is_replaced(y.ir) else y


def _replaces_by_zero(node: ir.Node, is_nan: ir.Value, y: ir.Value) -> bool:
    if node.op_type != "Where" or node.inputs[0] is not is_nan or node.inputs[2] is not y or node.inputs[1] is None:
        return False
    replacement = constant_tensor(node.inputs[1])
    return replacement is not None and not replacement.numpy().any()


def _is_replaced(y: ir.Value) -> bool:
    """Return whether the model replaces elements of y, as the body of Attention does in masked rows."""
    readers = list(y.consumers())
    if any(reader.op_type == "Where" and reader.inputs[2] is y for reader in readers):
        return True
    return any(reader.op_type == "Cast" and _is_replaced(reader.outputs[0]) for reader in readers)
