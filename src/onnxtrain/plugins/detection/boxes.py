"""Boxes in a graph: their overlap (IoU, GIoU, CIoU), and the optimal assignment of boxes to slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.graph import Builder, Value

_EPSILON = 1e-7
"""Smallest area that something is divided by, and smallest height in an aspect ratio."""

_DUMMY = 1e3
"""Cost of no slot: above any difference of costs of slots."""


class Boxes(NamedTuple):
    """Boxes by their edges, values of one shape, or of shapes that broadcast."""

    left: Value
    top: Value
    right: Value
    bottom: Value

    @classmethod
    def around(cls, x: Value, y: Value, width: Value, height: Value) -> Boxes:
        """Return the boxes of these centres and sizes."""
        dx, dy = width * 0.5, height * 0.5
        return cls(x - dx, y - dy, x + dx, y + dy)

    def along(self, op: Builder, axis: int) -> Boxes:
        """Insert an axis of size 1."""
        return Boxes(*(op.Unsqueeze(edge, op.ints(axis)) for edge in self))

    @property
    def width(self) -> Value:
        """Horizontal size."""
        return self.right - self.left

    @property
    def height(self) -> Value:
        """Vertical size."""
        return self.bottom - self.top


class Overlap(NamedTuple):
    """Overlap of two boxes: intersection over union, the area of the union, and the box around both."""

    iou: Value
    union: Value
    around: Boxes


def overlap(op: Builder, a: Boxes, b: Boxes) -> Overlap:
    """Emit the overlap of boxes of non-negative sizes; that of two boxes of no area is 0."""
    wide = op.Relu(op.Min(a.right, b.right) - op.Max(a.left, b.left))
    high = op.Relu(op.Min(a.bottom, b.bottom) - op.Max(a.top, b.top))
    both = wide * high
    union = a.width * a.height + b.width * b.height - both + _EPSILON
    around = Boxes(op.Min(a.left, b.left), op.Min(a.top, b.top), op.Max(a.right, b.right), op.Max(a.bottom, b.bottom))
    return Overlap(both / union, union, around)


def generalized_iou(op: Builder, a: Boxes, b: Boxes) -> Value:
    """GIoU = IoU - (C - U) / C, with U the union and C the area of the box around both.

    Source: H. Rezatofighi et al., "Generalized Intersection over Union", CVPR 2019.
    """
    found = overlap(op, a, b)
    area = found.around.width * found.around.height + _EPSILON
    return found.iou - (area - found.union) / area


def complete_iou(op: Builder, a: Boxes, b: Boxes) -> Value:
    """CIoU = IoU - d^2 / c^2 - v^2 / (v - IoU + 1), the factor v / (v - IoU + 1) without gradient.

    Source: Z. Zheng et al., "Distance-IoU Loss", AAAI 2020.
    """
    found = overlap(op, a, b)
    around = found.around
    diagonal = around.width * around.width + around.height * around.height + _EPSILON
    dx = a.left + a.right - b.left - b.right
    dy = a.top + a.bottom - b.top - b.bottom
    distance = (dx * dx + dy * dy) * 0.25 / diagonal
    angle = _aspect(op, a) - _aspect(op, b)
    v = angle * angle * (4 / math.pi**2)
    factor = stopped(op, v / (v - found.iou + (1 + _EPSILON)))
    return found.iou - distance - v * factor


def _aspect(op: Builder, boxes: Boxes) -> Value:
    height = op.Max(boxes.height, op.scalar(_EPSILON, boxes.height))
    ratio = boxes.width / height
    return op.cast(op.Atan(op.cast(ratio, ir.DataType.FLOAT)), ratio.dtype)  # ONNX Runtime has no Atan of doubles


def assign(op: Builder, cost: Value, active: Value) -> Value:
    """Emit the box [N, Q] of each slot, -1 for none: the assignment of least total cost, as many boxes as have slots.

    Source: R. Jonker, A. Volgenant, "A shortest augmenting path algorithm for dense and sparse linear assignment
    problems", Computing 38, 1987.
    """
    size = op.dimension(cost, 1)
    slots = op.dimension(cost, 2)
    # With more boxes than slots, the rest goes to dummy slots.
    more = op.Relu(op.cast(size - slots, cost.dtype))
    pads = op.Concat(op.ints(0, 0, 0, 0, 0), op.cast(more, ir.DataType.INT64), axis=0)
    wide = op.Pad(cost, pads, op.scalar(_DUMMY, cost))
    columns = op.Shape(wide, start=2)
    flat = op.reshape(wide, op.Concat(op.ints(-1), columns, axis=0), known=(None, None))
    grid = op.Concat(op.Shape(wide, start=0, end=1), columns, axis=0)
    potential = op.Expand(op.scalar(0.0, cost), grid).with_shape((None, None))
    none = op.Expand(op.constant(-1, np.int64), grid).with_shape((None, None))
    images = op.Range(op.constant(0), op.reshape(op.Shape(wide, start=0, end=1), []), op.constant(1))
    first = op.Unsqueeze(images * size, op.ints(1))  # row in `flat` of the first box of each image
    body, (row, _), (v, taken) = _loop_body(op, "add box", [potential, none])
    here = body.Gather(active, body.Unsqueeze(row, body.ints(0)), axis=1)  # [N, 1]
    found = _search(body, flat, first, row, here, v, taken)
    body.output(body.constant(True))
    body.output(body.Where(found.done, v - (found.low - found.distance), v).with_shape((None, None)))
    body.output(_augmented(body, found, row, taken))
    _, assigned = op.several(
        "Loop", op.reshape(size, []), op.constant(True), potential, none, outputs=2, body=body.graph
    )
    assigned.ir.type = none.ir.type
    return op.Slice(assigned.with_shape((None, None)), op.ints(0), slots, op.ints(1))


class _Search(NamedTuple):
    """Shortest paths [N, K] from a box to slots."""

    distance: Value
    way: Value
    done: Value
    low: Value
    sink: Value


def _search(op: Builder, cost: Value, first: Value, row: Value, here: Value, v: Value, taken: Value) -> _Search:
    """Find the nearest free slot of a box, by Dijkstra's algorithm on reduced costs."""
    far = op.zeros_like(v) + float(np.finfo(v.dtype.numpy()).max) / 4
    nothing = taken * 0 - 1
    start = op.cast(here, ir.DataType.INT64) * 0
    states = [
        far.with_shape((None, None)),
        nothing.with_shape((None, None)),
        op.Less(taken, op.scalar(-1, taken)).with_shape((None, None)),  # all False
        op.cast(start, v.dtype).with_shape((None, 1)),
        (start - 1).with_shape((None, 1)),  # the slot that the path stands at
        op.Where(here, start - 1, start).with_shape((None, 1)),  # the free slot; 0 ends the search of an image
    ]
    body, _, (distance, way, done, low, at, sink) = _loop_body(op, "search", states)
    zero = body.scalar(0, at)
    going = body.Less(sink, zero)  # [N, 1]
    beginning = body.Less(at, zero)
    place = body.Max(at, zero)
    box = body.Where(beginning, body.Expand(body.wrap(row.ir), body.ints(1, 1)), _pick(body, taken, place))
    costs = body.Gather(cost, body.Squeeze(body.wrap(first.ir) + body.Max(box, zero), body.ints(1)), axis=0)
    reduced = costs - body.wrap(v.ir)
    own = body.Where(beginning, body.scalar(0.0, low), _pick(body, reduced, place))
    through = low + (reduced - own)
    nearer = body.And(body.And(body.Less(through, distance), body.Not(done)), going)
    distance_new = body.Where(nearer, through, distance)
    open_distance = body.Where(done, body.scalar(float(np.finfo(v.dtype.numpy()).max), low), distance_new)
    nearest = body.ArgMin(open_distance, axis=1, keepdims=1)
    places = body.Range(body.constant(0), body.reshape(body.Shape(done, start=1), []), body.constant(1))
    reached = body.And(body.Equal(body.Unsqueeze(places, body.ints(0)), nearest), going)
    free = body.Less(_pick(body, taken, nearest), zero)
    sink_new = body.Where(body.And(going, free), nearest, sink)
    unfinished = body.cast(body.Less(sink_new, zero), ir.DataType.INT64)
    body.output(body.cast(body.ReduceMax(unfinished, keepdims=0), ir.DataType.BOOL).with_shape(()))
    body.output(distance_new.with_shape((None, None)))
    body.output(body.Where(nearer, at, way).with_shape((None, None)))
    body.output(body.Or(done, reached).with_shape((None, None)))
    body.output(body.Where(going, _pick(body, distance_new, nearest), low).with_shape((None, 1)))
    body.output(body.Where(going, nearest, at).with_shape((None, 1)))
    body.output(sink_new.with_shape((None, 1)))
    any_box = op.cast(op.ReduceMax(op.cast(here, ir.DataType.INT64), keepdims=0), ir.DataType.BOOL)
    made = op.several("Loop", None, any_box.with_shape(()), *states, outputs=len(states), body=body.graph)
    for value, state in zip(made, states, strict=True):
        value.ir.type, value.ir.shape = state.ir.type, state.ir.shape
    found = _Search(made[0], made[1], made[2], made[3], made[5])
    return found._replace(sink=op.Where(here, found.sink, start - 1))


def _augmented(op: Builder, found: _Search, row: Value, taken: Value) -> Value:
    """Give the slots along the path to the free slot one box further each; return the box of each slot."""
    states = [taken, found.sink.with_shape((None, 1))]
    body, _, (now, at) = _loop_body(op, "augment", states)
    zero = body.scalar(0, at)
    going, place = body.Less(body.scalar(-1, at), at), body.Max(at, zero)
    before = _pick(body, found.way, place)
    moved = body.Where(
        body.Less(before, zero),
        body.Expand(body.wrap(row.ir), body.ints(1, 1)),
        _pick(body, taken, body.Max(before, zero)),
    )
    kept = body.Where(going, moved, _pick(body, now, place))
    after = body.Where(going, before, at)
    unfinished = body.cast(body.Less(body.scalar(-1, at), after), ir.DataType.INT64)
    body.output(body.cast(body.ReduceMax(unfinished, keepdims=0), ir.DataType.BOOL).with_shape(()))
    body.output(body.ScatterElements(now, place, kept, axis=1).with_shape((None, None)))
    body.output(after.with_shape((None, 1)))
    some = op.cast(op.Less(op.scalar(-1, found.sink), found.sink), ir.DataType.INT64)
    any_path = op.cast(op.ReduceMax(some, keepdims=0), ir.DataType.BOOL).with_shape(())
    boxes, _ = op.several("Loop", None, any_path, *states, outputs=2, body=body.graph)
    boxes.ir.type = taken.ir.type
    return boxes.with_shape((None, None))


def _pick(op: Builder, rows: Value, index: Value) -> Value:
    """Emit one element [N, 1] of each row [N, K]; values of surrounding graphs are read."""
    return op.GatherElements(op.wrap(rows.ir), op.wrap(index.ir), axis=1).with_shape((None, 1))


def _loop_body(op: Builder, name: str, states: Sequence[Value]) -> tuple[Builder, tuple[Value, Value], list[Value]]:
    """Return the builder of a Loop's body, its step number and condition, and its states."""
    body = op.body([], name)

    def given(label: str, dtype: ir.DataType, shape: Sequence[int | None]) -> Value:
        value = ir.Value(name=f"{body.unique_prefix()}{label}", type=ir.TensorType(dtype), shape=ir.Shape(shape))
        body.graph.inputs.append(value)
        return body.wrap(value)

    step, condition = given("step", ir.DataType.INT64, ()), given("condition", ir.DataType.BOOL, ())
    inner = [given("state", state.dtype, [None, 1 if (state.shape or (0, 0))[1] == 1 else None]) for state in states]
    return body, (step, condition), inner
