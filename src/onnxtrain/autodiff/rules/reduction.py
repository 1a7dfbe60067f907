"""Reductions over axes: sums, means, extrema, products, norms; running sums and products along an axis; Range."""

from __future__ import annotations

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value


def spread(node: Node, value: Value) -> Value:
    """Restore the axes of size 1 that ``keepdims=0`` removed, so that a reduced value broadcasts to x."""
    op, x = node.op, node.x
    if node.attribute("keepdims", 1) == 1:
        return value
    noop = node.attribute("noop_with_empty_axes", 0)
    axes = _axes(node)
    if axes is None:
        if noop:
            return value
        if x.rank is not None:
            return op.reshape(value, [1] * x.rank)
    elif axes.shape is not None and isinstance(axes.shape[0], int):
        return op.Unsqueeze(value, axes)
    # The axes are known only as the graph runs; the reduction itself gives the shape.
    kept = op.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=noop)
    return op.reshape(value, op.Shape(kept))


def _axes(node: Node) -> Value | None:
    """The axes, or ``None`` where they are left out or known to be an empty list."""
    axes = node.input(1)
    return None if axes is None or axes.shape == (0,) else axes


def _expand(node: Node, value: Value) -> Value:
    """Repeat a reduced value along the reduced axes."""
    return node.op.Expand(spread(node, value), node.op.shape_of(node.x))


def _again(node: Node, operator: str, value: Value) -> Value:
    """Reduce a value of x's shape over the node's axes, which stay with size 1."""
    noop = node.attribute("noop_with_empty_axes", 0)
    return node.op.several(operator, value, _axes(node), outputs=1, keepdims=1, noop_with_empty_axes=noop or None)[0]


@register_gradient("ReduceSum", since=13)
def reduce_sum(node: Node, dy: Value) -> Gradients:
    """y = sum_i x_i: dx = dy, repeated along the reduced axes."""
    return _expand(node, dy)


@register_gradient("ReduceMean", since=18)
def reduce_mean(node: Node, dy: Value) -> Gradients:
    """y = 1/n sum_i x_i: dx = dy / n, repeated along the reduced axes."""
    return _expand(node, dy / _count(node))


def _count(node: Node) -> Value:
    """The number of elements of x that one element of y reduces, as a 0-d value."""
    op, x, axes = node.op, node.x, _axes(node)
    if axes is None:
        return op.scalar(1, x) if node.attribute("noop_with_empty_axes", 0) else op.count(x)
    constant = axes.constant()
    if constant is not None:
        return op.count(x, constant.tolist())
    return op.cast(op.Size(x), x.dtype) / op.cast(op.Size(node.y), x.dtype)


@register_gradient("ReduceMax", "ReduceMin", since=18)
def reduce_extremum(node: Node, dy: Value) -> Gradients:
    """y = max_i x_i: dx_i = dy / n where x_i = y, n the number of such i; else 0. Likewise for min.

    Elements that tie share equally, as in PyTorch's ``amax`` and ``amin``.
    """
    op, x = node.op, node.x
    chosen = op.cast(op.Equal(x, spread(node, node.y)), x.dtype)
    return chosen * (spread(node, dy) / _again(node, "ReduceSum", chosen))


@register_gradient("ReduceProd", since=18)
def reduce_product(node: Node, dy: Value) -> Gradients:
    """y = prod_i x_i: dx_i = dy prod_(j != i) x_j, exact where some x are zero."""
    op, x = node.op, node.x
    zero, one = op.scalar(0, x), op.scalar(1, x)
    zeros = op.cast(op.Equal(x, zero), x.dtype)
    factors = op.Where(op.Less(zeros, op.scalar(0.5, x)), x, one)
    product, count = _again(node, "ReduceProd", factors), _again(node, "ReduceSum", zeros)
    others = spread(node, dy) * product
    without, with_one = (op.Where(op.Equal(count, number), others, zero) for number in (zero, one))
    return without / factors + zeros * with_one


@register_gradient("ReduceL1", since=18)
def reduce_l1(node: Node, dy: Value) -> Gradients:
    """y = sum_i |x_i|: dx_i = dy sign(x_i)."""
    return spread(node, dy) * node.op.Sign(node.x)


@register_gradient("ReduceL2", since=18)
def reduce_l2(node: Node, dy: Value) -> Gradients:
    """y = sqrt(sum_i x_i^2): dx_i = dy x_i / y; 0 where y = 0, as in PyTorch."""
    op, y = node.op, node.y
    zero = op.scalar(0, y)
    ratio = op.Where(op.Equal(y, zero), zero, dy / y)
    return node.x * spread(node, ratio)


@register_gradient("ReduceSumSquare", since=18)
def reduce_sum_of_squares(node: Node, dy: Value) -> Gradients:
    """y = sum_i x_i^2: dx_i = 2 dy x_i."""
    return node.x * spread(node, dy * 2)


@register_gradient("ReduceLogSum", since=18)
def reduce_logarithm_of_sum(node: Node, dy: Value) -> Gradients:
    """y = log sum_i x_i: dx_i = dy / sum_i x_i = dy exp(-y)."""
    return _expand(node, dy * node.op.Exp(-node.y))


@register_gradient("ReduceLogSumExp", since=18)
def reduce_logarithm_of_sum_of_exponentials(node: Node, dy: Value) -> Gradients:
    """y = log sum_i exp(x_i): dx_i = dy exp(x_i - y)."""
    return spread(node, dy) * node.op.Exp(node.x - spread(node, node.y))


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
    zero, half, one = (op.scalar(number, x) for number in (0, 0.5, 1))
    zeros = op.cast(op.Equal(x, zero), x.dtype)
    count = op.CumSum(zeros, axis, reverse=reverse)
    others = op.Where(op.Less(op.scalar(1.5, x), count), one, 1 - zeros)  # 0 at the first zero, else 1
    replaced = op.Where(op.Less(others, half), one, x)
    product = op.CumProd(replaced, axis, exclusive=exclusive, reverse=reverse)
    before, first = _backwards(node, dy * node.y), _backwards(node, dy * product)
    return op.Where(op.Less(count, half), before / replaced, op.Where(op.Less(others, half), first, zero))


def _backwards(node: Node, value: Value) -> Value:
    """The running sum in the other direction, exclusive if the node is."""
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
