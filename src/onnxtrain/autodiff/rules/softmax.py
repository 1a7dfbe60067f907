"""Softmax and its logarithm along one axis."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.ir import Value


@register_gradient("Softmax", since=13)
def softmax(node: Node, dy: Value) -> Gradients:
    """y_i = exp(x_i) / sum_j exp(x_j): dx_i = y_i (dy_i - sum_j dy_j y_j).

    A model that replaces the NaN of rows that are masked gets the gradient of the replacement:
    :mod:`onnxtrain.autodiff.masked_softmax`.
    """
    return emit(node.op, "SoftmaxGradient", dy, node.y, like=[node.y], axis=node.attribute("axis", -1))


@register_fused("SoftmaxGradient")
def softmax_gradient(node: Node) -> Sequence[Value]:
    """From dy and y: dx_i = y_i (dy_i - sum_j dy_j y_j)."""
    op, dy, y = node.op, node.x, node.input_required(1)
    return [y * (dy - op.ReduceSum(dy * y, op.ints(node.attribute("axis")), keepdims=1))]


@register_gradient("LogSoftmax", since=13)
def log_softmax(node: Node, dy: Value) -> Gradients:
    """y_i = x_i - log sum_j exp(x_j): dx_i = dy_i - exp(y_i) sum_j dy_j."""
    return emit(node.op, "LogSoftmaxGradient", dy, node.y, like=[node.y], axis=node.attribute("axis", -1))


@register_fused("LogSoftmaxGradient")
def log_softmax_gradient(node: Node) -> Sequence[Value]:
    """From dy and y: dx_i = dy_i - exp(y_i) sum_j dy_j."""
    op, dy, y = node.op, node.x, node.input_required(1)
    return [dy - op.Exp(y) * op.ReduceSum(dy, op.ints(node.attribute("axis")), keepdims=1)]
