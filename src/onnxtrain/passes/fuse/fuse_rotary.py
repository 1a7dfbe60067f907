"""Rotary embeddings that exporters write as half a dozen nodes, as the one operator that ONNX Runtime has for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import Builder, Value
from onnxtrain.ir.domains import MICROSOFT_DOMAIN
from onnxtrain.ir.replace import remove_nodes, take_over
from onnxtrain.ir.value import Dimension, constant_number, constant_tensor, dimensions
from onnxtrain.passes.fuse.patterns import are_seen, named_by_gradients, operands, readers, varying_values
from onnxtrain.passes.fuse.transposition import order_of

OPERATOR = "RotaryEmbedding"

_RANK = 4
_HEADS_SECOND = (0, 2, 1, 3)
"""[batch, positions, heads, features] to [batch, heads, positions, features], and back."""
_UNARY = ("Cast", "Cos", "Sin", "Identity", "Neg")
_BINARY = ("Mul", "Div", "Add", "Sub")
_ROWS = ("Unsqueeze", "Squeeze", "Expand", "Gather", "Slice")
"""What chooses, repeats or counts rows and leaves each of them as it is, unless it goes along the last axis."""


def fuse_rotary(model: ir.Model) -> None:
    """Write y = x cos + [-b, a] sin with x = [a, b], halves of the last axis, as one node, in place.

    Its gradient is one node, too: the rotation by the opposite angles. x is [B, H, S, D] or [B, S, H, D] in float32;
    cosines and sines broadcast over the heads, and over the batch or not. Left alone are:

    - those whose inner values others read, that are outputs, or that a Gradient node names;
    - tables of which it is not certain that their halves are equal: they are constants that are, or computed from a
      Concat of a value with itself, as exporters write it;
    - tables through which a gradient flows, and sizes of which it is not certain that they are equal.

    Requires: a sorted graph with shapes. Ensures: the values stand where the last of the old nodes stood; the node that
    gives y has its name.
    """
    graph = model.graph
    concatenations = [node for node in graph if node.op_type == "Concat" and not node.domain]
    if not concatenations:
        return
    named, varying = named_by_gradients(graph), varying_values(graph)
    main, replaced = Builder(graph, graph.opset_imports[""]), set[ir.Node]()
    for turned in concatenations:
        rotation = _match(turned)
        if rotation is None or are_seen(rotation.inside, rotation.y, named):
            continue
        if any(table in varying or not _is_doubled(table) for table in (rotation.cosines, rotation.sines)):
            continue
        last = rotation.y.producer()
        assert last is not None
        op = main.before(last)
        op.scope = f"fused {last.name}" if last.name else ""
        y = _emit(op, rotation, named)
        op.emitted[-1].name = last.name  # whoever wants y to be recomputed names the node that gives it
        take_over(graph, {rotation.y: y})
        replaced |= rotation.inside
    if replaced:
        graph.opset_imports.setdefault(MICROSOFT_DOMAIN, 1)
        remove_nodes(graph, replaced)


class _Layout(NamedTuple):
    """How cosines and sines lie beside x.

    Attributes:
        heads: The axis of the heads, 1 or 2; the other of these is that of the positions.
        per_sequence: Whether each sequence of the batch has rows of its own.
    """

    heads: int
    per_sequence: bool


class _Rotation(NamedTuple):
    """A rotary embedding as it stands in the graph.

    Attributes:
        x: What is turned, of four axes.
        y: The result.
        cosines: As long as x along the last axis.
        sines: Likewise.
        layout: How the tables lie beside x.
        inside: The nodes.
    """

    x: ir.Value
    y: ir.Value
    cosines: ir.Value
    sines: ir.Value
    layout: _Layout
    inside: set[ir.Node]


def _match(turned: ir.Node) -> _Rotation | None:
    """The rotary embedding that a Concat of halves is part of."""
    halves = _turned_halves(turned)
    if halves is None:
        return None
    x, inside = halves
    for by_sines in readers(turned.outputs[0], "Mul"):
        sines = _other(by_sines, turned.outputs[0])
        for total in readers(by_sines.outputs[0], "Add"):
            plain = _other(total, by_sines.outputs[0])
            by_cosines = operands(plain, "Mul")
            if plain is None or by_cosines is None or sines is None or x not in by_cosines:
                continue
            product = plain.producer()
            assert product is not None
            cosines = _other(product, x)
            layout = None if cosines is None else _layout(x, cosines)
            if cosines is not None and layout is not None and layout == _layout(x, sines):
                nodes = {turned, by_sines, total, product, *inside}
                return _Rotation(x, total.outputs[0], cosines, sines, layout, nodes)
    return None


def _turned_halves(turned: ir.Node) -> tuple[ir.Value, set[ir.Node]] | None:
    """x of [-b, a], where that is what a Concat gives, and the nodes between."""
    if len(turned.inputs) != 2 or turned.attributes["axis"].as_int() not in (-1, _RANK - 1):
        return None
    minus_b, a = turned.inputs
    negation = None if minus_b is None else minus_b.producer()
    if negation is None or a is None or negation.op_type != "Neg" or negation.domain:
        return None
    b = negation.inputs[0]
    first, second = a.producer(), None if b is None else b.producer()
    if first is None or second is None or b is None or first.domain or second.domain:
        return None
    x, sizes = first.inputs[0], [dimensions(value) or (None,) for value in (a, b)]
    whole = None if x is None else dimensions(x)
    if x is None or x is not second.inputs[0] or x.dtype != ir.DataType.FLOAT or whole is None or len(whole) != _RANK:
        return None
    if not isinstance(whole[-1], int) or any((size[-1], size[-1]) != _halved(whole[-1]) for size in sizes):
        return None
    if first is second:
        axis = first.attributes.get("axis")
        split = first.op_type == "Split" and axis is not None and axis.as_int() in (-1, _RANK - 1)
        return (x, {turned, negation, first}) if split and tuple(first.outputs) == (a, b) else None
    if not (_begins(first) and _ends(second, whole[-1])):
        return None
    return x, {turned, negation, first, second}


def _halved(size: int) -> tuple[int, int]:
    """Two halves; of an odd size they are not equal."""
    return size // 2, size - size // 2


def _begins(node: ir.Node) -> bool:
    """Whether a Slice takes its part of the last axis from the first element on."""
    return _is_along_last(node) and constant_number(node.inputs[1]) == 0


def _ends(node: ir.Node, size: int) -> bool:
    """Whether a Slice takes its part of the last axis up to the last element."""
    end = constant_number(node.inputs[2]) if _is_along_last(node) else None
    return end is not None and end >= size


def _is_along_last(node: ir.Node) -> bool:
    """Whether a node is a Slice of neighbours along the last of four axes, and no other."""
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return False
    step = 1 if len(node.inputs) < 5 else constant_number(node.inputs[4])
    return step == 1 and constant_number(node.inputs[3]) in (-1, _RANK - 1)


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The operand beside a value; the value itself where it is both."""
    first, second = node.inputs
    return second if first is value else first


def _layout(x: ir.Value, table: ir.Value) -> _Layout | None:
    """How a table lies beside x, where it is known to have a row for each place, and the same for all heads."""
    sizes, rows = dimensions(x), dimensions(table)
    if sizes is None or rows is None or len(rows) > _RANK:
        return None
    rows = (1,) * (_RANK - len(rows)) + rows
    if rows[3] != sizes[3] or rows[0] is None or rows[0] not in (1, sizes[0]):
        return None
    for heads, places in ((1, 2), (2, 1)):
        if rows[heads] == 1 and rows[places] is not None and rows[places] == sizes[places]:
            return _Layout(heads, rows[0] != 1)
    return None


def _is_doubled(table: ir.Value | None) -> bool:
    """Whether the second half of each row, along the last axis, is known to be as the first."""
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
    """The values whose rows have equal halves where those of a value have; ``None`` where that is not known."""
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
    """The size of the last axis; 1 of a scalar."""
    return (dimensions(value) or (1,))[-1]


def _leaves_rows(node: ir.Node, size: int) -> bool:
    """Whether the rows of a node's result, along the last axis, are among those of its first input."""
    source = node.inputs[0]
    sizes = None if source is None else dimensions(source)
    if not sizes or sizes[-1] != size or size < 2:
        return False
    if node.op_type == "Gather":
        axis = node.attributes.get("axis")
        return (0 if axis is None else axis.as_int()) % len(sizes) != len(sizes) - 1
    if node.op_type == "Slice":
        axes = constant_tensor(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
        return axes is not None and all(int(axis) % len(sizes) != len(sizes) - 1 for axis in axes.numpy())
    return True  # axes of one element come, go, or are repeated


def _emit(op: Builder, rotation: _Rotation, named: set[str]) -> ir.Value:
    """The operator's node, and what brings its result into the form of x."""
    x, heads_at = rotation.x, rotation.layout.heads
    batch, heads, places, width = (_sizes(x)[axis] for axis in (0, heads_at, 3 - heads_at, 3))
    tables = [_half(op, table, _number(width)) for table in (rotation.cosines, rotation.sines)]
    given = [_positions(op, rotation), *tables]
    rows = x if heads_at == 2 else _before_transpose(x, named)
    if rows is None:
        return op.several(OPERATOR, op.wrap(x), *given, outputs=1, domain=MICROSOFT_DOMAIN)[0].ir
    count = {"num_heads": heads} if isinstance(heads, int) else {}
    flat = _flat(op, rows, named)
    (y,) = op.several(OPERATOR, flat, *given, outputs=1, domain=MICROSOFT_DOMAIN, **count)
    y.ir.dtype = flat.dtype
    y = op.Reshape(y.with_shape(flat.shape), op.ints(0, 0, count.get("num_heads", -1), _number(width)))
    y.with_shape((batch, places, heads, width))
    return (y if heads_at == 2 else op.Transpose(y, perm=_HEADS_SECOND)).ir


def _before_transpose(x: ir.Value, named: set[str]) -> ir.Value | None:
    """[B, S, H, D], of which x is the transposition."""
    node = x.producer()
    if node is None or node.domain or node.op_type != "Transpose" or x.name in named:
        return None
    return node.inputs[0] if order_of(node, _RANK) == _HEADS_SECOND else None


def _flat(op: Builder, rows: ir.Value, named: set[str]) -> Value:
    """[B, S, H, D] as [B, S, H D]: as it was before it was divided into heads, where it was."""
    batch, places, heads, width = _sizes(rows)
    shape = batch, places, heads * width if isinstance(heads, int) and isinstance(width, int) else None
    node = rows.producer()
    source = None if node is None or node.domain or node.op_type != "Reshape" else node.inputs[0]
    if source is not None and rows.name not in named and None not in shape and dimensions(source) == shape:
        return op.wrap(source)
    whole = shape[2] if isinstance(shape[2], int) else -1
    return op.Reshape(op.wrap(rows), op.ints(0, 0, whole)).with_shape(shape)


def _half(op: Builder, table: ir.Value, width: int) -> Value:
    """The first halves of a table's rows, [rows, D/2]."""
    half, tensor = width // 2, constant_tensor(table)
    if tensor is not None:
        return op.constant(tensor.numpy()[..., :half].reshape(-1, half))
    first = op.Slice(op.wrap(table), op.ints(0), op.ints(half), op.ints(-1))
    return op.Reshape(first, op.ints(-1, half)).with_shape((None, half))


def _positions(op: Builder, rotation: _Rotation) -> Value:
    """Which rows of the tables are taken, [B, S]; the first of them, [1], where all sequences have the same."""
    if not rotation.layout.per_sequence:
        return op.ints(0)
    table = op.wrap(rotation.cosines)
    sizes = [op.dimension(table, axis) for axis in (0, 3 - rotation.layout.heads)]
    shape = op.Concat(*sizes, axis=0)
    count = op.Squeeze(op.Mul(*sizes))
    every = op.Range(op.constant(0, np.int64), count, op.constant(1, np.int64))
    known = _sizes(rotation.x)
    return op.Reshape(every, shape).with_shape((known[0], known[3 - rotation.layout.heads]))


def _sizes(value: ir.Value) -> tuple[Dimension, ...]:
    """The axes of a value that is known to have four."""
    sizes = dimensions(value)
    assert sizes is not None
    return sizes


def _number(size: Dimension) -> int:
    assert isinstance(size, int)
    return size
