"""Rows and parts of tensors: slices that become a Split, sums of rows at indices, rows gathered for one reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import substitute, take_over
from onnxtrain.graph.shapes import fold_sizes
from onnxtrain.graph.value import Dimension, constant_array, constant_ints, dimensions, input_of, made_by
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule

_SUM = "GatherGradient"
"""The operator that adds rows at indices, as in the gradient of a Gather."""


# Slices that together take every element along an axis once


class _Cut(NamedTuple):
    """The part [start, end) that a Slice takes."""

    start: int
    end: int


def fuse_slices(model: ir.Model) -> None:
    """Replace slices that together take every element along an axis once by one node, in place.

    The gradient of each slice alone is a tensor of the whole size, and they are summed. Exporters write queries, keys
    and values of one matmul that way, with bounds computed from shapes.

    Requires: a sorted graph with shapes. Ensures: the Split is where the first slice was, and has its name.
    """
    along = Counter(key for node in model.graph if (key := _axis_of(node)) is not None)
    if any(count > 1 for count in along.values()):
        fold_sizes(model)  # bounds that follow from known shapes
        _FUSE_SLICES(model)


def _axis_of(node: ir.Node) -> tuple[ir.Value, int, int] | None:
    """The input of a Slice along one axis, the axis, and its size, if these are known."""
    if node.op_type != "Slice" or node.domain or node.outputs[0].is_graph_output():
        return None
    x, axes = node.inputs[0], constant_ints(input_of(node, 3))
    sizes = dimensions(x)
    if x is None or sizes is None or axes is None or len(axes) != 1:
        return None
    size = sizes[axes[0]]
    return (x, axes[0] % len(sizes), size) if isinstance(size, int) else None


def _cut(node: ir.Node, size: int) -> _Cut | None:
    """The part that a Slice takes, if its bounds are constants and its step is 1."""
    starts, ends = constant_ints(node.inputs[1]), constant_ints(node.inputs[2])
    steps = [1] if input_of(node, 4) is None else constant_ints(node.inputs[4])
    if starts is None or ends is None or steps != [1] or len(starts) != 1 or len(ends) != 1:
        return None
    start, end, _ = slice(starts[0], ends[0]).indices(size)
    return _Cut(start, max(start, end))


def _cuts(match: Match) -> dict[ir.Node, _Cut] | str:
    """Return all slices of the input along the axis, in order, with their parts."""
    (first,) = match.nodes
    key, places = _axis_of(first), match.context.places
    if key is None:
        return "it takes no part along one axis of a known size"
    alike = sorted(
        (node for node in key[0].consumers() if node in places and _axis_of(node) == key), key=places.__getitem__
    )
    cuts = {node: cut for node in alike if (cut := _cut(node, key[2])) is not None}
    parts = sorted(set(cuts.values()))
    if next(iter(cuts), None) is not first or len(parts) < 2:
        return "its bounds are not known, or no slice is behind it"
    ends = [0, *(part.end for part in parts)]
    whole = [part.start for part in parts] == ends[:-1] and ends[-1] == key[2]
    return cuts if whole and all(part.start < part.end for part in parts) else "the slices leave a gap, or overlap"


def _emit_split(op: Builder, match: Match) -> Value:
    cuts: dict[ir.Node, _Cut] = match.found
    x, axis, _ = _axis_of(match.nodes[0]) or (None, 0, 0)
    assert x is not None
    parts = sorted(set(cuts.values()))
    lengths = op.ints(*(part.end - part.start for part in parts))
    made = dict(zip(parts, op.several("Split", op.wrap(x), lengths, outputs=len(parts), axis=axis), strict=True))
    taken = {cuts[match.nodes[0]]}
    for node, part in [*cuts.items()][1:]:
        y = node.outputs[0]
        if part not in taken:
            take_over(op.graph, {y: made[part].ir})
        elif y.name not in match.context.named:  # a second slice of the same part
            substitute(op.graph, {y: made[part].ir})
        taken.add(part)
    match.nodes = tuple(cuts)
    return made[cuts[match.nodes[0]]]


_FUSE_SLICES = Rewrite(Rule(operators("slices", "Slice"), _emit_split, _cuts))


# Sums of rows at indices, which exporters write with an index for every element


class _Rows(NamedTuple):
    """Rows that are added at indices along an axis."""

    indices: ir.Value
    rows: ir.Value
    axis: int


def _added(match: Match) -> _Rows | str:
    (node,) = match.nodes
    base = node.inputs[0]
    if base is None or node.attributes.get_string("reduction", "none") != "add" or base.dtype not in KERNEL_TYPES:
        return "it adds nothing, or no kernel has its type"
    found = _of_nd(node) if node.op_type == "ScatterND" else _of_elements(node)
    return found or "its indices are not one list, repeated along whole rows"


def _of_nd(node: ir.Node) -> _Rows | None:
    """Tuples of one index each select rows."""
    _, indices, updates = node.inputs
    sizes = dimensions(indices)
    if indices is None or updates is None or sizes is None or sizes[-1] != 1:
        return None
    return _Rows(indices, updates, 0)


def _of_elements(node: ir.Node) -> _Rows | None:
    """A list of indices along the axis, repeated along all others, whose sizes are the base's, selects rows."""
    base, indices, updates = node.inputs
    if base is None or indices is None or updates is None:
        return None
    rows, sizes = _whole(updates), _dimensions(base)
    given = dimensions(rows)
    if sizes is None or given is None or len(sizes) != len(given):
        return None
    rank = len(sizes)
    axis = node.attributes.get_int("axis", 0) % rank
    others = [place for place in range(rank) if place != axis]
    if any(not isinstance(sizes[place], int) or sizes[place] != given[place] for place in others):
        return None
    listed = _repeated(indices, axis, rank)
    return None if listed is None else _Rows(listed, rows, axis)


def _emit_sum(op: Builder, match: Match) -> Value:
    (node,), found = match.nodes, match.found
    assert node.inputs[0] is not None
    base = op.wrap(node.inputs[0])
    indices, rows = op.wrap(found.indices), op.wrap(found.rows)
    if node.op_type == "ScatterND":
        indices = op.Squeeze(indices, op.ints(-1))
    else:
        (size,) = indices.shape or (None,)
        if size != (rows.shape or ())[found.axis] and (size == 1 or not isinstance(size, int)):
            indices = op.Expand(indices, op.dimension(rows, found.axis))  # the list may be one index, for all rows
    shape = _shape_of_zeros(base.ir)
    sizes = op.shape_of(base) if shape is None else op.wrap(shape)
    (y,) = emit(op, _SUM, rows, op.cast(indices, ir.DataType.INT64), sizes, like=[base], axis=found.axis)
    return y if shape is not None else op.Add(base, y)


def _repeated(indices: ir.Value, axis: int, rank: int) -> ir.Value | None:
    """The list that an Expand repeats along every axis but one."""
    expand = made_by(indices, "Expand")
    unsqueeze = None if expand is None else made_by(expand.inputs[0], "Unsqueeze")
    if unsqueeze is None or unsqueeze.inputs[0] is None:
        return None
    listed, axes = unsqueeze.inputs[0], unsqueeze.inputs[1]
    places, sizes = constant_ints(axes), dimensions(listed)
    if places is None or sizes is None or len(sizes) != 1:
        return None
    added = sorted(each % rank for each in places)
    return listed if added == [place for place in range(rank) if place != axis] else None


def _whole(updates: ir.Value) -> ir.Value:
    """The rows before a Slice that leaves them whole: up to the sizes of an Expand to their own shape."""
    cut = made_by(updates, "Slice")
    if cut is None or len(cut.inputs) != 3:
        return updates
    rows, starts, ends = cut.inputs
    begins = constant_array(starts)
    if rows is None or begins is None or np.any(begins != 0):
        return updates
    expand = made_by(_source(ends, "Shape"), "Expand")
    return updates if expand is None or _source(expand.inputs[1], "Shape") is not rows else rows


def _source(value: ir.Value | None, operator: str) -> ir.Value | None:
    """The input of the node of an operator without attributes that computes a value."""
    node = made_by(value, operator)
    return node.inputs[0] if node is not None and not node.attributes else None


def _shape_of_zeros(base: ir.Value) -> ir.Value | None:
    """The shape from which zeros are made."""
    node = made_by(base, "ConstantOfShape")
    if node is None:
        return None
    filled = node.attributes.get("value")
    if filled is not None and np.any(np.asarray(filled.as_tensor().numpy()) != 0):
        return None
    return node.inputs[0]


def _dimensions(base: ir.Value) -> Sequence[Dimension] | None:
    """Sizes of the base; of zeros in the shape of another value, that value's."""
    shape = _shape_of_zeros(base)
    like = _source(shape, "Shape")
    known = dimensions(base)
    if like is None or (known is not None and all(isinstance(size, int) for size in known[1:])):
        return known
    return dimensions(like)


fuse_scatter = Rewrite(Rule(operators("sum of rows", "ScatterElements", "ScatterND"), _emit_sum, _added))
"""Replace ScatterElements and ScatterND that add rows to a base by one node that sorts their indices.

The sums are in float64, in the order of the indices, on all threads; a base of zeros is not added. ScatterElements fits
where its indices are one list, repeated along whole rows: the sums of messages in a graph network.
"""


# Rows that are gathered for one reader. A layer of a graph network gathers a row for every edge and adds these up for
# every node; its gradient does the same the other way around. The rows of all edges, many times those of the nodes, are
# added where they lie. Rows of embeddings beside numbers are copied to their place at once.

OTHER, TAKEN = 3, 4
"""Inputs of a sum of rows: another term, and which rows of the first input are added."""


class _Joined(NamedTuple):
    """Rows of a table that a Concat joins to x, and the nodes between."""

    gather: ir.Node
    x: ir.Value
    before: bool


def _gather_before(match: Match) -> ir.Node | str:
    """Return the Gather whose rows a node adds up, if nothing else reads them."""
    (node,) = match.nodes
    gather = None if len(node.inputs) > TAKEN else _only_read(node.inputs[0], "Gather", or_its_length=True)
    if gather is None:
        return "its rows are not gathered for it alone"
    table, indices = gather.inputs
    sizes = [dimensions(value) for value in (table, indices, node.inputs[1]) if value is not None]
    if not sizes[0] or [len(each or ()) for each in sizes[1:]] != [1, 1] or indices is None:
        return "its indices are no list"
    axes = [each.attributes.get_int("axis", 0) % len(sizes[0]) for each in (gather, node)]
    if axes[0] != axes[1] or (axes[0] != 0 and len(gather.outputs[0].uses()) > 1):
        return "its rows are gathered along another axis"
    return gather if indices.dtype == ir.DataType.INT64 else "its indices are not int64"


def _emit_taken(_: Builder, match: Match) -> None:
    (node,), gather = match.nodes, match.found
    node.resize_inputs(TAKEN + 1)
    node.replace_input_with(0, gather.inputs[0])
    if node.inputs[OTHER] is None:
        node.replace_input_with(OTHER, match.context.main.constant([], node.outputs[0].dtype).ir)
    node.replace_input_with(TAKEN, gather.inputs[1])
    for reader, slot in list(gather.outputs[0].uses()):  # the first axis has the size of the indices
        reader.replace_input_with(slot, gather.inputs[1])
    match.nodes = (node, gather)


def _joined_by(match: Match) -> _Joined | str:
    """Return what a Concat of two matrices joins, if one of them is the rows of a table, which nothing else reads."""
    (node,), sizes = match.nodes, dimensions(match.y)
    if len(node.inputs) != 2 or len(sizes or ()) != 2 or node.attributes["axis"].as_int() not in (1, -1):
        return "it does not join the columns of two matrices"
    for place, value in enumerate(node.inputs):
        x, flat = node.inputs[1 - place], _only_read(value, "Flatten")
        gather = _only_read(value if flat is None else flat.inputs[0], "Gather")
        if x is None or gather is None or (flat is not None and flat.attributes.get_int("axis", 1) != 1):
            continue
        table, indices = gather.inputs
        if table is None or indices is None or table.dtype not in KERNEL_TYPES or indices.dtype != ir.DataType.INT64:
            continue
        ranks = [len(dimensions(each) or ()) for each in (table, indices, x)]
        if ranks == [2, 2, 2] and gather.attributes.get_int("axis", 0) in (0, -2) and flat is not None:
            return _Joined(gather, x, place == 1)
    return "neither matrix is the rows of a table for it alone"


def _emit_joined(op: Builder, match: Match) -> Value:
    joined = match.found
    inputs = [op.wrap(value) for value in (*joined.gather.inputs, joined.x) if value is not None]
    return emit(op, "GatherConcat", *inputs, like=[op.wrap(match.y)], before=int(joined.before))[0]


def _only_read(value: ir.Value | None, operator: str, *, or_its_length: bool = False) -> ir.Node | None:
    """Return the node of a standard operator that computes a value, if one input of one node reads it."""
    node = made_by(value, operator)
    if value is None or node is None or value.is_graph_output():
        return None
    readers = [reader for reader, _ in value.uses() if not (or_its_length and _is_length(reader))]
    return node if len(readers) == 1 else None


def _is_length(node: ir.Node) -> bool:
    """Return whether a node computes the size of the first axis."""
    ends = [node.attributes.get_int(name, default) for name, default in (("start", 0), ("end", -1))]
    return node.op_type == "Shape" and not node.domain and ends == [0, 1]


fuse_gather = Rewrite(
    Rule(operators("sum of gathered rows", _SUM, domain=ONNXTRAIN_DOMAIN), _emit_taken, _gather_before),
    Rule(operators("joined rows", "Concat"), _emit_joined, _joined_by),
)
"""Let ``GatherGradient`` take the rows that it adds up, and a Concat those that it joins, from a table.

    x, j -> Gather -> r;  r, i, shape -> GatherGradient -> y    becomes    x, i, shape, [], j -> GatherGradient -> y
    t, i -> Gather -> r;  r -> Flatten -> f;  x, f -> Concat -> y    becomes    t, i, x -> GatherConcat -> y

with the same bits; [] is an empty tensor (workarounds: optional inputs of custom operators). Indices are int64: a list
for a sum, and one or several for each row of x.
"""
