"""Slice and Pad: each one's gradient is nearly the other."""

from __future__ import annotations

from typing import NamedTuple

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import (
    LAST,
    Size,
    add,
    bounded,
    flat_positions,
    flat_scatter,
    from_start,
    joined,
    multiply,
    pad_to,
    reversed_along,
    shaped,
    size_of,
    sizes_of,
    subtract,
)
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value


class _Axis(NamedTuple):
    """One axis of a slice: its start (before clamping) and its step."""

    axis: int
    start: Size
    step: int


@register_gradient("Slice", since=10)
def slice_(node: Node, dy: Value) -> Gradients:
    """y_i = x_{start + i step} along some axes: dx = dy at these positions, zeros elsewhere."""
    op = node.op
    axes = _sliced_axes(node)
    if axes is None:
        positions = op.Slice(flat_positions(node.x), *node.inputs[1:])
        return flat_scatter(node.x, positions, dy)
    block = dy
    begins: list[Size] = []
    for axis in axes:
        begin, block = _spread_axis(node, axis, block)
        begins.append(begin)
    numbers = [axis.axis for axis in axes]
    return pad_to(block, numbers, begins, sizes_of(node.x, numbers))


def _sliced_axes(node: Node) -> list[_Axis] | None:
    """The axes that are cut, or ``None`` where axes, steps or the rank are known in the graph only."""
    op, starts = node.op, node.input_required(1)
    axes, steps = node.input(3), node.input(4)
    count = None if starts.shape is None else starts.shape[0]
    if not isinstance(count, int):
        return None
    numbers = range(count) if axes is None else axes.constant()
    strides = [1] * count if steps is None else steps.constant()
    if numbers is None or strides is None:
        return None
    if node.x.rank is None and any(int(step) != 1 for step in strides):
        return None
    given = starts.constant()
    found = []
    for index, (axis, step) in enumerate(zip(numbers, strides, strict=True)):
        if step == 1 and _untouched(node, int(axis)):
            continue
        start: Size
        if given is not None:
            start = int(given[index])
        else:
            single = starts if count == 1 else op.Slice(starts, op.ints(index), op.ints(index + 1))
            start = op.cast(single, op.ints(0).dtype)
        found.append(_Axis(int(axis), start, int(step)))
    return found


def _untouched(node: Node, axis: int) -> bool:
    before, after = node.x.shape, node.y.shape
    if before is None or after is None:
        return False
    return before[axis] is not None and before[axis] == after[axis]


def _spread_axis(node: Node, axis: _Axis, block: Value) -> tuple[Size, Value]:
    """The begin of the block along an axis, and the block in x's order with its elements the step apart."""
    op = node.op
    size = size_of(node.x, axis.axis)
    start = _clamped(op, axis, size)
    if axis.step == 1:
        return start, block
    if axis.step < 0:
        count = size_of(block, axis.axis)
        start = add(start, multiply(subtract(count, 1), axis.step))
        block = reversed_along(block, axis.axis)
    if abs(axis.step) > 1:
        block = _interleaved(block, axis.axis % node.rank(), abs(axis.step))
    # An empty block has no first element; it may lie anywhere.
    return bounded(op, start, subtract(size, size_of(block, axis.axis))), block


def _clamped(op: Builder, axis: _Axis, size: Size) -> Size:
    """The first index taken, as Slice clamps it."""
    start = axis.start
    last = size if axis.step > 0 else subtract(size, 1)
    if isinstance(start, int):
        if start == 0:
            return 0
        start = start if start > 0 else add(size, max(start, -LAST))
    else:
        start = from_start(start, size)
    return bounded(op, start, last)


def _interleaved(value: Value, axis: int, step: int) -> Value:
    """The elements along an axis with step - 1 zeros between neighbours."""
    op = value.op
    assert value.rank is not None
    before, count = sizes_of(value, range(axis)), size_of(value, axis)
    after = sizes_of(value, range(axis + 1, value.rank))
    column = shaped(value, [*before, count, 1, *after])
    wide = pad_to(column, [axis + 1], [0], [step])
    long = shaped(wide, [*before, multiply(count, step), *after])
    cut = op.Slice(long, op.ints(0), op.ints(1 - step), op.ints(axis))
    length = max(count * step - step + 1, 0) if isinstance(count, int) else None
    known = [size if isinstance(size, int) else None for size in (*before, length, *after)]
    return cut.with_shape(tuple(known))


@register_gradient("Pad", since=18)
def pad(node: Node, dy: Value) -> Gradients:
    """y = x with a border: dx = the inner part of dy, plus what the border copied; dc = the rest."""
    mode = node.attribute("mode", "constant")
    if mode != "constant":
        return _pad_copying(node, dy, mode)
    op, value = node.op, node.input(2)
    dx = _inner(node, dy)
    if value is None:
        return dx
    rest = op.ReduceSum(dy, keepdims=0) - op.ReduceSum(dx, keepdims=0)
    return dx, None, op.reshape_like(rest, value), None


def _inner(node: Node, dy: Value) -> Value:
    """The gradient without its border; zeros where the padding was negative."""
    op, pads, axes = node.op, node.input_required(1), node.input(3)
    known = pads.constant()
    if known is None:
        begins, ends = op.several("Split", pads, outputs=2, num_outputs=2)
        zero = op.ints(0)
        sizes = op.Shape(dy) if axes is None else op.Gather(op.Shape(dy), axes)
        inner = op.Slice(dy, op.Max(begins, zero), sizes - op.Max(ends, zero), axes)
        return op.Pad(inner, op.Max(op.Neg(pads), zero), None, axes)
    count = len(known) // 2
    numbers = range(count) if axes is None else axes.constant()
    starts, stops = known[:count].tolist(), known[count:].tolist()
    if numbers is not None:
        kept = [i for i in range(count) if starts[i] or stops[i]]
        if not kept:
            return dy
        axes = op.ints(*(int(numbers[i]) for i in kept))
        starts, stops = [starts[i] for i in kept], [stops[i] for i in kept]
    inner = dy
    if max((*starts, *stops), default=0) > 0:
        first = op.ints(*(max(start, 0) for start in starts))
        last = op.ints(*(-stop if stop > 0 else LAST for stop in stops))
        inner = op.Slice(dy, first, last, axes)
    if min((*starts, *stops), default=0) < 0:
        inner = op.Pad(inner, op.ints(*(max(-pad, 0) for pad in (*starts, *stops))), None, axes)
    return inner


def _pad_copying(node: Node, dy: Value, mode: str) -> Value:
    op, x = node.op, node.x
    pads = _known_pads(node)
    if pads is None or not all(_copied_once(x, mode, *pad) for pad in pads):
        positions = op.Pad(flat_positions(x), *node.inputs[1:], mode=mode)
        return flat_scatter(x, positions, dy)
    for axis, begin, end in reversed(pads):
        dy = _fold(dy, mode, axis, begin, end, size_of(x, axis))
    return dy


def _known_pads(node: Node) -> list[tuple[int, int, int]] | None:
    """(axis, begin, end) of the axes that are padded, or ``None`` where only the graph knows."""
    known, given = node.input_required(1).constant(), node.input(3)
    if known is None:
        return None
    count = len(known) // 2
    axes = range(count) if given is None else given.constant()
    if axes is None:
        return None
    pads = zip(axes, known[:count].tolist(), known[count:].tolist(), strict=True)
    return [(int(axis), begin, end) for axis, begin, end in pads if begin or end]


def _copied_once(x: Value, mode: str, axis: int, begin: int, end: int) -> bool:
    """Return whether each side of the border copies an element at most once (repeated reflections copy more)."""
    if min(begin, end) < 0:
        return False
    if mode == "edge":
        return True
    size = None if x.shape is None else x.shape[axis]
    return isinstance(size, int) and max(begin, end) <= (size - 1 if mode == "reflect" else size)


def _fold(dy: Value, mode: str, axis: int, begin: int, end: int, size: Size) -> Value:
    """Add the border of one axis to the elements that it copies."""
    op = dy.op
    where = op.ints(axis)
    inner = op.Slice(dy, op.ints(begin), op.ints(-end if end else LAST), where)
    shape = dy.shape
    if shape is not None and isinstance(size, int):
        position = axis % len(shape)
        inner.with_shape((*shape[:position], size, *shape[position + 1 :]))
    parts = [inner]
    for length, first, last in ((begin, 0, begin), (end, -end, LAST)):
        if not length:
            continue
        front = first == 0
        border = op.Slice(dy, op.ints(first), op.ints(last), where)
        target: Size
        if mode == "edge":
            border = op.ReduceSum(border, where, keepdims=1)
            length, target = 1, 0 if front else subtract(size, 1)
        elif mode == "reflect":
            border = reversed_along(border, axis)
            target = 1 if front else subtract(size, end + 1)
        else:
            target = subtract(size, begin) if front else 0
        behind = subtract(subtract(size, target), length)
        parts.append(op.Pad(border, joined(op, [target, behind]), None, where))
    return op.sum_of(parts)
