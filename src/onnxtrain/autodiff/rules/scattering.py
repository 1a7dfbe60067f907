"""ScatterElements and ScatterND with every reduction."""

from __future__ import annotations

from collections.abc import Callable

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.ir import Value

Scatter = Callable[[Value, Value, str | None], Value]
"""(base, updates, reduction) -> base with the updates at the node's indices."""

Gather = Callable[[Value], Value]
"""Takes the elements at the node's indices, in the shape of the updates."""


@register_gradient("ScatterElements")
def scatter_elements(node: Node, dy: Value) -> Gradients:
    """y = x with updates at the indices along an axis, alone or by sum, product, maximum, minimum."""
    op, indices, axis = node.op, node.input_required(1), node.attribute("axis", 0)

    def scatter(base: Value, updates: Value, reduction: str | None) -> Value:
        return op.ScatterElements(base, indices, updates, axis=axis, reduction=reduction)

    def gather(value: Value) -> Value:
        return op.GatherElements(value, indices, axis=axis).with_shape(node.input_required(2).shape)

    return _scattered(node, dy, scatter, gather)


@register_gradient("ScatterND")
def scatter_nd(node: Node, dy: Value) -> Gradients:
    """y = x with updates at tuples of indices, alone or by sum, product, maximum, minimum."""
    op, indices = node.op, node.input_required(1)

    def scatter(base: Value, updates: Value, reduction: str | None) -> Value:
        return op.ScatterND(base, indices, updates, reduction=reduction)

    def gather(value: Value) -> Value:
        return op.GatherND(value, indices).with_shape(node.input_required(2).shape)

    return _scattered(node, dy, scatter, gather)


def _scattered(node: Node, dy: Value, scatter: Scatter, gather: Gather) -> Gradients:
    """The gradients per reduction, where u are the updates of one element of x.

    - none: dx = dy, zero at the indices; du = dy there.
    - add: dx = dy; du = dy there.
    - mul: each factor gets dy times the product of the others.
    - max, min: dy, shared equally among the elements that are equal to y.
    """
    op, updates = node.op, node.input_required(2)
    reduction = node.attribute("reduction", "none")
    if reduction == "none":
        return scatter(dy, op.zeros_like(updates), None), None, gather(dy)
    if reduction == "add":
        return dy, None, gather(dy)
    if reduction == "mul":
        return _multiplied(node, dy, scatter, gather)
    return _shared_by_equals(node, dy, scatter, gather)


def _multiplied(node: Node, dy: Value, scatter: Scatter, gather: Gather) -> Gradients:
    """The product of the other factors, exact where some are zero: zeros are counted, not divided by."""
    op, x, updates = node.op, node.x, node.input_required(2)
    x_zero, u_zero = _is(x, 0), _is(updates, 0)
    x_factor, u_factor = (
        op.Where(x_zero, op.ones_like(x), x),
        op.Where(u_zero, op.ones_like(updates), updates),
    )
    x_count, u_count = op.cast(x_zero, x.dtype), op.cast(u_zero, x.dtype)
    rest = dy * scatter(x_factor, u_factor, "mul")
    zeros = scatter(x_count, u_count, "add")
    dx = op.Where(op.Equal(zeros, x_count), rest / x_factor, op.scalar(0, x))
    du = op.Where(op.Equal(gather(zeros), u_count), gather(rest) / u_factor, op.scalar(0, x))
    return dx, None, du


def _shared_by_equals(node: Node, dy: Value, scatter: Scatter, gather: Gather) -> Gradients:
    op, x, updates = node.op, node.x, node.input_required(2)
    x_equal = op.cast(op.Equal(x, node.y), x.dtype)
    u_equal = op.cast(op.Equal(updates, gather(node.y)), x.dtype)
    share = dy / scatter(x_equal, u_equal, "add")
    return x_equal * share, None, u_equal * gather(share)


def _is(value: Value, number: float) -> Value:
    return value.op.Equal(value, value.op.scalar(number, value))
