"""Sliding windows of convolutions and poolings: their positions, gathering from them and scattering to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import LAST, Size, add, bounded, divide, joined, multiply, size_of, subtract
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import check_positions


class Windows(NamedTuple):
    """Windows over the spatial axes of ``x`` [batch, channels, spatial...], one per position of an output."""

    op: Builder
    x: Value
    kernel: tuple[int, ...] | None
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[Size, ...]
    end: tuple[Size, ...]
    exact_end: bool = True

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.strides)

    @property
    def axes(self) -> range:
        """The spatial axes of ``x``."""
        return range(2, 2 + self.rank)

    @property
    def positions(self) -> list[tuple[int, ...]]:
        """All positions in a window, row by row."""
        assert self.kernel is not None
        check_positions(*self.kernel)
        return list(np.ndindex(*self.kernel))

    @property
    def extent(self) -> tuple[int, ...]:
        """The size of a window per axis."""
        assert self.kernel is not None
        return tuple(d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True))

    @property
    def pads(self) -> list[int] | None:
        """The padding as an attribute of a node; ``None`` where only the graph can tell."""
        pads = [pad for pad in (*self.begin, *self.end) if isinstance(pad, int)]
        return pads if len(pads) == 2 * self.rank else None

    def padded(self, value: Value, axes: Sequence[int]) -> Value:
        """``x``, or a transposition of it, padded with zeros so that every window lies inside."""
        if self.pads is not None and not any(self.pads):
            return value
        return self.op.Pad(value, joined(self.op, [*self.begin, *self.end]), None, self.op.ints(*axes))

    def at(self, padded: Value, position: Sequence[int], axes: Sequence[int]) -> Value:
        """The element at one position of every window: a strided slice of the padded values."""
        assert self.kernel is not None
        offsets = [d * k for d, k in zip(self.dilations, position, strict=True)]
        behind = [e - 1 - o for e, o in zip(self.extent, offsets, strict=True)]
        if not any(offsets) and not any(behind) and set(self.strides) == {1}:
            return padded
        op = self.op
        ends = op.ints(*(-b if b else LAST for b in behind))
        steps = None if set(self.strides) == {1} else op.ints(*self.strides)
        return op.Slice(padded, op.ints(*offsets), ends, op.ints(*axes), steps)

    def scatter(self, dy: Value, weight: Value, group: int = 1, shape: Value | None = None) -> Value:
        """The transposed convolution of ``dy`` that has exactly the spatial size of ``x``.

        ``shape`` is the shape of ``x`` where the graph must not read ``x`` itself.
        """
        sizes, counts = spatial_sizes(self.x), spatial_sizes(dy)
        if self.pads is not None and self.kernel is not None and sizes is not None and counts is not None:
            full = [
                s * (n - 1) + e - b for s, n, e, b in zip(self.strides, counts, self.extent, self.pads, strict=False)
            ]
            surplus = [f - size for f, size in zip(full, sizes, strict=True)]
            return self._transposed(dy, weight, group, [max(s, 0) for s in surplus], [max(-s, 0) for s in surplus])
        if self.pads is not None and self.exact_end and set(self.strides) == {1}:
            return self._transposed(dy, weight, group, self.pads[self.rank :], [0] * self.rank)
        op = self.op
        size = op.Shape(self.x, start=2) if shape is None else op.Slice(shape, op.ints(2), op.ints(LAST))
        return self._cropped(dy, weight, group, size)

    def _transposed(self, dy: Value, weight: Value, group: int, end: Sequence[int], more: Sequence[int]) -> Value:
        begin = [0] * self.rank if self.pads is None else self.pads[: self.rank]
        return self.op.ConvTranspose(
            dy,
            weight,
            kernel_shape=self.kernel,
            **unless_default(group=group, strides=self.strides, dilations=self.dilations),
            **unless_default(pads=[*begin, *end], output_padding=more),
        )

    def _cropped(self, dy: Value, weight: Value, group: int, size: Value) -> Value:
        """The transposed convolution for unknown sizes: computed as large as possible, then cut in the graph."""
        op = self.op
        most = self._transposed(dy, weight, group, [0] * self.rank, [s - 1 for s in self.strides])
        start = joined(op, self.begin if self.pads is None else [0] * self.rank)
        return op.Slice(most, start, start + size if self.pads is None else size, op.ints(*self.axes))


def spatial_sizes(value: Value) -> tuple[int, ...] | None:
    """The sizes of the spatial axes, where all are known."""
    if value.shape is None:
        return None
    sizes = tuple(size for size in value.shape[2:] if isinstance(size, int))
    return sizes if len(sizes) == len(value.shape) - 2 else None


def unless_default(**attributes: int | Sequence[int]) -> dict[str, Any]:
    """The attributes of a convolution except those that equal their defaults."""

    def is_default(name: str, value: int | Sequence[int]) -> bool:
        numbers = {value} if isinstance(value, int) else set(value)
        return numbers <= {int(name in ("group", "strides", "dilations"))}

    return {name: value for name, value in attributes.items() if not is_default(name, value)}


def windows_of(node: Node, weight: Value | None = None, x: Value | None = None) -> Windows:
    """The windows of a node with the attributes of Conv or a pooling, over ``x`` (by default its first input)."""
    x = node.x if x is None else x
    kernel, rank = kernel_of(node, weight)
    strides = tuple(node.attribute("strides") or [1] * rank)
    dilations = tuple(node.attribute("dilations") or [1] * rank)
    exact = not node.attribute("ceil_mode", 0)
    windows = Windows(node.op, x, kernel, strides, dilations, (0,) * rank, (0,) * rank, exact)
    mode = node.attribute("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        pads = tuple((node.attribute("pads") if mode == "NOTSET" else None) or [0] * (2 * rank))
        return windows._replace(begin=pads[:rank], end=pads[rank:])
    pairs = []
    for axis, (stride, extent) in enumerate(zip(strides, extents(windows, weight), strict=True)):
        total = subtract(extent, 1)
        if stride != 1:
            size = size_of(x, 2 + axis)
            last = multiply(divide(subtract(size, 1), stride), stride)  # where the last window begins
            total = subtract(add(last, extent), size)
        pairs.append(split_padding(node.op, total, mode == "SAME_UPPER"))
    begin, end = zip(*pairs, strict=True)
    return windows._replace(begin=begin, end=end)


def kernel_of(node: Node, weight: Value | None) -> tuple[tuple[int, ...] | None, int]:
    """The kernel's size, where it is known, and the number of spatial axes."""
    given = node.attribute("kernel_shape")
    if given is None and weight is not None:
        given = spatial_sizes(weight)
    if given is not None:
        return tuple(given), len(given)
    for attribute, per_axis in (("strides", 1), ("dilations", 1), ("pads", 2), ("output_padding", 1)):
        listed = node.attribute(attribute)
        if listed is not None:
            return None, len(listed) // per_axis
    for value in (weight, node.y):
        if value is not None and value.rank is not None:
            return None, value.rank - 2
    return None, node.rank() - 2


def extents(windows: Windows, weight: Value | None) -> list[Size]:
    """The size of a window per axis, from the weight where the attributes do not tell."""
    kernel: Sequence[Size] | None = windows.kernel
    if kernel is None:
        assert weight is not None
        kernel = [size_of(weight, axis) for axis in windows.axes]
    return [add(multiply(subtract(k, 1), d), 1) for k, d in zip(kernel, windows.dilations, strict=True)]


def split_padding(op: Builder, total: Size, upper: bool) -> tuple[Size, Size]:
    """Halve the padding of an axis; ``upper`` puts the odd element at the end."""
    total = bounded(op, total)
    small = divide(total, 2)
    large = subtract(total, small)
    return (small, large) if upper else (large, small)


_LARGEST = 2**30
"""Largest pad and dilated kernel: native kernels index 2**31 - 1 elements along an axis, padding included."""

_MOST_COVERED = 2**26
"""Most elements that a dilated window may span: a native kernel copies them side by side."""

MOST_AXES = 3
"""Most spatial axes of native kernels."""


def windows_fit(
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    channels: int = 1,
) -> bool:
    """Return whether native kernels support windows with these attributes."""
    rank = len(kernel)
    if not 1 <= rank <= MOST_AXES or (len(strides), len(dilations), len(pads)) != (rank, rank, 2 * rank):
        return False
    if min(*kernel, *strides, *dilations) < 1 or min(pads) < 0 or max(pads) > _LARGEST:
        return False
    extents = [dilation * (size - 1) + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    return max(extents) <= _LARGEST and math.prod(extents) * max(channels, 1) <= _MOST_COVERED


def attributes_fit(node: ir.Node, channels: int = 1) -> bool:
    """Return whether native kernels support the windows of a node of a convolution or pooling."""
    attributes, rank = node.attributes, len(node.attributes["kernel_shape"].as_ints())
    defaults = {"kernel_shape": [], "strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * 2 * rank}
    kernel, strides, dilations, pads = (attributes.get_ints(name, other) for name, other in defaults.items())
    return windows_fit(kernel, strides, dilations, pads, channels)
