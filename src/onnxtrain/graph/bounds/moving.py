"""Facts of operators that move, select or repeat elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.bounds.facts import (
    NOTHING,
    RULES,
    SMALL,
    Fact,
    Facts,
    attribute,
    axis_of,
    hull,
    of_array,
    rank_of,
    totals_of,
    whole_order,
)
from onnxtrain.graph.sizes import factors, times
from onnxtrain.graph.value import Dimension, dimensions, producer_of


def _bounds_only(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    return Fact(x.low, x.high, linear=x.linear)


def unmoved(
    sums: Mapping[int, float], old: tuple[Dimension, ...] | None, new: tuple[Dimension, ...] | None
) -> dict[int, float]:
    """Return the sums along the axes whose size does not change."""
    if old is None or new is None or len(old) != len(new):
        return {}
    return {axis: total for axis, total in sums.items() if old[axis] is not None and old[axis] == new[axis]}


def _reshape(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Find the axes whose size, and the number of elements behind which, stay."""
    x, old, new = facts.of(node.inputs[0]), dimensions(node.inputs[0]), dimensions(value)
    return moved(x, lambda fact: _reshaped(fact.sums, old, new))


def moved(x: Fact, move: Callable[[Fact], Mapping[int, float]]) -> Fact:
    """Return the fact of moved elements, whose sums a function finds."""
    log = None if x.log is None else replace(x.log, sums=move(x.log), mixtures={})
    return replace(x, sums=move(x), log=log, mixtures={})


def _reshaped(
    sums: Mapping[int, float], old: tuple[Dimension, ...] | None, new: tuple[Dimension, ...] | None
) -> dict[int, float]:
    if old is None or new is None:
        return {}
    found: dict[int, float] = {}
    for axis, total in sums.items():
        behind_it = times(*map(factors, old[axis + 1 :]))
        for index, size in enumerate(new):
            same = behind_it is not None and times(*map(factors, new[index + 1 :])) == behind_it
            begins = index == axis and None not in old[:axis] and old[:axis] == new[:axis]
            if size is not None and size == old[axis] and (same or begins):
                found[index] = total
                break
    return found


def _transpose(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, rank = facts.of(node.inputs[0]), rank_of(node.inputs[0]) or rank_of(value)
    order = attribute(node, "perm", None if rank is None else list(range(rank))[::-1])
    return moved(x, lambda fact: {} if order is None else {[*order].index(axis): s for axis, s in fact.sums.items()})


def _slice(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, rank = facts.of(node.inputs[0]), rank_of(node.inputs[0])
    starts, ends = facts.ints(node, "starts", 1), facts.ints(node, "ends", 2)
    axes, steps = facts.ints(node, "axes", 3), facts.ints(node, "steps", 4)
    if axes is None and starts is not None and len(node.inputs) < 4:
        axes = [*range(len(starts))]
    if axes is None or rank is None:
        return moved(x, lambda fact: {})
    cut, shape = {axis % rank for axis in axes}, dimensions(node.inputs[0])
    if starts and ends and shape and (steps or len(node.inputs) < 5):  # reversed axes are whole
        for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=False):
            size = shape[axis]
            if isinstance(size, int):
                stop = None if step < 0 and end < -size else end
                if len(range(size)[slice(start, stop, step)]) == size:
                    cut.discard(axis % rank)
    return moved(x, lambda fact: {axis: total for axis, total in fact.sums.items() if axis not in cut})


def _gather(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    table = node.inputs[0]
    if table is not None and table.is_initializer() and len(dimensions(table) or ()) > 1:
        return NOTHING  # rows of an embedding
    x, axis, rank = facts.of(node.inputs[0]), axis_of(node, node.inputs[0], 0), rank_of(node.inputs[1])
    order, shape = facts.constant(node.inputs[1]), dimensions(node.inputs[0])
    if axis is None or rank is None:
        return moved(x, lambda fact: {})
    whole = rank == 1 and whole_order(order, shape[axis] if shape else None)
    return moved(
        x,
        lambda fact: {
            index if index <= axis else index + rank - 1: total
            for index, total in fact.sums.items()
            if index != axis or whole
        },
    )


def _gather_nd(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, shape, own = facts.of(node.inputs[0]), dimensions(node.inputs[1]), dimensions(node.inputs[0])
    if not shape or not own or not isinstance(shape[-1], int) or attribute(node, "batch_dims", 0):
        return Fact(x.low, x.high, linear=x.linear)
    order, indexed, shift = facts.constant(node.inputs[1]), shape[-1], len(shape) - 1 - shape[-1]
    whole = indexed == 1 == len(shape) - 1 and whole_order(order, own[0])
    return moved(x, lambda fact: {a + shift: total for a, total in fact.sums.items() if a >= indexed or whole})


def _concat(facts: Facts, node: ir.Node, value: ir.Value, inputs: Sequence[ir.Value | None] = ()) -> Fact:
    parts = list(inputs or node.inputs)
    split = parts[0].producer() if parts[0] is not None else None
    if split is not None and split.op_type == "Split" and list(split.outputs) == parts:
        whole = split.inputs[0]
        if axis_of(split, whole, 0) == axis_of(node, value):
            return facts.of(whole)
    given, axis = [facts.of(part) for part in parts], axis_of(node, value)
    logs = [fact.log for fact in given]
    found = hull(*given)
    if all(logs):
        found = replace(found, log=hull(*(log for log in logs if log is not None)))
    if axis is None:
        return found
    sums = {}
    for index in set.intersection(*(set(fact.sums) for fact in given)):
        totals = [fact.sums[index] for fact in given]
        if index == axis:
            sums[index] = sum(totals)
        elif max(totals) - min(totals) <= SMALL:
            sums[index] = totals[0]
    total = _total(facts, [_along(facts, part, axis) for part in parts])
    return replace(found, sums=sums if total is None else {**sums, axis: total})


_Term = tuple[Any, float, float]


def _along(facts: Facts, part: ir.Value | None, axis: int) -> _Term | None:
    """Return x, a and b of the sum a x + b along an axis: of one column, or of a distribution times one column."""
    shape, node = dimensions(part) or (), producer_of(part)
    if shape[axis : axis + 1] == (1,):
        return facts.affine(part)
    if part is not None and node is not None and node.op_type == "Mul" and None not in shape:
        one_column = (*shape[:axis], 1, *shape[axis + 1 :])
        for column, shares in (node.inputs, node.inputs[::-1]):
            if dimensions(column) == one_column and abs(totals_of(facts, shares, part).get(axis, 0) - 1) <= SMALL:
                return facts.affine(column)
    total = facts.of(part).sums.get(axis)
    return None if total is None else (None, 0.0, total)


def _total(facts: Facts, terms: Sequence[_Term | None]) -> float | None:
    """Return the sum of terms where it is constant: that of p and 1 - p, or of all columns of a distribution."""
    slopes: dict[Any, float] = {}
    total, columns = 0.0, dict[tuple[ir.Value, int], dict[int, float]]()
    for term in terms:
        if term is None:
            return None
        slopes[term[0]] = slopes.get(term[0], 0.0) + term[1]
        total += term[2]
    for x in [x for x, slope in slopes.items() if slope]:
        found = _column(facts, x)
        if found is not None:
            own = columns.setdefault(found[:2], {})
            own[found[2]] = own.get(found[2], 0.0) + slopes.pop(x)
    for (source, axis), own in columns.items():
        whole = facts.of(source).sums.get(axis)
        if whole is None or len(own) != (dimensions(source) or ())[axis] or len({*own.values()}) > 1:
            return None
        total += whole * own[0]
    return None if any(slopes.values()) else total


def _column(facts: Facts, value: Any) -> tuple[ir.Value, int, int] | None:
    """Return the source, the axis and the position of a value that is one column of another."""
    node = value.producer() if isinstance(value, ir.Value) else None
    source = None if node is None or node.domain else node.inputs[0]
    if node is None or source is None or node.op_type not in ("Slice", "Gather", "Split"):
        return None
    starts = facts.ints(node, "starts", 1) if node.op_type == "Slice" else None
    axes = facts.ints(node, "axes", 3) if node.op_type == "Slice" else [axis_of(node, source, 0)]
    number = value.index() if node.op_type == "Split" else facts.number(node.inputs[1]) if starts is None else starts[0]
    shape, own = dimensions(source), dimensions(value)
    if not axes or len(axes) != 1 or axes[0] is None or number is None or shape is None or own is None:
        return None
    axis = axes[0] % len(shape)
    size = shape[axis]
    if not isinstance(size, int) or not -size <= number < size or (node.op_type != "Gather" and own[axis] != 1):
        return None
    return source, axis, int(number) % size


def _expand(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, old, new = facts.of(node.inputs[0]), dimensions(node.inputs[0]), dimensions(value)
    if old is None or new is None or len(old) > len(new):
        return moved(x, lambda fact: {})
    shift = len(new) - len(old)
    return moved(x, lambda fact: {a + shift: s for a, s in unmoved(fact.sums, old, new[shift:]).items()})


def _split(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, axis = facts.of(node.inputs[0]), axis_of(node, node.inputs[0], 0)
    return moved(x, lambda fact: {index: total for index, total in fact.sums.items() if axis not in (None, index)})


def _pad(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, rank, pads = facts.of(node.inputs[0]), rank_of(node.inputs[0]), facts.ints(node, "pads", 1)
    if str(attribute(node, "mode", "constant")) != "constant":
        return Fact(x.low, x.high, linear=x.linear)
    fill = facts.number(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else 0.0
    if fill is None:
        return NOTHING
    padded = {axis for axis in range(rank) if pads[axis] or pads[axis + rank]} if pads and rank else None
    if rank is None or padded is None or len(pads or ()) != 2 * rank:
        return Fact(min(x.low, fill), max(x.high, fill))
    sums = {axis: total for axis, total in x.sums.items() if not padded - {axis} and (not padded or not fill)}
    return Fact(min(x.low, fill), max(x.high, fill), sums)


RULES.update(
    {
        **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
        **dict.fromkeys(("MaxPool", "GlobalMaxPool", "TopK", "GatherElements", "Tile", "Compress"), _bounds_only),
        **dict.fromkeys(("DepthToSpace", "SpaceToDepth", "ReverseSequence", "CenterCropPad"), _bounds_only),
        "Transpose": _transpose,
        "Slice": _slice,
        "Gather": _gather,
        "GatherND": _gather_nd,
        "Concat": _concat,
        "com.microsoft.QLinearConcat": lambda facts, node, value: _concat(facts, node, value, node.inputs[2::3]),
        "Expand": _expand,
        "Split": _split,
        "Pad": _pad,
        "ConstantOfShape": lambda facts, node, value: of_array(np.asarray(attribute(node, "value", np.zeros(1)))),
    }
)
