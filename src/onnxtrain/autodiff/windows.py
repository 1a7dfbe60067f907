"""Sliding windows of convolutions and poolings: their positions, gathering from them and scattering to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onnxtrain.autodiff.node import Node
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import check_positions

END = np.iinfo(np.int64).max
"""An end of a slice beyond every axis."""


class Windows(NamedTuple):
    """Windows over the spatial axes of ``x`` [batch, channels, spatial...], one per position of an output."""

    op: Builder
    x: Value
    kernel: tuple[int, ...] | None
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...] | Value
    end: tuple[int, ...] | Value
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
        if isinstance(self.begin, Value) or isinstance(self.end, Value):
            return None
        return [*self.begin, *self.end]

    def padded(self, value: Value, axes: Sequence[int]) -> Value:
        """``x``, or a transposition of it, padded with zeros so that every window lies inside."""
        op, where = self.op, self.op.ints(*axes)
        if isinstance(self.begin, Value) or isinstance(self.end, Value):
            begin = self.begin if isinstance(self.begin, Value) else op.ints(*self.begin)
            end = self.end if isinstance(self.end, Value) else op.ints(*self.end)
            return op.Pad(value, op.Concat(begin, end, axis=0), None, where)
        pads = [*self.begin, *self.end]
        return op.Pad(value, op.ints(*pads), None, where) if any(pads) else value

    def at(self, padded: Value, position: Sequence[int], axes: Sequence[int]) -> Value:
        """The element at one position of every window: a strided slice of the padded values."""
        assert self.kernel is not None
        offsets = [d * k for d, k in zip(self.dilations, position, strict=True)]
        behind = [e - 1 - o for e, o in zip(self.extent, offsets, strict=True)]
        if not any(offsets) and not any(behind) and set(self.strides) == {1}:
            return padded
        op = self.op
        ends = op.ints(*(-b if b else END for b in behind))
        steps = None if set(self.strides) == {1} else op.ints(*self.strides)
        return op.Slice(padded, op.ints(*offsets), ends, op.ints(*axes), steps)

    def scatter(
        self, dy: Value, weight: Value, group: int = 1, like: Value | None = None, shape: Value | None = None
    ) -> Value:
        """The transposed convolution of ``dy`` that has exactly the spatial size of ``like`` (or ``x``).

        ``shape`` is the shape of ``like`` where the graph must not read ``like`` itself.
        """
        like = self.x if like is None else like
        sizes, counts = spatial_sizes(like), spatial_sizes(dy)
        if self.pads is not None and self.kernel is not None and sizes is not None and counts is not None:
            full = [
                s * (n - 1) + e - b for s, n, e, b in zip(self.strides, counts, self.extent, self.pads, strict=False)
            ]
            surplus = [f - size for f, size in zip(full, sizes, strict=True)]
            return self._transposed(dy, weight, group, [max(s, 0) for s in surplus], [max(-s, 0) for s in surplus])
        if self.pads is not None and self.exact_end and set(self.strides) == {1}:
            return self._transposed(dy, weight, group, self.pads[self.rank :], [0] * self.rank)
        op = self.op
        size = op.Shape(like, start=2) if shape is None else op.Slice(shape, op.ints(2), op.ints(END))
        return self._cropped(dy, weight, group, size)

    def _transposed(self, dy: Value, weight: Value, group: int, end: Sequence[int], more: Sequence[int]) -> Value:
        begin = [0] * self.rank if self.pads is None else self.pads[: self.rank]
        return self.op.ConvTranspose(
            dy,
            weight,
            group=None if group == 1 else group,
            strides=_unless_all(self.strides, 1),
            dilations=_unless_all(self.dilations, 1),
            pads=_unless_all([*begin, *end], 0),
            output_padding=_unless_all(more, 0),
            kernel_shape=self.kernel,
        )

    def _cropped(self, dy: Value, weight: Value, group: int, size: Value) -> Value:
        """The transposed convolution for unknown sizes: computed as large as possible, then cut in the graph."""
        op = self.op
        most = self._transposed(dy, weight, group, [0] * self.rank, [s - 1 for s in self.strides])
        if self.pads is not None:
            start = op.ints(*[0] * self.rank)
        else:
            start = self.begin if isinstance(self.begin, Value) else op.ints(*self.begin)
        end = size if self.pads is not None else start + size
        return op.Slice(most, start, end, op.ints(*self.axes))


def spatial_sizes(value: Value) -> tuple[int, ...] | None:
    """The sizes of the spatial axes, where all are known."""
    if value.shape is None:
        return None
    sizes = tuple(size for size in value.shape[2:] if isinstance(size, int))
    return sizes if len(sizes) == len(value.shape) - 2 else None


def _unless_all(numbers: Sequence[int], default: int) -> list[int] | None:
    """An attribute; ``None`` where it equals its default."""
    return None if set(numbers) <= {default} else list(numbers)


def windows_of(node: Node, weight: Value | None = None, x: Value | None = None) -> Windows:
    """The windows of a node with the attributes of Conv or a pooling, over ``x`` (by default its first input)."""
    x = node.x if x is None else x
    kernel, rank = kernel_of(node, weight)
    strides = tuple(node.attribute("strides") or [1] * rank)
    dilations = tuple(node.attribute("dilations") or [1] * rank)
    exact = not node.attribute("ceil_mode", 0)
    windows = Windows(node.op, x, kernel, strides, dilations, (0,) * rank, (0,) * rank, exact)
    begin, end = _padding(node, windows, weight)
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


def _padding(
    node: Node, windows: Windows, weight: Value | None
) -> tuple[tuple[int, ...] | Value, tuple[int, ...] | Value]:
    """The padding at the beginning and end of all axes."""
    mode, rank, kernel, strides = node.attribute("auto_pad", "NOTSET"), windows.rank, windows.kernel, windows.strides
    if mode in ("NOTSET", "VALID"):
        pads = (node.attribute("pads") if mode == "NOTSET" else None) or [0] * (2 * rank)
        return tuple(pads[:rank]), tuple(pads[rank:])
    sizes = spatial_sizes(windows.x)
    if kernel is not None and (sizes is not None or set(strides) == {1}):
        totals = [
            max(s * (math.ceil(size / s) - 1) + d * (k - 1) + 1 - size, 0)
            for size, s, d, k in zip(sizes or [1] * rank, strides, windows.dilations, kernel, strict=True)
        ]
        small = tuple(total // 2 for total in totals)
        large = tuple(total - total // 2 for total in totals)
        return (small, large) if mode == "SAME_UPPER" else (large, small)
    return _padding_in_graph(node, windows, weight)


def _padding_in_graph(node: Node, windows: Windows, weight: Value | None) -> tuple[Value, Value]:
    """Emit the padding of auto_pad for axes of unknown size."""
    op, strides, dilations = node.op, windows.strides, windows.dilations
    size, step = op.Shape(windows.x, start=2), op.ints(*strides)
    if windows.kernel is not None:
        positions = op.ints(*windows.kernel)
    else:
        assert weight is not None
        positions = op.Shape(weight, start=2)
    extent = (positions - np.ones_like(dilations)) * np.asarray(dilations) + np.ones_like(dilations)
    last = (size - np.ones_like(strides)) / step * step  # where the last window begins
    return split_padding(op, last + extent - size, node.attribute("auto_pad") == "SAME_UPPER")


def split_padding(op: Builder, total: Value, upper: bool) -> tuple[Value, Value]:
    """Halve a total that only the graph knows; ``upper`` puts the odd element at the end."""
    total = op.Max(total, op.constant(0, np.int64))
    small = total / 2
    large = total - small
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
