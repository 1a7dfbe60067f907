"""GridSample: interpolation at given points, differentiated with respect to the image and the points.

Along each axis a point has a few taps: indices into the image with weights, and the derivatives of the weights. A
sampled value is the sum over all combinations of taps of their weights times the pixel; zero padding sets weights to
zero, border and reflection move indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import (
    LAST,
    Size,
    add,
    as_number,
    as_value,
    identity_matrix,
    joined,
    known_sizes,
    multiply,
    product,
    shaped,
    size_of,
    sizes_of,
    zeros,
)
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value

_CUBIC = -0.75
"""The coefficient of cubic convolution that GridSample uses."""


@dataclass(frozen=True)
class _Taps:
    """The taps of every point along one axis: indices, weights and their derivatives [n, p, taps]."""

    index: Value
    weight: Value
    derivative: Value
    slope: Value


@register_gradient("GridSample")
def grid_sample(node: Node, dy: Value) -> Gradients:
    """y[p] = sum_k w_k(grid[p]) x[i_k(grid[p])]: dx[i_k] += w_k dy, dgrid = sum_k w'_k x[i_k] dy."""
    x, grid = node.x, node.input_required(1)
    if mode_of(node) != "linear":
        return _gradients(node, dy, x, grid)
    return emit(node.op, "GridSampleGradient", dy, x, grid, like=[x, grid], **node.attributes())


def samples_images(node: ir.Node) -> bool:
    """Return whether the grid, the last input, is of points of images."""
    grid = node.inputs[-1]
    return grid is not None and grid.shape is not None and len(grid.shape) == 4


@register_fused("GridSampleGradient", has_kernel=samples_images)
def grid_sample_gradient(node: Node) -> Sequence[Value | None]:
    """From dy, x and grid, with GridSample's attributes: dx and dgrid."""
    return _gradients(node, node.x, node.input_required(1), node.input_required(2))


def _gradients(node: Node, dy: Value, x: Value, grid: Value) -> tuple[Value, Value | None]:
    op = node.op
    rank = x.rank if x.rank is not None else node.rank(grid)
    spatial = rank - 2
    sizes = sizes_of(x, range(rank))
    batch, channels, pixels = sizes[0], sizes[1], product(sizes[2:])
    count = product(sizes_of(grid, range(1, rank - 1)))
    points = shaped(grid, [batch, count, spatial])
    axes = [_axis_taps(node, points, spatial - 1 - axis, sizes[2 + axis]) for axis in range(spatial)]
    taps = _TAPS[mode_of(node)]
    number = _combined(op, [axis.index for axis in axes], sizes[2:], taps, (batch, count))
    indices = _for_all_channels(number, batch, channels, multiply(count, taps**spatial))
    each_dy = shaped(dy, [batch, channels, count, 1])
    weight = _outer(op, [axis.weight for axis in axes], taps, (batch, count))
    updates = each_dy * op.Unsqueeze(weight, op.ints(1))
    flat_updates = shaped(updates, [batch, channels, multiply(count, taps**spatial)])
    start = zeros(op, [batch, channels, pixels], x.dtype)
    dx = op.reshape_like(op.ScatterElements(start, indices, flat_updates, axis=2, reduction="add"), x)
    if taps == 1:
        return dx, None
    taken = op.GatherElements(shaped(x, [batch, channels, pixels]), indices, axis=2)
    each_taken = shaped(taken, [batch, channels, count, taps**spatial])
    pull = op.ReduceSum(each_taken * each_dy, op.ints(1), keepdims=0)
    components = []
    for axis in reversed(axes):
        factors = [other.derivative if other is axis else other.weight for other in axes]
        change = op.ReduceSum(pull * _outer(op, factors, taps, (batch, count)), op.ints(2), keepdims=0)
        components.append(op.Unsqueeze(change * axis.slope, op.ints(2)))
    return dx, op.reshape_like(op.Concat(*components, axis=2), grid)


@register_gradient("AffineGrid")
def affine_grid(node: Node, dy: Value) -> Gradients:
    """y[n, p] = theta[n] [g_p, 1] for the points g_p of a regular grid: dtheta[n] = sum_p dy[n, p] [g_p, 1]ᵀ.

    AffineGrid of the identity gives the points.
    """
    op, theta, size = node.op, node.x, node.input_required(1)
    one, axes = op.ints(1), size_of(theta, 1)
    known = axes if isinstance(axes, int) else None
    identity = op.Unsqueeze(identity_matrix(op, axes, add(axes, 1), theta.dtype), op.ints(0))
    single = op.Concat(one, op.Slice(size, one, op.ints(LAST)), axis=0)
    grid = op.AffineGrid(identity, single, align_corners=node.attribute("align_corners"))
    points = op.Reshape(grid, joined(op, [-1, axes])).with_shape((None, known))
    flat_dy = op.Reshape(dy, joined(op, [0, -1, axes])).with_shape((None, None, known))
    linear = op.Transpose(flat_dy, perm=[0, 2, 1]) @ points
    moved = op.Unsqueeze(op.ReduceSum(flat_dy, op.ints(1), keepdims=0), op.ints(2))
    return op.Concat(linear, moved, axis=2), None


_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}


def mode_of(node: Node) -> str:
    """The mode by its name from opset 20 on."""
    mode = str(node.attribute("mode", "linear"))
    return {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)


def _for_all_channels(number: Value, batch: Size, channels: Size, count: Size) -> Value:
    op = number.op
    one = op.ints(1)
    target = op.Concat(one, as_value(op, channels), one, axis=0)
    return op.Expand(shaped(number, [batch, 1, count]), target).with_shape(known_sizes([batch, channels, count]))


def _axis_taps(node: Node, points: Value, component: int, size: Size) -> _Taps:
    op, mode = node.op, mode_of(node)
    padding = node.attribute("padding_mode", "zeros")
    coordinate = op.Gather(points, op.constant(component, np.int64), axis=2)
    length = as_number(op, size, points.dtype)
    last = length - 1
    if node.attribute("align_corners", 0):
        slope = last / 2
        low, high = op.scalar(0, points), last
        position = (coordinate + 1) * slope
    else:
        slope = length / 2
        low, high = op.scalar(-0.5, points), length - 0.5
        position = (coordinate + 1) * slope - 0.5
    if mode == "nearest":
        position = op.Round(position)
    position, slope = _padded(position, slope, padding, low, high, last)
    first = position if mode == "nearest" else op.Floor(position)
    shifts = {"nearest": [0], "linear": [0, 1], "cubic": [-1, 0, 1, 2]}[mode]
    index = op.Unsqueeze(first, op.ints(2)) + op.constant(shifts, points.dtype)
    weight, derivative = _weights(mode, op.Unsqueeze(position - first, op.ints(2)))
    if padding == "zeros":
        zero = op.scalar(0, points)
        inside = op.And(op.GreaterOrEqual(index, zero), op.LessOrEqual(index, last))
        inside = op.cast(inside, points.dtype)
        weight, derivative = weight * inside, derivative * inside
    elif padding == "reflection":
        index, _ = _reflected(index, low, high)
    index = op.Clip(index, op.scalar(0, points), last)
    return _Taps(op.cast(index, ir.DataType.INT64), weight, derivative, slope)


def _padded(position: Value, slope: Value, padding: str, low: Value, high: Value, last: Value) -> tuple[Value, Value]:
    """The position and its slope, after padding moved positions outside the image."""
    op = position.op
    if padding == "border":
        outside = op.Or(op.Less(position, low), op.Greater(position, high))
        zero = op.scalar(0, position)
        return op.Where(outside, op.Clip(position, zero, last), position), op.Where(outside, zero, slope)
    if padding == "reflection":
        position, sign = _reflected(position, low, high)
        return position, slope * sign
    return position, slope


def _reflected(position: Value, low: Value, high: Value) -> tuple[Value, Value]:
    """Positions reflected at both ends until they are inside, and the sign of their derivative."""
    op = position.op
    span = op.Max(high - low, op.scalar(1, position))  # 0 where the only pixel's centre is both ends
    distance = op.Abs(position - low)
    flips = op.Floor(distance / span)
    rest = distance - flips * span
    odd = flips - 2 * op.Floor(flips * 0.5)
    turned = op.Equal(odd, op.scalar(1, position))
    inside = op.Where(turned, span - rest, rest) + low
    sign = op.Where(op.Less(position, low), op.scalar(-1, position), op.scalar(1, position))
    return inside, sign * (1 - 2 * odd)


def _weights(mode: str, t: Value) -> tuple[Value, Value]:
    """The weights of the taps and their derivatives for the fraction t [n, p, 1] behind the first one."""
    op = t.op
    if mode == "nearest":
        return op.ones_like(t), op.zeros_like(t)
    if mode == "linear":
        sign = op.constant([-1, 1], t.dtype)
        return t * sign + op.constant([1, 0], t.dtype), op.ones_like(t) * sign
    a = _CUBIC
    cubes = np.array([[0, a, -2 * a, a], [1, 0, -(a + 3), a + 2], [0, -a, 2 * a + 3, -(a + 2)], [0, 0, a, -a]]).T
    powers = op.Concat(op.ones_like(t), t, t * t, t * t * t, axis=2)
    weight = powers @ op.constant(cubes, t.dtype)
    slopes = op.Concat(op.ones_like(t), t, t * t, axis=2)
    derivative = slopes @ op.constant(cubes[1:] * np.array([[1], [2], [3]]), t.dtype)
    return weight, derivative


def _outer(op: Builder, factors: list[Value], taps: int, leading: tuple[Size, Size]) -> Value:
    """The outer product of the axes' weights [n, p, taps ** axes]."""
    result = factors[0]
    for axes, factor in enumerate(factors[1:], start=2):
        pairs = op.Unsqueeze(result, op.ints(3)) * op.Unsqueeze(factor, op.ints(2))
        result = shaped(pairs, [*leading, taps**axes])
    return result


def _combined(op: Builder, indices: list[Value], sizes: list[Size], taps: int, leading: tuple[Size, Size]) -> Value:
    """The position in the flattened image of all combinations of the axes' indices [n, p, taps ** axes]."""
    result = indices[0]
    for axes, (index, size) in enumerate(zip(indices[1:], sizes[1:], strict=True), start=2):
        rows = op.Unsqueeze(op.Mul(result, as_value(op, size)), op.ints(3))
        result = shaped(op.Add(rows, op.Unsqueeze(index, op.ints(2))), [*leading, taps**axes])
    return result
