"""Operators that select, repeat or join entries along axes, and pooling, resizing and sampling of images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import Dimension
from onnxtrain.plugins.structures.axes.labels import Axis, Cut, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of


@axes_of("Gather")
def gather(node: Node) -> list[Axis]:
    """y = the entries of x at positions along an axis; constant positions follow the structures."""
    axis = node.attribute("axis", 0) % node.rank()
    data, positions = node.positions(0, axis), node.constant(1)
    found = [fixed("it lists positions") for _ in range(node.rank(1))]
    if data.labels is not None:
        if positions is None or positions.ndim != 1:
            node.fix(data, f"{node.describe()} looks positions up along it")
        else:
            node.axis(1, 0)
            size = len(data.labels)
            places = positions.astype(np.int64) % size
            found = [data.taken(data.labels[places])]
            node.on_cut(lambda cut: _renumber(cut, node, data, places))
    others = node.all_axes()
    others[axis : axis + 1] = found
    return others


def _renumber(cut: Cut, node: Node, data: Axis, places: np.ndarray) -> None:
    kept = cut.kept(data)
    if not kept.all():
        numbers = np.cumsum(kept) - 1
        cut.set_constant(node.ir, 1, numbers[places[kept[places]]].astype(np.int64))


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
    found = node.all_axes()
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


@axes_of("Concat")
def concat(node: Node) -> list[Axis]:
    """y = x_1, x_2, ... one after the other along an axis."""
    axis, inputs = node.attribute("axis") % node.rank(), range(len(node.ir.inputs))
    found = []
    for place in range(node.rank()):
        take = node.positions if place == axis else node.axis
        axes = [take(index, place) for index in inputs]
        if place != axis:
            joined = node.join(*axes)
            found.append(joined.with_zero(all(part.zero for part in axes)))
            continue
        if all(part.labels is None for part in axes):
            found.append(axes[0])
            continue
        found.append(_concatenated(node, axes, [node.shape(index)[place] for index in inputs]))
    return found


def _concatenated(node: Node, axes: Sequence[Axis], sizes: Sequence[Dimension]) -> Axis:
    parts = []
    for part, size in zip(axes, sizes, strict=True):
        if part.labels is not None:
            parts.append(part)
            continue
        held = node.new(size)
        if held.labels is None:
            for other in axes:
                node.fix(other, held.reason)
            return held
        node.fix(held, part.reason)
        parts.append(held.with_zero(True))  # it stays
    labels = np.concatenate([part.labels for part in parts if part.labels is not None])
    return Axis(labels, zero=all(part.zero for part in parts))


@axes_of("Split")
def split(node: Node) -> list[list[Axis]]:
    """y_1, y_2, ... = consecutive parts of x along an axis."""
    axis, count = node.attribute("axis", 0) % node.rank(), len(node.ir.outputs)
    whole = node.positions(0, axis)
    sizes = node.integers("split", 1)
    length = node.shape()[axis]
    if sizes is None and not node.has(1) and isinstance(length, int):
        each = -(-length // count)
        sizes = [each] * (count - 1) + [length - each * (count - 1)]
    others = node.all_axes()
    before, after = others[:axis], others[axis + 1 :]
    if whole.labels is None or sizes is None:
        return [[*before, node.fix(whole, f"{node.describe()} has computed sizes"), *after]] * count
    bounds = np.cumsum([0, *sizes])
    parts = [whole.taken(whole.labels[start:end]) for start, end in itertools.pairwise(bounds.tolist())]

    def change(cut: Cut) -> None:
        counts = np.array([cut.count(part) for part in parts], np.int64)
        if counts.tolist() == sizes:
            return
        node.ir.attributes.pop("num_outputs", None)
        if node.opset < 13:
            node.ir.attributes["split"] = ir.AttrInt64s("split", counts.tolist())
        else:
            cut.set_constant(node.ir, 1, counts)

    node.on_cut(change)
    return [[*before, part, *after] for part in parts]


@axes_of("Tile")
def tile(node: Node) -> list[Axis]:
    """y = x repeated along axes."""
    repeats = node.constant(1)
    found = []
    for place in range(node.rank()):
        axis, count = node.positions(0, place), None if repeats is None else int(repeats[place])
        if axis.labels is None or count == 1:
            found.append(axis if count == 1 else fixed("it is repeated"))
        elif count is None:
            found.append(node.fix(axis, f"{node.describe()} has computed repeats"))
        else:
            found.append(axis.taken(np.tile(axis.labels, count)))
    return found


@axes_of("Resize")
def resize(node: Node) -> list[Axis]:
    """y = x in other sizes along some axes; the axes with structures keep theirs."""
    before, after = node.shape(), node.output_shape()
    axes = node.attribute("axes")
    places = range(node.rank()) if axes is None else [axis % node.rank() for axis in axes]
    keeps_zero = node.attribute("extrapolation_value", 0.0) == 0
    found = []
    for place in range(node.rank()):
        axis = node.positions(0, place)
        if axis.labels is not None and before[place] != after[place]:
            axis = node.fix(axis, f"{node.describe()} resizes it")
        found.append(axis.with_zero(axis.zero and keeps_zero) if axis.labels is not None else fixed(axis.reason))

    def change(cut: Cut) -> None:
        changes = {
            number: cut.count(found[place])
            for number, place in enumerate(places)
            if found[place].labels is not None and cut.count(found[place]) != after[place]
        }
        if changes and node.has(3):
            cut.set_elements(node.ir, 3, changes)

    node.on_cut(change)
    return found


@axes_of("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def pool(node: Node) -> list[list[Axis]]:
    """y [n, c, ...] = a summary of windows of x [n, c, ...]."""
    kept = [node.axis(0, 0), node.axis(0, 1)]
    if len(node.ir.outputs) > 1 and node.ir.outputs[1].name:
        kept[1] = node.fix(kept[1], f"{node.describe()} returns positions, which count channels")
    image = [fixed("it is an image axis of a pooling") for _ in range(node.rank() - 2)]
    return [[*kept, *image]] * len(node.ir.outputs)


@axes_of("GridSample")
def grid_sample(node: Node) -> list[Axis]:
    """y [n, c, ...] = x [n, c, ...] at positions."""
    return [node.axis(0, 0), node.axis(0, 1), *(fixed("it is an image axis") for _ in range(node.rank() - 2))]


@axes_of("DepthToSpace")
def depth_to_space(node: Node) -> list[Axis]:
    """y [n, c, h b, w b] = blocks of the channels of x: the b² channels of one stay together."""
    channels, block = node.positions(0, 1), node.attribute("blocksize")
    if channels.labels is not None:
        by_place = node.attribute("mode", "DCR") == "DCR"
        rows = channels.labels.reshape((block**2, -1) if by_place else (-1, block**2))
        channels = channels.taken(node.unite(rows.T if by_place else rows))
    return [node.axis(0, 0), channels, fixed("it is an image axis"), fixed("it is an image axis")]


@axes_of("SpaceToDepth")
def space_to_depth(node: Node) -> list[Axis]:
    """y [n, b² c, h / b, w / b] = blocks of x as channels."""
    channels, block = node.positions(0, 1), node.attribute("blocksize")
    if channels.labels is not None:
        channels = channels.taken(np.tile(channels.labels, block**2))
    return [node.axis(0, 0), channels, fixed("it is an image axis"), fixed("it is an image axis")]
