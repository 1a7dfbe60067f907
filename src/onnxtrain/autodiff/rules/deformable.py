"""Col2Im, and convolution with deformable windows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.placement import Size, as_value, count_to, identity_matrix, size_of
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.windows import spatial_sizes
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import check_positions


@register_gradient("Col2Im")
def columns_to_image(node: Node, dy: Value) -> Gradients:
    """y = Σ of the columns x at the positions of their block: dx = the blocks of dy as columns.

    A convolution with one one-hot filter per element of the block extracts them.
    """
    op, image, block = node.op, node.input_required(1), node.input_required(2)
    known = block.constant()
    size: Size = op.ReduceProd(block, keepdims=1) if known is None else math.prod(known.tolist())
    eye = identity_matrix(op, size, size, dy.dtype)
    filters = op.Reshape(eye, op.Concat(as_value(op, size), op.ints(1), block, axis=0))
    single = op.Reshape(dy, op.Concat(op.ints(-1, 1), image, axis=0))
    columns = op.Conv(single, filters, **node.attributes("strides", "dilations", "pads"))
    return op.Reshape(columns, op.shape_of(node.x)).with_shape(node.x.shape)


class _Corner(NamedTuple):
    """One of the four elements around each sampled point."""

    row: Value
    weight: Value
    by_y: Value
    by_x: Value


@register_gradient("DeformConv")
def deformable_convolution(node: Node, dy: Value) -> Gradients:
    """y = w (mask s) with s = x at sampled points: dw = dy (mask s)ᵀ, and with d = wᵀ dy: dmask = Σ d s.

    dx adds d mask to the four elements around each point with their bilinear weights, doffset uses the derivatives of
    the weights. Two spatial axes, as in every runtime.
    """
    op, x, weight = node.op, node.x, node.input_required(1)
    mask = node.input(4)
    group, offset_groups = node.attribute("group", 1), node.attribute("offset_group", 1)
    kernel = node.attribute("kernel_shape") or spatial_sizes(weight)
    if kernel is None or len(kernel) != 2:
        raise GradientError(
            f"{describe(node.ir)}: its gradient is for two spatial axes of a kernel whose size is known, but "
            f"the kernel is {'of unknown size' if kernel is None else kernel}; set kernel_shape."
        )
    points, corners = _corners(node, tuple(kernel), offset_groups)
    positions = math.prod(kernel)
    # [batch, groups, positions, height, width, channels] for x around each point, and for d.
    image = _rows(op, x, offset_groups)
    around = [op.Gather(image, corner.row, axis=0) for corner in corners]
    last = op.ints(-1)
    wide_mask = None if mask is None else op.Reshape(mask, op.Shape(points))
    d = _from_output(op, dy, weight, group, offset_groups, positions)
    products = [op.ReduceSum(d * element, last, keepdims=0) for element in around]
    dmask = None
    if mask is not None:
        terms = [corner.weight * p for corner, p in zip(corners, products, strict=True)]
        dmask = op.reshape_like(op.Sum(*terms), mask)
    masked = d if wide_mask is None else d * op.Unsqueeze(wide_mask, last)
    if wide_mask is not None:
        products = [p * wide_mask for p in products]
    pairs = list(zip(corners, products, strict=True))
    moved = op.Sum(*(corner.by_y * p for corner, p in pairs)), op.Sum(*(corner.by_x * p for corner, p in pairs))
    both = op.Concat(*(op.Unsqueeze(by, op.ints(3)) for by in moved), axis=3)
    doffset = op.reshape_like(both, node.input_required(2))
    weighted = [op.Unsqueeze(c.weight, last) * v for c, v in zip(corners, around, strict=True)]
    sampled = op.Sum(*weighted)
    if wide_mask is not None:
        sampled = sampled * op.Unsqueeze(wide_mask, last)
    dw = _weight_gradient(op, dy, sampled, weight, group)
    dx = _add_to_image(op, masked, corners, image, x, offset_groups)
    db = None if node.input(3) is None else op.ReduceSum(dy, op.ints(0, 2, 3), keepdims=0)
    return dx, dw, doffset, db, dmask


def _corners(node: Node, kernel: tuple[int, int], offset_groups: int) -> tuple[Value, list[_Corner]]:
    """The y of every sampled point [batch, groups, positions, height, width], and the four elements around it."""
    op, x, offset = node.op, node.x, node.input_required(2)
    strides, dilations = node.attribute("strides") or [1, 1], node.attribute("dilations") or [1, 1]
    pads = node.attribute("pads") or [0] * 4
    counts = op.Shape(offset, start=2)
    shape = op.Concat(op.Shape(x, end=1), op.ints(offset_groups, math.prod(kernel), 2), counts, axis=0)
    split = op.several("Split", op.Reshape(offset, shape), outputs=2, axis=3, num_outputs=2)
    check_positions(*kernel)
    grid = np.stack([g.reshape(-1) for g in np.indices(kernel)])
    lows, parts = [], []
    for axis in (0, 1):
        starts = op.cast(count_to(op, size_of(offset, 2 + axis)), x.dtype) * float(strides[axis]) - float(pads[axis])
        starts = op.Unsqueeze(starts, op.ints(1)) if axis == 0 else starts
        within = op.constant((grid[axis] * dilations[axis]).reshape(-1, 1, 1), x.dtype)
        point = op.Squeeze(split[axis], op.ints(3)) + starts + within
        lows.append(op.Floor(point))
        parts.append(point - lows[-1])
    height, width = op.dimension(x, 2), op.dimension(x, 3)
    first = op.Unsqueeze(count_to(op, size_of(x, 0)), op.ints(1)) * offset_groups + np.arange(offset_groups)
    first = op.Unsqueeze(first, op.ints(2, 3, 4))
    corners = []
    for down in (0, 1):
        for right in (0, 1):
            row, column = op.cast(lows[0] + down, first.dtype), op.cast(lows[1] + right, first.dtype)
            inside = op.cast(op.And(_within(op, row, height), _within(op, column, width)), x.dtype)
            share_y = parts[0] if down else 1 - parts[0]
            share_x = parts[1] if right else 1 - parts[1]
            row, column = _clip(op, row, height), _clip(op, column, width)
            flat = (first * height + row) * width + column
            toward_y = share_x * inside * (1.0 if down else -1.0)
            toward_x = share_y * inside * (1.0 if right else -1.0)
            corners.append(_Corner(flat, share_y * share_x * inside, toward_y, toward_x))
    return lows[0], corners


def _within(op: Builder, index: Value, size: Value) -> Value:
    return op.And(op.GreaterOrEqual(index, op.ints(0)), op.Less(index, size))


def _clip(op: Builder, index: Value, size: Value) -> Value:
    return op.Max(op.Min(index, size - 1), op.ints(0))


def _rows(op: Builder, x: Value, groups: int) -> Value:
    """Reshape to [batch * groups * height * width, channels / groups], one contiguous row per point."""
    shape = op.Concat(op.Shape(x, end=1), op.ints(groups), op.dimension(x, 1) / groups, axis=0)
    split = op.Reshape(x, op.Concat(shape, op.Shape(x, start=2), axis=0))
    return op.Flatten(op.Transpose(split, perm=[0, 1, 3, 4, 2]), axis=4)


def _from_output(op: Builder, dy: Value, weight: Value, group: int, offset_groups: int, positions: int) -> Value:
    """Wᵀ dy, [batch, offset groups, positions, height, width, channels]."""
    counts = op.Shape(dy, start=2)
    rows = op.Shape(weight, end=1) / group
    outputs = op.Reshape(dy, op.Concat(op.Shape(dy, end=1), op.ints(group), rows, op.ints(-1), axis=0))
    filters = op.Reshape(weight, op.Concat(op.ints(group), rows, op.ints(-1), axis=0))
    columns = op.MatMul(op.Transpose(filters, perm=[0, 2, 1]), outputs)
    shape = op.Concat(op.Shape(dy, end=1), op.ints(offset_groups, -1, positions), counts, axis=0)
    return op.Transpose(op.Reshape(columns, shape), perm=[0, 1, 3, 4, 5, 2])


def _weight_gradient(op: Builder, dy: Value, sampled: Value, weight: Value, group: int) -> Value:
    """Σ over batch and points of dy times the sampled values, per group."""
    rows = op.Shape(weight, end=1) / group
    outputs = op.Reshape(dy, op.Concat(op.Shape(dy, end=1), op.ints(group), rows, op.ints(-1), axis=0))
    columns = op.Transpose(sampled, perm=[0, 3, 4, 1, 5, 2])  # batch, point, channel, position
    inputs = op.dimension(weight, 1)
    kernel = op.ReduceProd(op.Shape(weight, start=2), keepdims=1)
    shape = op.Concat(op.Shape(dy, end=1), op.ints(-1, group), inputs * kernel, axis=0)
    columns = op.Transpose(op.Reshape(columns, shape), perm=[0, 2, 1, 3])
    total = op.ReduceSum(op.MatMul(outputs, columns), op.ints(0), keepdims=0)
    return op.Reshape(total, op.shape_of(weight)).with_shape(weight.shape)


def _add_to_image(op: Builder, masked: Value, corners: list[_Corner], image: Value, x: Value, groups: int) -> Value:
    """Add every sample's gradient to the four elements around its point."""
    total = op.zeros_like(image)
    for corner in corners:
        rows = op.Flatten(op.Unsqueeze(corner.weight, op.ints(-1)) * masked, axis=5)
        indices = op.Reshape(corner.row, op.ints(-1, 1))
        total = op.ScatterND(total, indices, rows, reduction="add")
    sizes = op.Concat(op.Shape(x, end=1), op.ints(groups), op.Shape(x, start=2), op.ints(-1), axis=0)
    return op.reshape_like(op.Transpose(op.Reshape(total, sizes), perm=[0, 1, 4, 2, 3]), x)
