"""The discrete Fourier transform and its short-time form.

Both are linear maps of real numbers: the gradient is the transposed map, which is the conjugate transform.
Zeros that lengthen a signal drop out of its gradient, samples that were cut off get zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.placement import (
    Size,
    add,
    as_number,
    as_value,
    count_to,
    joined,
    multiply,
    pad_to,
    product,
    shaped,
    size_of,
    zeros,
)
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension

LONGEST, SMOOTH = 4096, 2 * 3 * 5 * 7 * 11 * 13
"""Of the kernel: its longest transform (more lines leave the caches), and the product of the primes that it takes."""


@register_gradient("DFT")
def dft(node: Node, dy: Value) -> Gradients:
    """y = F x with F_kn = exp(-2πi k n / N): dx = Fᴴ dy; y = Fᴴ x / N: dx = F dy / N; real parts where x is real.

    A one-sided y lacks the upper half of its bins, which counts as zeros. In a one-sided inverse every bin but
    the first and the middle one counts twice.
    """
    op, x = node.op, node.x
    axis = axis_of(node)
    one_sided = node.attribute("onesided", 0) == 1
    inverse = node.attribute("inverse", 0) == 1
    length = length_of(node, axis, halves=one_sided and inverse)
    count = as_number(op, length, x.dtype)
    if one_sided and inverse:
        bins = transform(op, dy, axis, length, onesided=1)
        dx = bins * (_multiplicity(op, bins, axis, length, x) / count)
        cut = op.Slice(dx, op.ints(0), as_value(op, size_of(x, axis)), op.ints(axis))
        return pad_to(cut, [axis], [0], [size_of(x, axis)]), None, None
    return _transposed(op, dy, axis, length, x.shape, [size_of(x, axis), size_of(x, -1)], inverse=inverse), None, None


def _transposed(
    op: Builder,
    dy: Value,
    axis: int,
    length: Size,
    shape: tuple[Dimension, ...] | None,
    sizes: Sequence[Size],
    inverse: bool,
) -> Value:
    """The transposed map, to a shape with such sizes of the axis and of the last one: 1 where x is real."""
    if all(isinstance(size, int) for size in (length, *sizes)):
        numbers = {"length": length, "bins": sizes[0], "parts": sizes[1], "inverse": int(not inverse)}
        dx = emit(op, "Fourier", dy, like=[dy], axis=axis, divided=int(inverse), **numbers)[0]
    else:
        dx = _bins(op, dy, axis, length, sizes, not inverse, inverse)
    return dx.with_shape(shape)


def smooth(length: int, bins: int) -> bool:
    """Return whether the kernel computes so many bins: of a length without a large prime factor."""
    return bins <= length <= LONGEST and SMOOTH ** math.ceil(math.log2(LONGEST)) % length == 0


@register_fused(
    "Fourier", has_kernel=lambda node: smooth(*(node.attributes[name].as_int() for name in ("length", "bins")))
)
def fourier(node: Node) -> Sequence[Value]:
    """The first bins of a DFT, one part of each where they are real, inverse or not, divided by the length or not."""
    axis, length, *rest = (node.attribute(name) for name in ("axis", "length", "bins", "parts", "inverse", "divided"))
    return [_bins(node.op, node.x, axis, length, rest[:2], *rest[2:])]


def axis_of(node: Node) -> int:
    """The transformed axis: an attribute up to opset 19, then an input."""
    if node.op.opset < 20:
        return int(node.attribute("axis", 1))
    given = node.input(2)
    if given is None:
        return -2
    known = given.constant()
    if known is None:
        raise GradientError(
            f"{describe(node.ir)}: the gradient needs a constant axis, but {given.name!r} is computed; make it an "
            "initializer."
        ).about(given.name)
    return int(known.reshape(()))


def length_of(node: Node, axis: int, *, halves: bool) -> Size:
    """The length of the transform, by default that of x, of which a one-sided inverse has half."""
    given = node.input(1)
    if given is None:
        size = size_of(node.x, axis)
        return multiply(add(size, -1), 2) if halves else size
    return as_size(given)


def as_size(value: Value) -> Size:
    """The number in a value, where it is known."""
    known = value.constant()
    if known is not None:
        return int(known.reshape(()))
    op = value.op
    return op.cast(op.Reshape(value, op.ints(1)), op.ints(0).dtype)


def transform(op: Builder, value: Value, axis: int, length: Size, **attributes: int) -> Value:
    """DFT in the form of its opset."""
    scalar = op.constant(length, np.int64) if isinstance(length, int) else op.Reshape(length, op.ints())
    if op.opset < 20:
        return op.DFT(value, scalar, axis=axis, **attributes)
    return op.DFT(value, scalar, op.constant(axis, np.int64), **attributes)


def _multiplicity(op: Builder, bins: Value, axis: int, length: Size, x: Value) -> Value:
    """1 for the first bin and the middle one of an even length, 2 for the others, along the axis."""
    number = count_to(op, size_of(bins, axis))
    middle = op.Equal(op.Add(number, number), as_value(op, length))
    single = op.Or(op.Equal(number, op.ints(0)), middle)
    factor = op.Where(single, op.scalar(1, x), op.scalar(2, x))
    behind = -axis - 1 if axis < 0 else None
    if behind is None:
        rank = bins.rank if bins.rank is not None else x.rank
        if rank is None:
            raise GradientError(
                f"DFT: the gradient of a one-sided transform along axis {axis} needs the rank of {x.name!r}, which "
                "shape inference could not find; count it from the end, or add its shape to value_info."
            )
        behind = rank - axis - 1
    return op.Reshape(factor, op.ints(-1, *[1] * behind))


def _bins(
    op: Builder, value: Value, axis: int, length: Size, sizes: Sequence[Size], inverse: bool, divided: bool
) -> Value:
    """The transform, cut or padded to the sizes along its axis and the last one."""
    found = transform(op, value, axis, length, **({"inverse": 1} if inverse else {}))
    if inverse and not divided:
        found = found * as_number(op, length, value.dtype)
    elif divided and not inverse:
        found = found / as_number(op, length, value.dtype)
    cut = op.Slice(found, op.ints(0, 0), joined(op, sizes), op.ints(axis, -1))
    return pad_to(cut, [axis], [0], sizes[:1])


@register_gradient("STFT")
def stft(node: Node, dy: Value) -> Gradients:
    """y[f] = F (w x_f), x_f the frame of x that begins at f step: dx_f = w Fᴴ dy[f], dw = sum_f x_f Fᴴ dy[f]."""
    op, x, window = node.op, node.x, node.input(2)
    step = as_size(node.input_required(1))
    length = frame_length(node)
    if x.shape is not None and len(x.shape) == 2:  # PyTorch's older exporter leaves out the last axis
        x = op.Unsqueeze(x, op.ints(-1)).with_shape((*x.shape, 1))
    frames = _transposed(op, dy, 2, length, (None, None, None, None), [length, size_of(x, 2)], inverse=False)
    batch, samples, parts, count = size_of(x, 0), size_of(x, 1), size_of(x, 2), size_of(dy, 1)
    starts = op.Mul(count_to(op, count), as_value(op, step))
    positions = op.Reshape(op.Add(op.Unsqueeze(starts, op.ints(1)), count_to(op, length)), op.ints(-1))
    flat = [batch, multiply(count, length), parts]
    weighted = frames if window is None else frames * op.Unsqueeze(window, op.ints(1))
    updates = shaped(weighted, flat)
    indices = op.Expand(op.Unsqueeze(positions, op.ints(0, 2)), op.shape_of(updates))
    dx = op.ScatterElements(zeros(op, [batch, samples, parts], x.dtype), indices, updates, axis=1, reduction="add")
    dx = dx if x is node.x else op.Squeeze(dx, op.ints(-1))
    if window is None:
        return dx, None, None, None
    taken = op.Gather(x, positions, axis=1)
    products = shaped(taken * shaped(frames, flat), [product([batch, count]), length, parts])
    return dx, None, op.ReduceSum(products, op.ints(0, 2), keepdims=0), None


def frame_length(node: Node) -> Size:
    """The length of the frames of an STFT."""
    given, window = node.input(3), node.input(2)
    if given is not None:
        return as_size(given)
    return size_of(node.x, 1) if window is None else size_of(window, 0)
