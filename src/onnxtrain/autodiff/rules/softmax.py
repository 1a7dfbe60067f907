"""Softmax and its logarithm along one axis."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value


@register_gradient("Softmax", since=13)
def softmax(node: Node, dy: Value) -> Gradients:
    """y_i = exp(x_i) / sum_j exp(x_j): dx_i = y_i (dy_i - sum_j dy_j y_j).

    Where every x along the axis is -inf (all keys of a query are masked), y is NaN. A model that replaces this
    NaN, as exported attention does, gets the gradient of the replacement.
    """
    y = _without_nan(node)
    return emit(node.op, "SoftmaxGradient", dy, y, like=[y], axis=node.attribute("axis", -1))


@register_fused("SoftmaxGradient")
def softmax_gradient(node: Node) -> Sequence[Value]:
    """From dy and y: dx_i = y_i (dy_i - sum_j dy_j y_j)."""
    op, dy, y = node.op, node.x, node.input_required(1)
    return [y * (dy - op.ReduceSum(dy * y, op.ints(node.attribute("axis")), keepdims=1))]


def _without_nan(node: Node) -> Value:
    """y, or what the model makes of it where it reads Where(IsNaN(y), 0, y)."""
    y = node.y.ir
    for test in y.consumers():
        if test.op_type != "IsNaN":
            continue
        for choice in test.outputs[0].consumers():
            condition, replacement, kept = (*choice.inputs, None, None, None)[:3]
            if choice.op_type == "Where" and condition is test.outputs[0] and kept is y:
                number = None if replacement is None else ir.convenience.get_const_tensor(replacement)
                if number is not None and not number.numpy().any():
                    return node.op.wrap(choice.outputs[0]).with_shape(node.y.shape)
    if _is_replaced(y):
        op = node.op
        return op.Where(op.IsNaN(node.y), op.scalar(0, node.y), node.y).with_shape(node.y.shape)
    return node.y


def _is_replaced(y: ir.Value) -> bool:
    """Whether the model puts something else for some y, as the body of Attention does for rows that are masked."""
    readers = list(y.consumers())
    if any(reader.op_type == "Where" and reader.inputs[2] is y for reader in readers):
        return True
    return any(reader.op_type == "Cast" and _is_replaced(reader.outputs[0]) for reader in readers)


@register_gradient("LogSoftmax", since=13)
def log_softmax(node: Node, dy: Value) -> Gradients:
    """y_i = x_i - log sum_j exp(x_j): dx_i = dy_i - exp(y_i) sum_j dy_j."""
    return emit(node.op, "LogSoftmaxGradient", dy, node.y, like=[node.y], axis=node.attribute("axis", -1))


@register_fused("LogSoftmaxGradient")
def log_softmax_gradient(node: Node) -> Sequence[Value]:
    """From dy and y: dx_i = dy_i - exp(y_i) sum_j dy_j."""
    op, dy, y = node.op, node.x, node.input_required(1)
    return [dy - op.Exp(y) * op.ReduceSum(dy, op.ints(node.attribute("axis")), keepdims=1)]
