"""Convolution and its transpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, matmul_operands, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import add, bounded, multiply, size_of, subtract
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.windows import (
    Windows,
    attributes_fit,
    extents,
    kernel_of,
    spatial_sizes,
    split_padding,
    unless_default,
    windows_of,
)
from onnxtrain.graph import Builder, Value


@register_gradient("Conv")
def convolution(node: Node, dy: Value) -> Gradients:
    """y = x * w + b: dx = dy transposed-* w, dw = Σ over windows of dy xᵀ, db = Σ dy over all but channels.

    The forms of dw and their cost are beside :func:`weight_gradient`.
    """
    op, x, weight = node.op, node.x, node.input_required(1)
    group = node.attribute("group", 1)
    windows = windows_of(node, weight)
    db = _bias_gradient(op, dy, windows.rank) if node.input(2) is not None else None
    attributes = _fused_attributes(windows, group)
    if attributes is None:
        return _input_gradient(windows, dy, weight, group), weight_gradient(windows, x, dy, weight, group), db
    (dx,) = emit(op, "ConvInputGradient", dy, weight, op.shape_of(x), like=[x], **attributes)
    (dw,) = emit(op, "ConvWeightGradient", dy, x, like=[weight], **attributes)
    return dx, dw, db


def _fused_attributes(windows: Windows, group: int) -> dict[str, Any] | None:
    """Return the attributes of a fused convolution operator; ``None`` if they are not static."""
    if windows.kernel is None or windows.pads is None:
        return None
    return {
        "kernel_shape": windows.kernel,
        "strides": windows.strides,
        "dilations": windows.dilations,
        "pads": windows.pads,
        "group": group,
    }


def _has_kernel(node: ir.Node) -> bool:
    weight = node.inputs[1] if node.op_type == "ConvInputGradient" else node.outputs[0]
    channels = weight.shape[1] if weight is not None and weight.shape is not None else 1
    return attributes_fit(node, channels if isinstance(channels, int) else 1)


@register_fused("ConvInputGradient", has_kernel=_has_kernel)
def convolution_input_gradient(node: Node) -> Sequence[Value]:
    """From dy, w and the shape of x, with Conv's attributes: dx = dy transposed-* w."""
    given, x_shape, group = node.input_required(1), node.input_required(2), node.attribute("group", 1)
    dy, weight = matmul_operands(node, node.x, given)
    return [_input_gradient(windows_of(node, given, x=node.y), dy, weight, group, x_shape)]


@register_fused("ConvWeightGradient", has_kernel=_has_kernel)
def convolution_weight_gradient(node: Node) -> Sequence[Value]:
    """From dy and x, with Conv's attributes: dw = Σ over windows of dy xᵀ."""
    dy, x = matmul_operands(node, node.x, node.input_required(1))
    return [weight_gradient(windows_of(node, node.y, x=x), x, dy, node.y, node.attribute("group", 1))]


def _bias_gradient(op: Builder, dy: Value, rank: int) -> Value:
    return op.ReduceSum(dy, op.ints(0, *range(2, 2 + rank)), keepdims=0)


# Milliseconds on two cores:
#                                          ConvTranspose   Conv, kernel flipped
#   32 x 64 x 32 x 32, 3 x 3, 64 filters        25                15
#   64 x 16 x 32 x 32, 3 x 3, 16                 2.2               1.7
#   4 x 256 x 14 x 14, 3 x 3, 256                2.8               4.0
#   4 x 512 x 7 x 7, 3 x 3, 512                  7.9               9.1
#   64 x 6 x 14 x 14, 5 x 5, 16                  0.37              0.97
#   4 x 64 x 56 x 56, 1 x 1, 256                 1.7               2.8
#   4 x 96 x 28 x 28, 7 x 7, depthwise           2.5               1.2
#   4 x 144 x 56 x 56, 3 x 3, stride 2           1.7               -
LARGE_IMAGE = 784
"""Pixels from which a convolution with the flipped kernel is faster."""


def _input_gradient(windows: Windows, dy: Value, weight: Value, group: int, x_shape: Value | None = None) -> Value:
    if _prefers_flipped(windows, dy, weight):
        assert windows.pads is not None
        rank = windows.rank
        pads = [e - 1 - p for e, p in zip(windows.extent * 2, windows.pads, strict=True)]
        if min(pads) >= 0:
            return windows.op.Conv(
                dy,
                _flipped(windows.op, weight, group, rank),
                kernel_shape=windows.kernel,
                **unless_default(group=group, dilations=windows.dilations, pads=pads),
            )
    return windows.scatter(dy, weight, group, shape=x_shape)


def _prefers_flipped(windows: Windows, dy: Value, weight: Value) -> bool:
    static = weight.static_shape
    if windows.pads is None or static is None or set(windows.strides) != {1} or math.prod(static[2:]) == 1:
        return False
    sizes = spatial_sizes(dy)
    large = sizes is None or math.prod(sizes) >= LARGE_IMAGE
    return large and (static[0] >= 16 or static[1] == 1)


def _flipped(op: Builder, weight: Value, group: int, rank: int) -> Value:
    """The kernel flipped, [outputs, inputs / group, ...] to [inputs, outputs / group, ...]."""
    first, before = op.ints(*[-1] * rank), op.ints(*[np.iinfo(np.int64).min + 1] * rank)
    turned = op.Slice(weight, first, before, op.ints(*range(2, 2 + rank)), first).with_shape(weight.shape)
    spatial = list(range(2, 2 + rank))
    if group == 1:
        return op.Transpose(turned, perm=[1, 0, *spatial])
    static = weight.static_shape
    assert static is not None
    outputs, inputs, *kernel = static
    if inputs == 1 and outputs == group:
        return turned
    grouped = op.reshape(turned, (group, outputs // group, inputs, *kernel))
    exchanged = op.Transpose(grouped, perm=[0, 2, 1, *(axis + 1 for axis in spatial)])
    return op.reshape(exchanged, (group * inputs, outputs // group, *kernel))


@register_gradient("ConvTranspose")
def convolution_transpose(node: Node, dy: Value) -> Gradients:
    """y = x transposed-* w + b: dx = dy * w, dw = Σ over windows of x dyᵀ, db = Σ dy over all but channels."""
    op, x, weight = node.op, node.x, node.input_required(1)
    group = node.attribute("group", 1)
    windows = _windows_over_output(node, dy, weight)
    rank, pads = windows.rank, windows.pads
    dx = op.Conv(
        dy if pads is not None else windows.padded(dy, windows.axes),
        weight,
        kernel_shape=windows.kernel,
        **unless_default(group=group, strides=windows.strides, dilations=windows.dilations, pads=pads or ()),
    )
    attributes = _fused_attributes(windows, group)
    if attributes is None:
        dw = weight_gradient(windows, dy, x, weight, group)
    else:
        (dw,) = emit(op, "ConvWeightGradient", x, dy, like=[weight], **attributes)
    return dx, dw, _bias_gradient(op, dy, rank) if node.input(2) is not None else None


def _windows_over_output(node: Node, dy: Value, weight: Value) -> Windows:
    """Return the windows of y (and dy) into which the elements of x were scattered."""
    kernel, rank = kernel_of(node, weight)
    strides = tuple(node.attribute("strides") or [1] * rank)
    dilations = tuple(node.attribute("dilations") or [1] * rank)
    more = tuple(node.attribute("output_padding") or [0] * rank)
    windows = Windows(node.op, dy, kernel, strides, dilations, (0,) * rank, (0,) * rank)
    mode, wanted = node.attribute("auto_pad", "NOTSET"), node.attribute("output_shape")
    if wanted is None and mode in ("NOTSET", "VALID"):
        pads = (node.attribute("pads") if mode == "NOTSET" else None) or [0] * (2 * rank)
        behind = zip(pads[rank:], more, strict=True)
        return windows._replace(begin=tuple(pads[:rank]), end=tuple(max(p - m, 0) for p, m in behind))
    # The padding follows from the output's size: as given, or with auto_pad the input's size times the stride.
    begin, end = [], []
    for axis, (stride, extent, extra) in enumerate(zip(strides, extents(windows, weight), more, strict=True)):
        total = add(extent, extra - stride)
        if wanted is not None:
            total = add(add(total, multiply(size_of(node.x, 2 + axis), stride)), -wanted[-rank:][axis])
        first, _ = split_padding(node.op, total, mode == "SAME_UPPER")
        begin.append(first)
        end.append(bounded(node.op, subtract(subtract(total, extra), first)))
    return windows._replace(begin=tuple(begin), end=tuple(end))


# dw in standard operators is a matmul for each position of the kernel, or one convolution. Milliseconds on two cores
# (x is batch x channels x size; the last column is PyTorch's own, where it was measured undisturbed):
#
#   layer                                 per position   convolution   PyTorch
#   32 x 64 x 32 x 32, 3 x 3, 64 filters      12.9          32.9         7.0
#   4 x 256 x 14 x 14, 3 x 3, 256              3.1           7.5         2.4
#   4 x 512 x 7 x 7, 3 x 3, 512                4.8           6.8         3.9
#   4 x 64 x 56 x 56, 3 x 3 stride 2, 128      1.8           4.3         1.2
#   64 x 1 x 28 x 28, 5 x 5, 6                 0.64          0.60        0.21
#   64 x 6 x 14 x 14, 5 x 5, 16                0.82          0.39        0.29
#   64 x 3 x 32 x 32, 3 x 3, 16                8.0           3.1
#   4 x 3 x 224 x 224, 7 x 7 stride 2, 64     28             6.6         3.3
#   8 x 3 x 224 x 224, 16 x 16 stride 16       9.9           1.7         1.6
#   4 x 64 x 56 x 56, 1 x 1, 256               1.6           7.8         1.6
#
#   depthwise                             multiply and sum   the same, channels last   convolution
#   4 x 96 x 56 x 56, 3 x 3                     3.1                4.2                     5.0
#   4 x 192 x 28 x 28, 3 x 3                    2.3                4.8                     6.5
#   4 x 192 x 28 x 28, 3 x 3 stride 2           1.7                0.74                    0.77
#   4 x 960 x 7 x 7, 3 x 3                      1.3                0.44                    0.86
#   4 x 96 x 28 x 28, 7 x 7                     4.4                5.0                     3.1
#
# There is no form with one matmul over all positions side by side, for few channels and kernels of one position.
# Removing it changed the time of a step without kernels to 0.93 (LeNet-5), 0.99 (six convolutions), 0.99 (ResNet-18)
# and 1.00 (U-Net), although a first layer of 3 channels, 3 x 3, alone takes 2.4 times as long.
FEW_CHANNELS = 8
"""Up to this many channels the convolution is faster: a matmul per position is too narrow."""

MANY_POSITIONS = 25
SMALL_IMAGE = 256


def weight_gradient(windows: Windows, x: Value, dy: Value, weight: Value, group: int) -> Value:
    """dw[o, c, k] = Σ_{n, p} dy[n, o, p] x[n, c, window p at k], per group of channels.

    Small depthwise filters are a special case: the second derivative of the convolution is a grouped transposed
    convolution, which ONNX's reference evaluator does not compute (workarounds: evaluated ConvTranspose).
    """
    static = weight.static_shape
    if static is None or windows.kernel is None:
        return _as_convolution(windows, x, dy, weight, group)
    if group > 1:
        depthwise = static[1] == 1 and static[0] == group
        return _depthwise(windows, x, dy, weight) if depthwise else _per_group(windows, x, dy, static, group)
    if static[1] <= FEW_CHANNELS:
        return _as_convolution(windows, x, dy, weight, group)
    return _per_position(windows, x, dy, static)


def _pixels(value: Value) -> int:
    """The number of spatial positions to reshape to, or -1 where unknown; for an empty batch -1 is ambiguous."""
    sizes = spatial_sizes(value)
    return -1 if sizes is None else math.prod(sizes)


def _per_position(windows: Windows, x: Value, dy: Value, static: tuple[int, ...]) -> Value:
    """One matmul per position of the kernel, over batch and windows at once; x with channels last."""
    op, rank, (outputs, inputs, *_) = windows.op, windows.rank, static
    axes = range(1, 1 + rank)
    left = op.reshape(op.Transpose(dy, perm=[1, 0, *windows.axes]), (outputs, -1))
    padded = windows.padded(op.Transpose(x, perm=[0, *windows.axes, 1]), axes)
    products = [
        op.Gemm(left, op.reshape(windows.at(padded, position, axes), (-1, inputs))) for position in windows.positions
    ]
    stacked = op.reshape(op.Concat(*products, axis=0), (len(products), outputs, inputs))
    return op.reshape(op.Transpose(stacked, perm=[1, 2, 0]), static)


def _per_group(windows: Windows, x: Value, dy: Value, static: tuple[int, ...], group: int) -> Value:
    """One matmul per position of the kernel, with the groups as a batch axis."""
    op, rank, (outputs, inputs, *_) = windows.op, windows.rank, static
    axes = range(2, 2 + rank)
    split = op.Reshape(dy, op.ints(0, group, outputs // group, _pixels(dy)))
    left = op.reshape(op.Transpose(split, perm=[1, 2, 0, 3]), (group, outputs // group, -1))
    kept = [0] * (1 + rank)
    last = op.Reshape(op.Transpose(x, perm=[0, *windows.axes, 1]), op.ints(*kept, group, inputs))
    padded = windows.padded(op.Transpose(last, perm=[1 + rank, *range(1 + rank), 2 + rank]), axes)
    products = []
    for position in windows.positions:
        rows = op.reshape(windows.at(padded, position, axes), (group, -1, inputs))
        products.append(op.MatMul(left, rows))
    together = op.Concat(*products, axis=0) if len(products) > 1 else products[0]
    stacked = op.reshape(together, (len(products), group, outputs // group, inputs))
    return op.reshape(op.Transpose(stacked, perm=[1, 2, 3, 0]), static)


def _depthwise(windows: Windows, x: Value, dy: Value, weight: Value) -> Value:
    """One filter per channel: multiplications and sums instead of matmuls."""
    op, rank, shape = windows.op, windows.rank, weight.static_shape
    assert shape is not None
    if len(windows.positions) >= MANY_POSITIONS:
        return _as_convolution(windows, x, dy, weight, shape[0])
    sizes = spatial_sizes(dy)
    small = sizes is not None and math.prod(sizes) <= SMALL_IMAGE
    channels_last = small or set(windows.strides) != {1}
    axes = range(1, 1 + rank) if channels_last else windows.axes
    order = [0, *windows.axes, 1]
    padded = windows.padded(op.Transpose(x, perm=order) if channels_last else x, axes)
    factor = op.Transpose(dy, perm=order) if channels_last else dy
    over = op.ints(0, *axes)
    sums = [
        op.ReduceSum(windows.at(padded, position, axes) * factor, over, keepdims=1) for position in windows.positions
    ]
    if channels_last:
        together = op.Concat(*sums, axis=0) if len(sums) > 1 else sums[0]
        return op.reshape(op.Transpose(together, perm=[1 + rank, *range(1, 1 + rank), 0]), shape)
    return op.reshape(op.Concat(*sums, axis=1 + rank) if len(sums) > 1 else sums[0], shape)


def _as_convolution(windows: Windows, x: Value, dy: Value, weight: Value, group: int) -> Value:
    """Convolve x with dy as the kernel: batch and channels are exchanged, and so are strides and dilations."""
    op, rank, pads = windows.op, windows.rank, windows.pads
    source = x if pads is not None else windows.padded(x, windows.axes)
    spatial = list(windows.axes)
    kernel, image = op.Transpose(dy, perm=[1, 0, *spatial]), op.Transpose(source, perm=[1, 0, *spatial])
    if group > 1:
        image = _group_channels(op, source, group, spatial)
    result = op.Conv(
        image,
        kernel,
        **unless_default(group=group, strides=windows.dilations, dilations=windows.strides, pads=pads or ()),
    )
    if set(windows.strides) != {1} and not _fits_exactly(windows, x, dy):
        ends = op.ints(*windows.kernel) if windows.kernel is not None else op.Shape(weight, start=2)
        result = op.Slice(result, op.ints(*[0] * rank), ends, op.ints(*spatial))
    return op.Transpose(result, perm=[1, 0, *spatial])


def _group_channels(op: Builder, x: Value, group: int, spatial: list[int]) -> Value:
    """[batch, inputs, ...] to [inputs / group, group * batch, ...]."""
    batch, sizes = op.Shape(x, end=1), op.Shape(x, start=2)
    channels = op.Shape(x, start=1, end=2) / np.asarray([group])
    groups = op.ints(group)
    split = op.reshape(x, op.Concat(batch, groups, channels, sizes, axis=0))
    turned = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in spatial)])
    return op.reshape(turned, op.Concat(channels, batch * groups, sizes, axis=0))


def _fits_exactly(windows: Windows, x: Value, dy: Value) -> bool:
    """Return whether the last window ends where the padded axis ends, on every axis."""
    sizes, counts, pads = spatial_sizes(x), spatial_sizes(dy), windows.pads
    if pads is None or windows.kernel is None or sizes is None or counts is None:
        return False
    reached = [s * (n - 1) + e for s, n, e in zip(windows.strides, counts, windows.extent, strict=True)]
    padded = [n + b + e for n, b, e in zip(sizes, pads, pads[windows.rank :], strict=False)]
    return reached == padded
