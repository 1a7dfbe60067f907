"""Rotary embeddings that exporters write as several nodes, as the one operator that ONNX Runtime has for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.value import Dimension, constant_ints, constant_tensor, dimensions, input_of, made_by, order_of
from onnxtrain.lowering.patterns import Match, Number, OneOf, Op, Optional, Pattern, Term, Var
from onnxtrain.lowering.rewrite import Rewrite, Rule

OPERATOR = "RotaryEmbedding"

_RANK = 4
_HEADS_SECOND = (0, 2, 1, 3)
"""[batch, positions, heads, features] to [batch, heads, positions, features], and back."""
_UNARY = ("Cast", "Cos", "Sin", "Identity", "Neg")
_BINARY = ("Mul", "Div", "Add", "Sub")
_ROWS = ("Unsqueeze", "Squeeze", "Expand", "Gather", "Slice")
"""Operators that select, repeat or reorder rows without changing a row, unless they act on the last axis."""


_X = Var("x")
_LAST = (-1, _RANK - 1)


def _half_of_x(output: int, start: Term, stop: Term) -> Term:
    """Return the pattern of one half of x: an output of a Split in two, or a Slice along the last axis."""
    cut = Op("Slice", _X, start, stop, Number(*_LAST), Optional(Number(1)))
    return OneOf(cut, Op("Split", _X, Optional(Var("sizes")), output=output, outputs=2, axis=_LAST))


_TURNED = Op(
    "Concat",
    Op("Neg", _half_of_x(1, Var("middle"), Number(name="end")), name="negation"),
    _half_of_x(0, Number(0), Var("stop")),
    name="turned",
    axis=_LAST,
)
_ROTARY = Pattern(
    "rotary embedding",
    Op("Add", Op("Mul", _TURNED, Var("sines")), Op("Mul", _X, Var("cosines"))),
    {"Concat"},
)


class _Layout(NamedTuple):
    """Arrangement of cosines and sines relative to x."""

    heads: int  # the axis of the heads, 1 or 2; the other one is the axis of the positions
    per_sequence: bool  # true if each sequence of the batch has rows of its own


def _check(match: Match) -> _Layout | str:
    """Return the layout, or why the operator does not compute this rotation."""
    x, sizes = match["x"], dimensions(match["x"])
    if sizes is None or len(sizes) != _RANK or x.dtype != ir.DataType.FLOAT or not isinstance(sizes[-1], int):
        return f"x has shape {sizes} and type {x.dtype}; it needs four axes, a known last one, and the type FLOAT"
    size = sizes[-1]
    halves = (match["turned"].inputs[1], match["negation"].inputs[0])
    if size % 2 or any((dimensions(half) or (None,))[-1] != size // 2 for half in halves):
        return f"the last axis, of size {size}, is not cut into two known halves"
    if (end := match.get("end")) is not None and end < size:
        return f"the second half ends at {end:g} of {size}"
    layout = _layout(x, match["cosines"])
    if layout is None or layout != _layout(x, match["sines"]):
        return "cosines and sines are not known to have one row for each position, the same for all heads"
    for name in ("cosines", "sines"):
        if match[name] in match.context.varying:
            return f"a gradient flows through the {name}"
        if not _is_doubled(match[name]):
            return f"the halves of the {name} are not known to be equal"
    return layout


def _layout(x: ir.Value, table: ir.Value) -> _Layout | None:
    """Return the arrangement of a table relative to x, if it has a row for each position, the same for all heads."""
    sizes, rows = dimensions(x), dimensions(table)
    if sizes is None or rows is None or len(rows) > _RANK:
        return None
    rows = (1,) * (_RANK - len(rows)) + rows
    if rows[3] != sizes[3] or rows[0] is None or rows[0] not in (1, sizes[0]):
        return None
    for heads, positions in ((1, 2), (2, 1)):
        if rows[heads] == 1 and rows[positions] is not None and rows[positions] == sizes[positions]:
            return _Layout(heads, rows[0] != 1)
    return None


def _is_doubled(table: ir.Value | None) -> bool:
    """Return whether the second half of each row, along the last axis, is known to equal the first."""
    waiting, seen = [table], set[ir.Value]()
    while waiting:
        value = waiting.pop()
        sources = None if value is None else _doubled_where(value)
        if value is None or sources is None:
            return False
        waiting += [source for source in sources if source not in seen]
        seen.add(value)
    return True


def _doubled_where(value: ir.Value) -> list[ir.Value | None] | None:
    """Return the values that must have equal halves for a value to have them; ``None`` where that is not known."""
    sizes = dimensions(value)
    if not sizes or not isinstance(sizes[-1], int) or value.is_graph_input():
        return None
    tensor = constant_tensor(value)
    if tensor is not None:
        first, second = np.split(tensor.numpy(), 2, axis=-1)
        return [] if np.array_equal(first, second) else None
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Concat":
        halves, axis = node.inputs, node.attributes["axis"].as_int()
        return [] if len(halves) == 2 and halves[0] is halves[1] and axis in (-1, len(sizes) - 1) else None
    if node.op_type in _UNARY:
        return [node.inputs[0]]
    if node.op_type in _BINARY:
        along = [item for item in node.inputs if item is None or dimensions(item) is None or _width(item) != 1]
        return along or None
    return [node.inputs[0]] if node.op_type in _ROWS and _leaves_rows(node, sizes[-1]) else None


def _width(value: ir.Value) -> Dimension:
    """Return the size of the last axis; 1 for a scalar."""
    return (dimensions(value) or (1,))[-1]


def _leaves_rows(node: ir.Node, size: int) -> bool:
    """Return whether the rows of a node's result, along the last axis, are among those of its first input."""
    source = node.inputs[0]
    sizes = dimensions(source)
    if not sizes or sizes[-1] != size or size < 2:
        return False
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) % len(sizes) != len(sizes) - 1
    if node.op_type == "Slice":
        axes = constant_ints(input_of(node, 3))
        return axes is not None and all(axis % len(sizes) != len(sizes) - 1 for axis in axes)
    return True  # axes of one element come, go, or are repeated


def _emit(op: Builder, match: Match) -> Value:
    """Emit the node of the operator, and the nodes that bring its result into the layout of x."""
    x, heads_at, named = match["x"], match.found.heads, match.context.named
    op.scope = f"fused {op.scope}"
    op.import_domain(MICROSOFT_DOMAIN, 1)
    batch, heads, positions, width = (_sizes(x)[axis] for axis in (0, heads_at, 3 - heads_at, 3))
    tables = [_half(op, match[name], _number(width)) for name in ("cosines", "sines")]
    given = [_positions(op, match), *tables]
    rows = x if heads_at == 2 else _before_transpose(x, named)
    if rows is None:
        return op.several(OPERATOR, op.wrap(x), *given, outputs=1, domain=MICROSOFT_DOMAIN)[0]
    count = {"num_heads": heads} if isinstance(heads, int) else {}
    flat = _flat(op, rows, named)
    (y,) = op.several(OPERATOR, flat, *given, outputs=1, domain=MICROSOFT_DOMAIN, **count)
    y.ir.dtype = flat.dtype
    y = op.Reshape(y.with_shape(flat.shape), op.ints(0, 0, count.get("num_heads", -1), _number(width)))
    y.with_shape((batch, positions, heads, width))
    return y if heads_at == 2 else op.Transpose(y, perm=_HEADS_SECOND)


def _before_transpose(x: ir.Value, named: set[str]) -> ir.Value | None:
    """Return the [B, S, H, D] that x is the transposition of, or ``None``."""
    node = None if x.name in named else made_by(x, "Transpose")
    return node.inputs[0] if node is not None and order_of(node, _RANK) == _HEADS_SECOND else None


def _flat(op: Builder, rows: ir.Value, named: set[str]) -> Value:
    """Return [B, S, H, D] as [B, S, H D]: the value before it was divided into heads, where there is one."""
    batch, positions, heads, width = _sizes(rows)
    shape = batch, positions, heads * width if isinstance(heads, int) and isinstance(width, int) else None
    node = made_by(rows, "Reshape")
    source = None if node is None else node.inputs[0]
    if source is not None and rows.name not in named and None not in shape and dimensions(source) == shape:
        return op.wrap(source)
    whole = shape[2] if isinstance(shape[2], int) else -1
    return op.Reshape(op.wrap(rows), op.ints(0, 0, whole)).with_shape(shape)


def _half(op: Builder, table: ir.Value, width: int) -> Value:
    """Return the first halves of a table's rows, [rows, D/2]."""
    half, tensor = width // 2, constant_tensor(table)
    if tensor is not None:
        return op.constant(tensor.numpy()[..., :half].reshape(-1, half))
    first = op.Slice(op.wrap(table), op.ints(0), op.ints(half), op.ints(-1))
    return op.Reshape(first, op.ints(-1, half)).with_shape((None, half))


def _positions(op: Builder, match: Match) -> Value:
    """Return the rows of the tables to read, [B, S]; the first of them, [1], where all sequences have the same."""
    layout, known = match.found, _sizes(match["x"])
    if not layout.per_sequence:
        return op.ints(0)
    table = op.wrap(match["cosines"])
    sizes = [op.dimension(table, axis) for axis in (0, 3 - layout.heads)]
    shape = op.Concat(*sizes, axis=0)
    count = op.Squeeze(op.Mul(*sizes))
    every = op.Range(op.constant(0, np.int64), count, op.constant(1, np.int64))
    return op.Reshape(every, shape).with_shape((known[0], known[3 - layout.heads]))


def _sizes(value: ir.Value) -> tuple[Dimension, ...]:
    """Return the sizes of a value that is known to have four axes."""
    sizes = dimensions(value)
    assert sizes is not None
    return sizes


def _number(size: Dimension) -> int:
    assert isinstance(size, int)
    return size


fuse_rotary = Rewrite(Rule(_ROTARY, _emit, _check))
"""Replace y = x cos + [-b, a] sin with x = [a, b], halves of the last axis, by one node.

Its gradient is one node, too: the rotation by the opposite angles. x is [B, H, S, D] or [B, S, H, D] in float32;
cosines and sines broadcast over the heads, and over the batch or not. Their halves must be known to be equal:
constants, or computed from a Concat of a value with itself, as exporters write it; and no gradient may flow through
them.
"""
