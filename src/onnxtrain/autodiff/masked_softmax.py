"""Gradients of a softmax of which the model does not use the NaN.

Where every x along the axis is -inf (all keys of a query are masked), a softmax is NaN. Models that replace this NaN,
as exported attention does, want the gradient of the replacement. The rule knows nothing of that: it writes
SoftmaxGradient nodes, which are told here to read what the model makes of the softmax.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import Builder, Value
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.ir.value import constant_tensor


def read_replacements(op: Builder) -> list[ir.Node]:
    """Let each SoftmaxGradient node of a graph read zeros where the model does not use the softmax's NaN, in place.

    Args:
        op: A builder of the graph, in which the nodes that use the softmax still stand.

    Returns:
        What was emitted for it.
    """
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
    """Where(IsNaN(y), 0, y), the model's own if it has one, where the model replaces NaN in any way; otherwise y."""
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
    """Whether the model puts something else for some y, as the body of Attention does for rows that are masked."""
    readers = list(y.consumers())
    if any(reader.op_type == "Where" and reader.inputs[2] is y for reader in readers):
        return True
    return any(reader.op_type == "Cast" and _is_replaced(reader.outputs[0]) for reader in readers)
