"""Pooling of regions of interest. The gradient goes to the image; the regions are held constant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import count_to, flat_scatter, size_of
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import check_table

_INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class _Samples:
    """The sample points of RoiAlign along one axis, each tensor [regions, bins, samples]."""

    position: Value
    kept: Value
    exists: Value
    count: Value


@register_gradient("RoiAlign")
def roi_align(node: Node, dy: Value) -> Gradients:
    """y = A x Bᵀ per region, rows of A and B being mean bilinear weights: dx = Σ over regions Aᵀ dy B.

    In mode "max" y is the largest of the samples' weighted elements, which gets all of dy.
    """
    op, x = node.op, node.x
    rows = _samples(node, 1, node.attribute("output_height", 1), op.dimension(x, 2))
    columns = _samples(node, 0, node.attribute("output_width", 1), op.dimension(x, 3))
    images = op.cast(node.input_required(2), _INT64)
    if node.attribute("mode", "avg") == "max":
        return _through_maximum(op, x, dy, images, rows, columns)
    left = _mean_weights(op, rows, op.dimension(x, 2))  # [regions, bins, height]
    right = op.Unsqueeze(_mean_weights(op, columns, op.dimension(x, 3)), op.ints(1))
    spread = op.Transpose(op.MatMul(dy, right), perm=[0, 2, 1, 3])  # [regions, bins, channels, width]
    # Regions and bins are one axis to sum over; each image takes its own regions only.
    owner = op.Equal(op.Unsqueeze(count_to(op, size_of(x, 0)), op.ints(1)), op.Unsqueeze(images, op.ints(0)))
    owner = op.Unsqueeze(op.cast(owner, x.dtype), op.ints(1, 3))
    to_images = op.Reshape(owner * op.Transpose(left, perm=[2, 0, 1]), op.ints(0, 0, -1))
    summed = op.MatMul(to_images, op.Flatten(spread, axis=2))
    sizes = op.Concat(op.ints(0, 0), op.Shape(x, start=1, end=2), op.Shape(x, start=3), axis=0)
    return op.Transpose(op.Reshape(summed, sizes), perm=[0, 2, 1, 3])


def _samples(node: Node, first: int, bins: int, size: Value) -> _Samples:
    """Along the axis whose borders are columns ``first`` and ``first + 2`` of the regions."""
    op, regions, dtype = node.op, node.input_required(1), node.x.dtype
    scale: float = node.attribute("spatial_scale", 1.0)
    half = node.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    ratio: int = node.attribute("sampling_ratio", 0)

    def border(column: int) -> Value:
        chosen = op.Gather(op.cast(regions, dtype), op.ints(column), axis=1)
        return op.Unsqueeze(chosen * scale - (0.5 if half else 0.0), op.ints(2))

    start = border(first)
    length = border(first + 2) - start
    if not half:
        length = op.Max(length, op.scalar(1, length))
    bin_size = length / float(bins)
    check_table(bins, max(ratio, 1))
    if ratio > 0:
        count = op.constant(np.full((1, 1, 1), ratio), dtype)
        numbers = op.constant(np.arange(ratio), dtype)
    else:
        count = op.Max(op.Ceil(bin_size), op.scalar(0, bin_size))
        numbers = op.cast(count_to(op, op.cast(op.ReduceMax(count, keepdims=0), _INT64)), dtype)
    divisor = op.Max(count, op.scalar(1, count))
    offsets = op.constant(np.arange(bins).reshape(1, bins, 1), dtype) * bin_size
    position = start + offsets + (numbers + 0.5) * bin_size / divisor
    end = op.cast(size, dtype)
    exists = op.Less(numbers, count)
    inside = op.And(op.GreaterOrEqual(position, op.scalar(-1, position)), op.LessOrEqual(position, end))
    kept = op.cast(op.And(inside, exists), dtype)
    within = op.Min(op.Max(position, op.scalar(0, position)), end - 1)
    return _Samples(within, kept, exists, divisor)


def _mean_weights(op: Builder, samples: _Samples, size: Value) -> Value:
    """The mean weight of each element in a bin: [regions, bins, size]."""
    last = op.ints(3)
    numbers = op.cast(count_to(op, size), samples.position.dtype)
    distance = op.Abs(op.Unsqueeze(samples.position, last) - numbers)
    weights = op.Relu(1 - distance) * op.Unsqueeze(samples.kept, last)
    return op.ReduceSum(weights, op.ints(2), keepdims=0) / samples.count


def _through_maximum(op: Builder, x: Value, dy: Value, images: Value, rows: _Samples, columns: _Samples) -> Value:
    """dy times its weight, at the largest weighted element."""
    row, row_weight, row_exists = _neighbours(op, rows, op.dimension(x, 2))
    column, column_weight, column_exists = _neighbours(op, columns, op.dimension(x, 3))
    down, right = op.ints(2, 4), op.ints(1, 3)  # [regions, bins down, bins right, neighbours down, right]
    index = op.Unsqueeze(row, down) * op.dimension(x, 3) + op.Unsqueeze(column, right)
    weight = op.Unsqueeze(row_weight, down) * op.Unsqueeze(column_weight, right)
    exists = op.And(op.Unsqueeze(row_exists, down), op.Unsqueeze(column_exists, right))
    bins = op.Shape(dy, start=2, end=3) * op.Shape(dy, start=3)
    shape = op.Concat(op.ints(0, 1), bins, op.ints(-1), axis=0)
    index, weight, exists = (op.Reshape(value, shape) for value in (index, weight, exists))
    flat = op.Gather(op.Reshape(x, op.ints(0, 0, -1)), images, axis=0)
    everywhere = op.Concat(op.Shape(flat, end=2), op.ints(1, 1), axis=0)
    index = op.Expand(index, everywhere)  # [regions, channels, bins, candidates]
    elements = op.GatherElements(flat, op.Reshape(index, op.ints(0, 0, -1)), axis=2)
    products = op.Reshape(elements, op.Shape(index)) * weight
    lowest = op.scalar(np.finfo(np.float32).min, x)
    best = op.ArgMax(op.Where(exists, products, lowest), axis=3, keepdims=1)
    chosen = op.GatherElements(op.Expand(weight * op.cast(exists, x.dtype), op.Shape(index)), best, axis=3)
    position = op.GatherElements(index, best, axis=3)
    share = op.Squeeze(chosen, op.ints(3)) * op.Reshape(dy, op.ints(0, 0, -1))
    return _scatter(op, share, op.Squeeze(position, op.ints(3)), images, x)


def _neighbours(op: Builder, samples: _Samples, size: Value) -> tuple[Value, Value, Value]:
    """The two elements around every sample, their weights, whether they exist: [regions, bins, 2 samples]."""
    low = op.Floor(samples.position)
    high = op.Min(low + 1, op.cast(size, low.dtype) - 1)
    part = samples.position - low
    positions = op.cast(op.Concat(low, high, axis=2), _INT64)
    weights = op.Concat((1 - part) * samples.kept, part * samples.kept, axis=2)
    exists = op.Expand(samples.exists, op.Shape(low))
    return positions, weights, op.Concat(exists, exists, axis=2)


def _scatter(op: Builder, share: Value, position: Value, images: Value, x: Value) -> Value:
    """Add shares [regions, channels, bins] at positions in the images of their regions."""
    channels = op.dimension(x, 1)
    plane = op.Unsqueeze(images, op.ints(1)) * channels + count_to(op, size_of(x, 1))
    index = op.Unsqueeze(plane, op.ints(2)) * (op.dimension(x, 2) * op.dimension(x, 3)) + position
    return flat_scatter(x, index, share)


@register_gradient("MaxRoiPool")
def max_roi_pool(node: Node, dy: Value) -> Gradients:
    """y = max over each bin of a region: dx = dy where the first maximum is, 0 for an empty bin."""
    op, x, regions = node.op, node.x, node.input_required(1)
    height, width = node.attribute("pooled_shape")
    scale: float = node.attribute("spatial_scale", 1.0)
    images = op.cast(op.Squeeze(op.Slice(regions, op.ints(0), op.ints(1), op.ints(1)), op.ints(1)), _INT64)
    in_row = _in_bins(op, regions, 2, height, scale, x, 2)  # [regions, bins, height]
    in_column = _in_bins(op, regions, 1, width, scale, x, 3)
    lowest = op.scalar(np.finfo(np.float32).min, x)
    # The maximum of each row within each bin's columns, then the maximum of those rows: the first one in both.
    image = op.Unsqueeze(op.Gather(x, images, axis=0), op.ints(3))
    of_rows = op.Where(op.Unsqueeze(in_column, op.ints(1, 2)), image, lowest)
    column = op.ArgMax(of_rows, axis=4, keepdims=0)  # [regions, channels, height, bins right]
    highest = op.Unsqueeze(op.ReduceMax(of_rows, op.ints(4), keepdims=0), op.ints(2))
    of_bins = op.Where(op.Unsqueeze(in_row, op.ints(1, 4)), highest, lowest)
    row = op.ArgMax(of_bins, axis=3, keepdims=0)  # [regions, channels, bins down, bins right]
    position = row * op.dimension(x, 3) + op.GatherElements(column, row, axis=2)
    any_row = op.ReduceMax(op.cast(in_row, x.dtype), op.ints(2), keepdims=1)
    any_column = op.ReduceMax(op.cast(in_column, x.dtype), op.ints(2), keepdims=1)
    filled = op.Unsqueeze(any_row * op.Transpose(any_column, perm=[0, 2, 1]), op.ints(1))
    by_bin = op.ints(0, 0, -1)
    return _scatter(op, op.Reshape(dy * filled, by_bin), op.Reshape(position, by_bin), images, x)


def _in_bins(op: Builder, regions: Value, first: int, bins: int, scale: float, x: Value, axis: int) -> Value:
    """True for the elements of an axis that each bin of each region covers: [regions, bins, size]."""

    def border(column: int) -> Value:
        scaled = op.Gather(regions, op.ints(column), axis=1) * scale
        return op.Floor(scaled + 0.5)  # halves go up; borders are not negative

    start, end = border(first), border(first + 2)
    bin_size = op.Max(end - start + 1, op.scalar(1, start)) / float(bins)
    check_table(bins)
    numbers = op.constant(np.arange(bins).reshape(1, bins), regions.dtype)
    low, high = op.Floor(numbers * bin_size) + start, op.Ceil((numbers + 1) * bin_size) + start
    elements = op.cast(count_to(op, size_of(x, axis)), regions.dtype)
    last = op.ints(2)
    behind = op.GreaterOrEqual(elements, op.Unsqueeze(low, last))
    return op.And(behind, op.Less(elements, op.Unsqueeze(high, last)))
