"""Loop and Scan, differentiated through their bodies by a backward Loop or Scan, and If by its branches.

Forward, step t = 1 ... T applies the body to the previous states, to slices x_t of tensors (Scan only) and to captured
values c::

    (s_t, y_t) = f(s_t-1, x_t, c)

The gradient is another Loop or Scan, whose body runs for t = T ... 1. That body

- carries ds_t, initially the gradients of the final states, and dc, initially zeros;
- reads s_t-1, x_t and dy_t, each from a tensor of all steps, from the last step to the first;
- recomputes (s_t, y_t) by a copy of f, and then computes (ds_t-1, dx_t, dc_t) = fᵀ(ds_t, dy_t);
- passes ds_t-1 and dc + dc_t to the next step, and writes dx_t to the position of x_t. After t = 1 its states are ds_0
  and dc.

The forward node saves the states before every step that the backward body reads, as further scan outputs, and nothing
inside a step. A Loop also records the numbers of its steps, which give their count. States that cannot be stacked
(sequences, and tensors that change their shape) are undone step by step or recorded on a tape
(:mod:`onnxtrain.autodiff.sequence_states`). A body that samples random numbers is refused: recomputed, it would sample
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.bodies import copy_body, finish_body, input_like, new_input
from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.sequence_states import Carried, changes_shape, forget_sizes, record_tapes, taken_back, undone
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import Values
from onnxtrain.graph.value import Dimension, dimensions


@dataclass
class _Slice:
    """A tensor that a step reads or writes a slice of: its axis, and whether it runs backwards."""

    inner: ir.Value
    outer: Value
    axis: int = 0
    direction: int = 0


@dataclass
class _Steps:
    """The steps of a Loop or Scan."""

    graph: ir.Graph
    states: list[ir.Value]
    next_states: list[ir.Value]
    dstates: list[Value | None]
    taken: list[_Slice]
    given: list[_Slice]
    constants: Values = field(default_factory=dict)
    unstacked: set[ir.Value] = field(default_factory=set)


_Found = tuple[list[Value | None], list[Value | None], list[Value | None]]
"""The gradients of the initial states, of the sliced tensors and of the captured values."""


@register_gradient("Scan")
def scan(node: Node, *dys: Value | None) -> Gradients:
    """(s_t, y_t) = f(s_t-1, x_t, c): (ds_t-1, dx_t) = fᵀ(ds_t, dy_t) from the last step to the first; dc = sum."""
    graph = node.ir.attributes["body"].as_graph()
    slices = int(node.attribute("num_scan_inputs"))
    count = len(node.inputs) - slices
    axes, directions = _axes(node, "input", slices)
    outer = [node.input_required(count + index) for index in range(slices)]
    taken = [_Slice(*item) for item in zip(graph.inputs[count:], outer, axes, directions, strict=True)]
    axes, directions = _axes(node, "output", len(graph.outputs) - count)
    outputs = zip(graph.outputs[count:], dys[count:], axes, directions, strict=True)
    given = [_Slice(inner, dy, axis, back) for inner, dy, axis, back in outputs if dy is not None]
    for index, value in enumerate(graph.inputs):
        value.type = value.type or node.input_required(index).ir.type
    states, next_states = list(graph.inputs[:count]), list(graph.outputs[:count])
    steps = _Steps(graph, states, next_states, list(dys[:count]), taken, given)
    return [gradient for part in _reversed(node, steps) for gradient in part]


def _axes(node: Node, kind: str, count: int) -> tuple[list[int], list[int]]:
    axes = node.attribute(f"scan_{kind}_axes") or [0] * count
    return axes, node.attribute(f"scan_{kind}_directions") or [0] * count


@register_gradient("Loop")
def loop(node: Node, *dys: Value | None) -> Gradients:
    """(s_t, y_t) = f(t, s_t-1, c) while a condition holds: ds_t-1 = fᵀ(ds_t, dy_t) backwards; dc = sum.

    A state may be a sequence, whose gradient is a sequence, or a tensor that grows or shrinks.
    """
    graph = node.ir.attributes["body"].as_graph()
    states, next_states = list(graph.inputs[2:]), list(graph.outputs[1 : len(graph.inputs) - 1])
    count = len(states)
    for value, initial in zip(states, node.ir.inputs[2:], strict=True):
        if initial is not None:
            value.type = value.type or initial.type
    for value in states:
        if isinstance(value.type, ir.OptionalType):
            raise GradientError(
                f"{describe(node.ir)}: its state {value.name!r} is an optional value; the gradient needs states "
                "that are tensors or sequences; pass a tensor, and a flag for its presence as a further state."
            ).about(value.name)
    given = [_Slice(y, dy) for y, dy in zip(graph.outputs[1 + count :], dys[count:], strict=True) if dy is not None]
    steps = _Steps(graph, states, next_states, list(dys[:count]), [], given)
    sequences = {value for value in states if isinstance(value.type, ir.SequenceType)}
    resized = {value for value, after in zip(states, next_states, strict=True) if changes_shape(value, after)}
    forget_sizes(graph, resized)
    steps.unstacked |= sequences | resized
    iteration, condition = graph.inputs[:2]
    iteration.dtype = ir.DataType.INT64
    # The numbers of the steps are always recorded: they give the count.
    steps.taken.append(_Slice(iteration, _recorded(node, graph, iteration)))
    steps.constants[condition] = node.op.constant(True, np.bool_).ir
    dstates, _, captured = _reversed(node, steps)
    return [None, None, *dstates, *captured]


def _recorded(node: Node, graph: ir.Graph, value: ir.Value) -> Value:
    """The values that an input of the body has in all steps, as a further scan output of the forward node."""
    prefix = node.op.unique_prefix()
    identity = ir.Node("", "Identity", [value], num_outputs=1)
    copy = identity.outputs[0]
    copy.name, copy.type, copy.shape = f"{prefix}step", value.type, value.shape
    graph.append(identity)
    graph.outputs.append(copy)
    node.ir.resize_outputs(len(node.ir.outputs) + 1)
    stacked = node.ir.outputs[-1]
    stacked.name = f"{prefix}steps"
    if value.dtype is not None:
        stacked.dtype = value.dtype
    if value.shape is not None:
        stacked.shape = ir.Shape([None, *value.shape])
    for name in ("scan_output_axes", "scan_output_directions"):
        given = node.ir.attributes.get(name)
        if given is not None:
            node.ir.attributes.add(ir.AttrInt64s(name, [*given.as_ints(), 0]))
    return node.op.wrap(stacked)


def _reversed(node: Node, steps: _Steps) -> _Found:
    """Write the Scan or Loop that goes through the steps in reverse order."""
    op = node.op.body([], "gradient")
    values: Values = dict(steps.constants)
    records = [input_like(op, state, values) for state in steps.states]
    slices = [input_like(op, item.inner, values) for item in steps.taken]
    outputs = dict(zip(steps.graph.outputs, copy_body(steps.graph, op, values), strict=True))
    carried = [
        input_like(op, state) if dy is not None else None for state, dy in zip(steps.states, steps.dstates, strict=True)
    ]
    arriving = [input_like(op, item.inner) for item in steps.given]
    pairs = zip(steps.next_states, carried, strict=True)
    seeds = [(outputs[state], op.wrap(dy)) for state, dy in pairs if dy is not None]
    seeds += [(outputs[item.inner], op.wrap(dy)) for item, dy in zip(steps.given, arriving, strict=True)]
    wanted = [record for record, dy in zip(records, carried, strict=True) if dy is not None]
    sliced = [inner for inner, item in zip(slices, steps.taken, strict=True) if node.wants(item.outer)]
    captured = [value.ir for value in node.captured if node.wants(value)]
    xs = [op.wrap(value) for value in (*wanted, *sliced, *captured)]
    gradients = dict(zip((x.ir for x in xs), node.pull_back(op, seeds, xs), strict=True))
    return _emit(node, steps, op, _Inner(records, slices, carried, arriving, gradients))


@dataclass
class _Inner:
    """The values of the backward body, in the order of their states and tensors."""

    records: list[ir.Value]
    slices: list[ir.Value]
    carried: list[ir.Value | None]
    arriving: list[ir.Value]
    gradients: dict[ir.Value, Value | None]


def _emit(node: Node, steps: _Steps, op: Builder, inner: _Inner) -> _Found:
    """Give the body its outputs, and emit the Scan or Loop with it."""
    states: list[Carried] = []
    for record, carry, dy in zip(inner.records, inner.carried, steps.dstates, strict=True):
        if carry is not None and dy is not None:
            gradient = inner.gradients[record]
            gradient = op.zeros_like(op.wrap(record)) if gradient is None else gradient
            states.append(Carried(dy, op.wrap(carry), gradient))
    summed = [value for value in node.captured if inner.gradients.get(value.ir) is not None]
    for value in summed:
        total, gradient = op.wrap(input_like(op, value.ir)), inner.gradients[value.ir]
        assert gradient is not None
        zeros = node.op.zeros_like(node.op.wrap(value.ir))
        states.append(Carried(zeros, total, _accumulated(op, total, gradient)))
    sent = [
        (item, gradient)
        for item, value in zip(steps.taken, inner.slices, strict=True)
        if (gradient := inner.gradients.get(value)) is not None
    ]
    for result in [*(state.result for state in states), *(gradient for _, gradient in sent)]:
        op.output(result)
    finish_body(op)
    read = _read_slices(node, steps, inner)
    for restored in _restore_states(node, steps, op, inner, read):
        op.output(restored.result)
        states.append(restored)
    write = _loop_node if node.operator == "Loop" else _scan_node
    remaining = iter(write(node, op, states, read, [item for item, _ in sent]))
    dstates = [None if carry is None else next(remaining) for carry in inner.carried]
    sums = {value.ir: next(remaining) for value in summed}
    slices = {id(item): next(remaining) for item, _ in sent}
    return dstates, [slices.get(id(item)) for item in steps.taken], [sums.get(value.ir) for value in node.captured]


def _accumulated(op: Builder, total: Value, gradient: Value) -> Value:
    """total + gradient; for the gradient of a matmul, Gemm adds the total."""
    node = gradient.ir.producer()
    if node is None or node.op_identifier() != ("", "Gemm", "") or len(node.inputs) != 2:
        return op.sum_of([total, gradient])
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    operands = [op.wrap(value) for value in node.inputs if value is not None]
    return op.Gemm(*operands, total, **attributes).with_shape(total.shape)


def _scan_node(
    node: Node, op: Builder, states: list[Carried], read: list[_Slice], sent: list[_Slice]
) -> Sequence[Value]:
    for state in states:
        node.rank(state.initial)  # ONNX Runtime needs the ranks of a Scan's outputs
    op.graph.inputs.extend([*(state.inner.ir for state in states), *(item.inner for item in read)])
    return node.op.several(
        "Scan",
        *(state.initial for state in states),
        *(item.outer for item in read),
        outputs=len(op.graph.outputs),
        body=op.graph,
        num_scan_inputs=len(read),
        scan_input_axes=[item.axis for item in read],
        scan_input_directions=[1 - item.direction for item in read],
        scan_output_axes=[item.axis for item in sent] or None,
        scan_output_directions=[1 - item.direction for item in sent] or None,
    )


def _loop_node(
    node: Node, op: Builder, states: list[Carried], read: list[_Slice], sent: list[_Slice]
) -> Sequence[Value]:
    """Emit the backward Loop, which takes its slices itself; unlike Scan it may have no step at all."""
    assert not sent
    outer = node.op
    recorded = next(item.outer for item in read if item.outer.dtype == ir.DataType.INT64)
    count = outer.Reshape(outer.dimension(recorded, 0), outer.ints())
    last = outer.Sub(count, outer.constant(1, np.int64))
    number = new_input(op, "number", ir.DataType.INT64, scalar=True)
    condition = new_input(op, "condition", ir.DataType.BOOL, scalar=True)
    op.graph.inputs.extend(state.inner.ir for state in states)
    results = list(op.graph.outputs)
    op.graph.outputs.clear()
    op.output(condition)
    op.graph.outputs.extend(results)
    step = op.Sub(op.wrap(last.ir), number)
    for item in read:
        taken = op.Gather(op.wrap(item.outer.ir), step, axis=item.axis)
        item.inner.replace_all_uses_with(taken.ir)
    op.graph.sort()
    return outer.several("Loop", count, None, *(s.initial for s in states), outputs=len(states), body=op.graph)


def _read_slices(node: Node, steps: _Steps, inner: _Inner) -> list[_Slice]:
    """The slices that the backward body reads in each step: saved states, inputs, arriving gradients."""
    read = []
    for state, record in zip(steps.states, inner.records, strict=True):
        if _is_read(record) and state not in steps.unstacked:
            read.append(_Slice(record, _recorded(node, steps.graph, state)))
    for item, value in zip(steps.taken, inner.slices, strict=True):
        read.append(_Slice(value, item.outer, item.axis, item.direction))
    for item, value in zip(steps.given, inner.arriving, strict=True):
        read.append(_Slice(value, item.outer, item.axis, item.direction))
    return read


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _restore_states(node: Node, steps: _Steps, op: Builder, inner: _Inner, read: list[_Slice]) -> list[Carried]:
    """Restore the unstacked states that the backward body reads."""
    carried, recorded = [], []
    for index, (state, record) in enumerate(zip(steps.states, inner.records, strict=True)):
        if state not in steps.unstacked or not _is_read(record):
            continue
        after = op.wrap(input_like(op, state))
        before = undone(op, state, steps.next_states[index], after) if after.is_sequence else None
        if before is None:
            recorded.append((state, record))
        else:
            record.replace_all_uses_with(before.ir, replace_graph_outputs=True)
            carried.append(Carried(node.outputs[index], after, before))
    tapes = record_tapes(node, steps.graph, [state for state, _ in recorded]) if recorded else []
    for (_, record), tape in zip(recorded, tapes, strict=True):
        if tape.lengths is None:
            before = op.SequenceAt(op.wrap(tape.items.ir), op.wrap(inner.slices[0]))  # the number of the step
        else:
            rest = op.wrap(input_like(op, tape.items.ir))
            length = op.wrap(input_like(op, tape.lengths.ir)).with_shape(())
            before, shorter = taken_back(op, rest, length)
            read.append(_Slice(length.ir, tape.lengths))
            carried.append(Carried(tape.items, rest, shorter))
        record.replace_all_uses_with(before.ir, replace_graph_outputs=True)
    return carried


# The gradient of an If is an If on the same condition. Each of its branches recomputes the model's branch and carries
# the gradients of its outputs back to the captured values.


Shape = tuple[Dimension, ...] | None


@register_gradient("If")
def if_(node: Node, *dys: Value | None) -> Gradients:
    """y = f(c) or g(c) of captured values c: dc = the gradient in the taken branch."""
    wanted = [value for value in node.captured if node.wants(value)]
    if not wanted:
        return [None] * (1 + len(node.captured))
    names = ("then_branch", "else_branch")
    one, other = (_branch(node, name, names[1 - index], dys, wanted) for index, name in enumerate(names))
    found = iter(node.op.several("If", node.x, outputs=len(wanted), then_branch=one, else_branch=other))
    return [None, *(next(found) if node.wants(value) else None for value in node.captured)]


def _inside(op: Builder, dy: Value, own: Shape, other: Shape) -> Value:
    """A gradient in the shape of a branch's own output; the other branch may declare another shape, even rank."""
    outer, inner = dy.shape, op.wrap(dy.ir)
    if outer is None or (own is None and other is None) or dy.is_sequence:
        return inner
    if own is not None and len(own) == len(outer) and all(a in (None, b) for a, b in zip(outer, own, strict=True)):
        return inner
    return op.Identity(inner).with_shape(own)


def _branch(node: Node, name: str, other: str, dys: Sequence[Value | None], wanted: Sequence[Value]) -> ir.Graph:
    op = node.op.body([], name)
    graph, others = (node.ir.attributes[each].as_graph() for each in (name, other))
    outputs = zip(copy_body(graph, op, {}), dys, graph.outputs, others.outputs, strict=True)
    seeds = [
        (y, _inside(op, dy, dimensions(own), dimensions(theirs))) for y, dy, own, theirs in outputs if dy is not None
    ]
    xs = [op.wrap(value.ir) for value in wanted]
    for x, dx in zip(xs, node.pull_back(op, seeds, xs), strict=True):
        op.output(op.zeros_like(x) if dx is None else dx)
    finish_body(op)
    return op.graph
