"""Slices, padding."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.plugins.structures.axes.cut import Cut
from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of


@axes_of("Slice")
def slice_(node: Node) -> list[Axis]:
    """y = x between bounds; on an axis with structures the bounds move."""
    starts, ends = node.integers("starts", 1), node.integers("ends", 2)
    axes, steps = node.integers("axes", 3), node.integers("steps", 4)
    computed = (starts is None, ends is None, axes is None and node.has(3), steps is None and node.has(4))
    if computed[2] or (axes is None and (starts or ends) is None):
        return [node.fix(axis, f"{node.describe()} slices computed axes") for axis in node.all_axes()]
    count = len(starts or ends or [])
    places = [axis % node.rank() for axis in (list(range(count)) if axes is None else axes)]
    found = [node.positions(0, place) if place in places else node.axis(0, place) for place in range(node.rank())]
    cuts: dict[int, tuple[Axis, slice]] = {}
    for number, place in enumerate(places):
        axis = found[place]
        if axis.labels is None:
            found[place] = fixed(axis.reason)
            continue
        if starts is None or ends is None or any(computed):
            found[place] = node.fix(axis, f"{node.describe()} has computed bounds")
            continue
        step = 1 if steps is None else steps[number]
        size = len(axis.labels)
        bounds = slice(*slice(_clipped(starts[number], size), _clipped(ends[number], size), step).indices(size))
        if step == 1 and bounds.start == 0 and bounds.stop == size:
            continue
        if step != 1:
            found[place] = node.fix(axis, f"{node.describe()} has steps")
            continue
        cuts[number] = (axis, bounds)
        found[place] = axis.taken(axis.labels[bounds])

    def change(cut: Cut) -> None:
        new_starts, new_ends = list(starts or []), list(ends or [])
        for number, (axis, bounds) in cuts.items():
            kept = cut.kept(axis)
            new_starts[number] = int(kept[: bounds.start].sum())
            new_ends[number] = int(kept[: bounds.stop].sum())
        if (new_starts, new_ends) == (starts, ends):
            return
        if node.opset < 10:
            node.ir.attributes["starts"] = ir.AttrInt64s("starts", new_starts)
            node.ir.attributes["ends"] = ir.AttrInt64s("ends", new_ends)
        else:
            like = node.constant(1)
            dtype = np.int64 if like is None else like.dtype
            cut.set_constant(node.ir, 1, np.array(new_starts, dtype))
            cut.set_constant(node.ir, 2, np.array(new_ends, dtype))

    if cuts:
        node.on_cut(change)
    return found


def _clipped(bound: int, size: int) -> int:
    return max(min(bound, size), -size - 1)


@axes_of("Pad")
def pad(node: Node) -> list[Axis]:
    """y = x with more entries around it, which stay."""
    pads, axes = node.integers("pads", 1), node.integers("axes", 3)
    places = [axis % node.rank() for axis in (range(node.rank()) if axes is None else axes)]
    found = [node.axis(0, place) for place in range(node.rank())]
    plain = node.attribute("mode", "constant") == "constant"
    value = node.attribute("value", 0.0) if node.opset < 11 else node.number(2) if node.has(2) else 0.0
    if plain and (value != 0 or not node.is_float(0)):  # the zero point of integers may be another number
        found = [axis.with_zero(False) for axis in found]
    for number, place in enumerate(places):
        axis = found[place]
        if axis.labels is None:
            found[place] = fixed(axis.reason)
            continue
        added = None if pads is None else (pads[number], pads[number + len(places)])
        if added == (0, 0):
            continue
        if added is None or not plain or min(added) < 0 or axis.repeats:
            found[place] = node.fix(axis, f"{node.describe()} pads it")
            continue
        parts = [node.new(added[0]), axis, node.new(added[1])]
        for part in (parts[0], parts[2]):
            node.fix(part, "it is padding")
        found[place] = axis.taken(np.concatenate([part.labels for part in parts if part.labels is not None]))
    return found
