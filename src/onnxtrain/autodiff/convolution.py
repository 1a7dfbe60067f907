"""The gradient of a convolution by its weights in standard operators: a product for each position, or a convolution.

Milliseconds on two cores, of which the first is taken from 9 channels on, the second below (x is batch x
channels x size; the last column is PyTorch's own, where it was measured undisturbed):

    layer                                 per position   convolution   PyTorch
    32 x 64 x 32 x 32, 3 x 3, 64 filters      12.9          32.9         7.0
    4 x 256 x 14 x 14, 3 x 3, 256              3.1           7.5         2.4
    4 x 512 x 7 x 7, 3 x 3, 512                4.8           6.8         3.9
    4 x 64 x 56 x 56, 3 x 3 stride 2, 128      1.8           4.3         1.2
    64 x 1 x 28 x 28, 5 x 5, 6                 0.64          0.60        0.21
    64 x 6 x 14 x 14, 5 x 5, 16                0.82          0.39        0.29
    64 x 3 x 32 x 32, 3 x 3, 16                8.0           3.1
    4 x 3 x 224 x 224, 7 x 7 stride 2, 64     28             6.6         3.3
    8 x 3 x 224 x 224, 16 x 16 stride 16       9.9           1.7         1.6
    4 x 64 x 56 x 56, 1 x 1, 256               1.6           7.8         1.6

    depthwise                                products    products, channels last   convolution
    4 x 96 x 56 x 56, 3 x 3                     3.1                4.2                5.0
    4 x 192 x 28 x 28, 3 x 3                    2.3                4.8                6.5
    4 x 192 x 28 x 28, 3 x 3 stride 2           1.7                0.74               0.77
    4 x 960 x 7 x 7, 3 x 3                      1.3                0.44               0.86
    4 x 96 x 28 x 28, 7 x 7                     4.4                5.0                3.1

Depthwise filters have a form of their own, since that of a convolution has a second derivative, a transposed
convolution in groups, that ONNX's reference evaluator does not compute (workarounds: evaluated ConvTranspose).

There has been a form for few channels and kernels of one position: one product of all positions side by side. A step
without kernels takes, without it, 0.93 (LeNet-5), 0.99 (six convolutions), 0.99 (ResNet-18) and 1.00 (U-Net) of its
time with it. A first layer of 3 channels, 3 x 3, alone takes 2.4 times its own time.
"""

from __future__ import annotations

import math

import numpy as np

from onnxtrain.autodiff.windows import Windows, spatial_sizes
from onnxtrain.ir import Builder, Value

FEW_CHANNELS = 8
"""Up to as many channels, a product for each position is too narrow."""

MANY_POSITIONS = 25
SMALL_IMAGE = 256


def weight_gradient(windows: Windows, x: Value, dy: Value, weight: Value, group: int) -> Value:
    """dw[o, c, k] = Σ_{n, p} dy[n, o, p] x[n, c, window p at k], per group of channels.

    Args:
        windows: Those over ``x``.
        x: [batch, inputs, spatial...].
        dy: [batch, outputs, spatial...], one position per window.
        weight: Whose shape [outputs, inputs / group, kernel...] the result has.
        group: Number of groups of channels.
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
    """The number of spatial positions to reshape to, or -1: an empty batch does not tell it."""
    sizes = spatial_sizes(value)
    return -1 if sizes is None else math.prod(sizes)


def _per_position(windows: Windows, x: Value, dy: Value, static: tuple[int, ...]) -> Value:
    """One product per position of the kernel, over batch and windows at once; x with channels last."""
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
    """The same with the groups as a batch axis."""
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
    """One filter per channel: products and sums instead of matrices."""
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
    """A convolution of x with dy as its kernel, batch and channels exchanged, stride and dilation too."""
    op, rank, pads = windows.op, windows.rank, windows.pads
    source = x if pads is not None else windows.padded(x, windows.axes)
    spatial = list(windows.axes)
    kernel, image = op.Transpose(dy, perm=[1, 0, *spatial]), op.Transpose(source, perm=[1, 0, *spatial])
    if group > 1:
        image = _group_channels(op, source, group, spatial)
    result = op.Conv(
        image,
        kernel,
        group=None if group == 1 else group,
        strides=windows.dilations if set(windows.dilations) != {1} else None,
        dilations=windows.strides if set(windows.strides) != {1} else None,
        pads=pads if pads is not None and any(pads) else None,
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
    """Whether the last window ends where the padded axis ends, on every axis."""
    sizes, counts, pads = spatial_sizes(x), spatial_sizes(dy), windows.pads
    if pads is None or windows.kernel is None or sizes is None or counts is None:
        return False
    reached = [s * (n - 1) + e for s, n, e in zip(windows.strides, counts, windows.extent, strict=True)]
    padded = [n + b + e for n, b, e in zip(sizes, pads, pads[windows.rank :], strict=False)]
    return reached == padded
