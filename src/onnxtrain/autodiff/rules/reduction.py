"""Reductions: sums, means, extrema, norms over axes."""

from __future__ import annotations

from onnxtrain.autodiff.registry import Gradients, Node, register_gradient
from onnxtrain.graph import Value


def spread(node: Node, value: Value) -> Value:
    """Give a reduced value the axes of size 1 back that ``keepdims=0`` removed: it broadcasts to x."""
    if node.attribute("keepdims", 1) == 1:
        return value
    op, axes = node.op, node.input(1)
    if axes is None:
        if node.attribute("noop_with_empty_axes", 0):
            return value
        rank = node.x.rank
        ones = op.ints(*[1] * rank) if rank is not None else _ones(node)
        return op.reshape(value, ones)
    return op.Unsqueeze(value, axes)


def _ones(node: Node) -> Value:
    op = node.op
    return op.Add(op.Mul(op.Shape(node.x), op.ints(0)), op.ints(1))


@register_gradient("ReduceSum", since=13)
def reduce_sum(node: Node, dy: Value) -> Gradients:
    """y = sum_i x_i: dx = dy, repeated along the reduced axes."""
    op = node.op
    dx = op.Expand(spread(node, dy), op.shape_of(node.x))
    return dx, None
