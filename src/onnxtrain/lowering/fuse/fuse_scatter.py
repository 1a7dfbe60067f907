"""Fuse sums of rows at indices, which exporters write with an index for every element, into one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.replace import take_over
from onnxtrain.graph.value import Dimension, constant_array, dimensions
from onnxtrain.lowering.fuse.patterns import named_by_gradients, remove_unread

OPERATOR = "GatherGradient"

_SCATTERS = ("ScatterElements", "ScatterND")


class _Rows(NamedTuple):
    """Rows that are added at indices along an axis."""

    indices: Value
    rows: ir.Value
    axis: int


def fuse_scatter(model: ir.Model) -> None:
    """Replace ScatterElements and ScatterND that add rows to a base by one node that sorts their indices, in place.

    The sums are in float64, in the order of the indices, on all threads; a base of zeros is not added. ScatterElements
    fits where its indices are one list, repeated along whole rows: the sums of messages in a graph network.

    Requires: a sorted graph with shapes. Ensures: the new nodes are where the old one was; the one that computes y has
    its name.
    """
    graph = model.graph
    scatters = [node for node in graph if node.op_type in _SCATTERS and not node.domain]
    if not scatters:
        return
    main, named = Builder(graph, graph.opset_imports[""]), named_by_gradients(graph)
    for node in scatters:
        base, y = node.inputs[0], node.outputs[0]
        if base is None or node.attributes.get_string("reduction", "none") != "add" or base.dtype not in KERNEL_TYPES:
            continue
        op = main.before(node)
        found = _of_nd(op, node) if node.op_type == "ScatterND" else _of_elements(op, node)
        if found is None:
            continue
        shape = _shape_of_zeros(base)
        sizes = op.shape_of(op.wrap(base)) if shape is None else op.wrap(shape)
        wide = op.cast(found.indices, ir.DataType.INT64)
        like = [op.wrap(base)]
        result = emit(op, OPERATOR, op.wrap(found.rows), wide, sizes, like=like, axis=found.axis)[0]
        if shape is None:
            result = op.Add(op.wrap(base), result)
        op.emitted[-1].name = node.name  # recompute= names the node that computes y
        take_over(graph, {y: result.ir})
        remove_unread(graph, [node], named)


def _of_nd(op: Builder, node: ir.Node) -> _Rows | None:
    """Tuples of one index each select rows."""
    _, indices, updates = node.inputs
    sizes = None if indices is None else dimensions(indices)
    if indices is None or updates is None or sizes is None or sizes[-1] != 1:
        return None
    return _Rows(op.Squeeze(op.wrap(indices), op.ints(-1)), updates, 0)


def _of_elements(op: Builder, node: ir.Node) -> _Rows | None:
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
    if listed is None:
        return None
    wide, (size,) = op.wrap(listed), dimensions(listed) or (None,)
    if size != given[axis] and (size == 1 or not isinstance(size, int)):
        wide = op.Expand(wide, op.dimension(op.wrap(rows), axis))  # the list may be one index, for all rows
    return _Rows(wide, rows, axis)


def _repeated(indices: ir.Value, axis: int, rank: int) -> ir.Value | None:
    """The list that an Expand repeats along every axis but one."""
    expand = indices.producer()
    if expand is None or expand.op_type != "Expand":
        return None
    column = expand.inputs[0]
    unsqueeze = None if column is None else column.producer()
    if unsqueeze is None or unsqueeze.op_type != "Unsqueeze" or unsqueeze.inputs[0] is None:
        return None
    listed, axes = unsqueeze.inputs[0], unsqueeze.inputs[1]
    places, sizes = constant_array(axes), dimensions(listed)
    if places is None or sizes is None or len(sizes) != 1:
        return None
    added = sorted(int(each) % rank for each in places.reshape(-1))
    return listed if added == [place for place in range(rank) if place != axis] else None


def _whole(updates: ir.Value) -> ir.Value:
    """The rows before a Slice that leaves them whole: up to the sizes of an Expand to their own shape."""
    cut = updates.producer()
    if cut is None or cut.op_type != "Slice" or len(cut.inputs) != 3:
        return updates
    rows, starts, ends = cut.inputs
    begins = constant_array(starts)
    if rows is None or begins is None or np.any(begins != 0):
        return updates
    expanded = _source(ends, "Shape")
    producer = None if expanded is None else expanded.producer()
    if producer is None or producer.op_type != "Expand" or _source(producer.inputs[1], "Shape") is not rows:
        return updates
    return rows


def _source(value: ir.Value | None, operator: str) -> ir.Value | None:
    """The input of the node of an operator without attributes that computes a value."""
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == operator and not node.attributes else None


def _shape_of_zeros(base: ir.Value) -> ir.Value | None:
    """The shape from which zeros are made."""
    node = base.producer()
    if node is None or node.op_type != "ConstantOfShape":
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
