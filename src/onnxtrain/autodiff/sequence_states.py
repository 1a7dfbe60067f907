"""States of a Loop that cannot be stacked over the steps: sequences, and tensors that grow or shrink.

The backward Loop (:mod:`onnxtrain.autodiff.rules.control_flow`) reads the states before each step. A step that only
inserts items into a sequence at known positions is undone by removing them. For other states a second forward Loop
records the states of all steps on a tape; the backward steps take a sequence's items from its end, and tensors by their
index.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.bodies import copy_body, input_like, new_input
from onnxtrain.autodiff.node import Node
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import Values, computed_from
from onnxtrain.graph.inference import keeps_shape
from onnxtrain.graph.passes import remove_dead_nodes


class Carried(NamedTuple):
    """A state of the backward Scan or Loop: its initial value, and its values before and after a step."""

    initial: Value
    inner: Value
    result: Value


class Tape(NamedTuple):
    """The values of a state before all steps; for a sequence, all items and their number before each step."""

    items: Value
    lengths: Value | None


def undone(op: Builder, state: ir.Value, next_state: ir.Value, after: Value) -> Value | None:
    """The sequence before a step from the one after it, where the step only inserts items at known positions."""
    positions = []
    while next_state is not state:
        producer = next_state.producer()
        if producer is None or producer.domain or producer.op_type not in ("Identity", "SequenceInsert"):
            return None
        if producer.op_type == "SequenceInsert":
            given = producer.inputs[2] if len(producer.inputs) > 2 else None
            known = -1 if given is None else op.wrap(given).constant()
            if known is None:
                return None
            # A negative position counts from the item behind the inserted one.
            positions.append(int(known) - int(given is not None and known < 0))
        source = producer.inputs[0]
        assert source is not None
        next_state = source
    for position in positions:
        after = op.SequenceErase(after, op.constant(position, np.int64))
    return after


def changes_shape(state: ir.Value, next_state: ir.Value) -> bool:
    """Return whether the nodes of a step show that it makes a state longer or shorter."""
    if state.shape is not None and state.shape.is_static() and state.shape == next_state.shape:
        return False
    sources = _element_wise_sources(next_state)
    producers = [producer for value in sources if (producer := value.producer()) is not None]
    return any(
        source is not None and state in _element_wise_sources(source)
        for producer in producers
        if producer.op_type in _RESIZING and not producer.domain
        for source in producer.inputs
    )


_RESIZING = frozenset({"Compress", "Concat", "Pad", "Slice", "Split", "Tile"})


def _element_wise_sources(value: ir.Value) -> set[ir.Value]:
    """A value, and all values that it is computed from by element-wise nodes."""
    found = {value}
    pending = [value]
    while pending:
        producer = pending.pop().producer()
        if producer is not None and not producer.domain and keeps_shape(producer.op_type):
            new = {source for source in producer.inputs if source is not None} - found
            found |= new
            pending.extend(new)
    return found


def forget_sizes(graph: ir.Graph, states: Collection[ir.Value]) -> None:
    """Forget the sizes (not the ranks) of states and of values that depend on them: exporters declare one step's."""
    for value in computed_from(graph, states):
        if value.shape is not None:
            value.shape = ir.Shape([None] * len(value.shape))


def record_tapes(node: Node, graph: ir.Graph, chosen: Sequence[ir.Value]) -> list[Tape]:
    """Emit a second forward Loop that records some of its states before each step."""
    op = node.op.body([], "record")
    values: Values = {}
    count = len(node.inputs)
    op.graph.inputs.extend([input_like(op, value, values) for value in graph.inputs])
    tapes = [new_input(op, "tape", op.wrap(state).dtype) for state in chosen]
    for output in copy_body(graph, op, values)[: count - 1]:
        op.output(output)
    before = [op.wrap(inner) for state in chosen if (inner := values[state]) is not None]
    for tape, state in zip(tapes, before, strict=True):
        op.output(_appended(op, tape, state) if state.is_sequence else op.SequenceInsert(tape, state))
    for state in before:
        if state.is_sequence:
            op.output(op.SequenceLength(state).with_shape(()))
    remove_dead_nodes(op.graph)
    empty = [node.op.SequenceEmpty(dtype=int(tape.dtype)) for tape in tapes]
    made = node.op.several("Loop", *node.inputs, *empty, outputs=len(op.graph.outputs) - 1, body=op.graph)
    first, last = count - 2, count - 2 + len(chosen)
    lengths = iter(made[last:])
    pairs = zip(made[first:last], before, strict=True)
    return [Tape(items, next(lengths) if state.is_sequence else None) for items, state in pairs]


def _appended(op: Builder, tape: Value, items: Value) -> Value:
    """Append the items of one sequence to another."""
    body = op.body([], "keep")
    number = new_input(body, "number", ir.DataType.INT64, scalar=True)
    condition = new_input(body, "condition", ir.DataType.BOOL, scalar=True)
    kept = new_input(body, "kept", tape.dtype)
    body.output(condition)
    body.output(body.SequenceInsert(kept, body.SequenceAt(body.wrap(items.ir), number)))
    return op.Loop(op.SequenceLength(items), None, tape, body=body.graph)


def taken_back(op: Builder, tape: Value, length: Value) -> tuple[Value, Value]:
    """Split the last items, in their order, off a tape; returns them and the shorter tape."""
    body = op.body([], "take back")
    new_input(body, "number", ir.DataType.INT64, scalar=True)
    condition = new_input(body, "condition", ir.DataType.BOOL, scalar=True)
    rest, items = (new_input(body, name, tape.dtype) for name in ("tape", "items"))
    body.output(condition)
    body.output(body.SequenceErase(rest))
    last, first = body.constant(-1, np.int64), body.constant(0, np.int64)
    body.output(body.SequenceInsert(items, body.SequenceAt(rest, last), first))
    shorter, taken = op.several(
        "Loop", length, None, tape, op.SequenceEmpty(dtype=int(tape.dtype)), outputs=2, body=body.graph
    )
    return taken, shorter
