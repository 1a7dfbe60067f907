"""Running sums and products along an axis, and arithmetic progressions."""

from __future__ import annotations

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.ir import Value


@register_gradient("CumSum")
def cumulative_sum(node: Node, dy: Value) -> Gradients:
    """y_i = sum_(j <= i) x_j: dx_j = sum_(i >= j) dy_i, the sum in the other direction."""
    return _backwards(node, dy)


@register_gradient("CumProd")
def cumulative_product(node: Node, dy: Value) -> Gradients:
    """y_i = prod_(j <= i) x_j: dx_j = 1 / x_j sum_(i >= j) dy_i y_i, exact where some x are zero.

    Where x_k is the first zero, y is zero from k on: the formula holds before it; with x_k replaced by 1 it
    holds for dx_k, up to the next zero; all after it is zero.
    """
    op, x, axis = node.op, node.x, node.input_required(1)
    exclusive, reverse = node.attribute("exclusive", 0), node.attribute("reverse", 0)
    zero, one = op.scalar(0, x), op.scalar(1, x)
    is_zero = op.Equal(x, zero)
    zeros = op.CumSum(op.cast(is_zero, x.dtype), axis, reverse=reverse)
    is_first = op.And(is_zero, op.Equal(zeros, one))
    replaced = op.Where(is_first, one, x)
    product = op.CumProd(replaced, axis, exclusive=exclusive, reverse=reverse)
    before = _backwards(node, dy * node.y) / replaced
    first = op.Where(is_first, _backwards(node, dy * product), zero)
    return op.Where(op.Equal(zeros, zero), before, first)


def _backwards(node: Node, value: Value) -> Value:
    """The running sum from the other end, exclusive where the node is."""
    exclusive, reverse = node.attribute("exclusive", 0), node.attribute("reverse", 0)
    return node.op.CumSum(value, node.input_required(1), exclusive=exclusive, reverse=1 - reverse)


@register_gradient("Range")
def arithmetic_progression(node: Node, dy: Value) -> Gradients:
    """y_i = start + i delta, i < n: dstart = sum dy, ddelta = sum_i i dy_i; the limit only counts: 0."""
    op = node.op
    start, delta = node.input_required(0), node.input_required(2)
    count = op.cast(op.Size(node.y), dy.dtype)
    index = op.Range(op.scalar(0, dy), count, op.scalar(1, dy))
    d_start = op.ReduceSum(dy, keepdims=0)
    d_delta = op.ReduceSum(dy * index, keepdims=0)
    return op.reshape_like(d_start, start), None, op.reshape_like(d_delta, delta)
