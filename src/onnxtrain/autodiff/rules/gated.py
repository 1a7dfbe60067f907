"""LSTM and GRU: the steps of the gated cells."""

from __future__ import annotations

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules.recurrent import (
    Direction,
    Found,
    certain,
    chosen,
    clipped,
    differentiate,
    outer_sum,
    scan,
    split,
    states_before,
    sum_over_steps,
)
from onnxtrain.graph import Builder, Value

LSTM_DEFAULT = ("Sigmoid", "Tanh", "Tanh")
GRU_DEFAULT = ("Sigmoid", "Tanh")


@register_gradient("LSTM")
def lstm(node: Node, *dys: Value | None) -> Gradients:
    """c_t = f c_t-1 + i g, h_t = o tanh(c_t) with gates of a_t = W X_t + R h_t-1 + P c + b.

    da_t comes from (dY_t + dh_t, dc_t) through the step's own rules; dh_t-1 = Rᵀ da_t, dW = sum da_t X_tᵀ,
    dR = sum da_t h_t-1ᵀ.
    """
    return differentiate(node, dys, LSTM_DEFAULT, lstm_direction)


def _lstm_step(one: Direction, a: Value, before: Value) -> tuple[Value, Value]:
    """(h, c) after a step, from the inputs of the gates [b, 4 h] and the cell before it [b, h]."""
    node, op = one.node, a.op
    gate, candidate, output = one.functions
    i, o, f, g = split(a, 4)
    peepholes = None
    if one.peepholes is not None:
        peepholes = split(op.wrap(one.peepholes.ir), 3)
        i, f = i + peepholes[0] * before, f + peepholes[2] * before
    i = gate(clipped(node, i))
    f = 1 - i if node.attribute("input_forget", 0) else gate(clipped(node, f))
    c = f * before + i * candidate(clipped(node, g))
    if peepholes is not None:
        o = o + peepholes[1] * c
    return gate(clipped(node, o)) * output(c), c


def cells_of(one: Direction, gates: Value) -> tuple[Value, Value]:
    """The cells after and before all steps [t, b, h], from the inputs of the gates without peepholes."""

    def forward(body: Builder, states: list[Value], items: list[Value]) -> tuple[list[Value], list[Value]]:
        _, c = _lstm_step(one, items[0], states[0])
        return [c.with_shape(states[0].shape)], [c]

    _, cells = scan(one.node.op, [one.cell], [gates], forward, reverse=False)
    cells.with_shape(one.hidden.shape)
    return cells, states_before(cells, one.cell)


def lstm_direction(one: Direction) -> Found:
    """The gradients of one direction of an LSTM."""
    node, op = one.node, one.node.op

    def backward(body: Builder, states: list[Value], items: list[Value]) -> tuple[list[Value], list[Value]]:
        (dh, dc), (a, before, dy, *mask) = states, items
        h, c = _lstm_step(one, a, before)
        da, dbefore = certain(node.pull_back(body, [(h, dh + dy), (c, dc)], [a, before]))
        da = chosen(mask, da, body.zeros_like(da))
        dh_before = (da @ body.wrap(one.recurrence.ir)).with_shape(dh.shape)
        return [chosen(mask, dh_before, dh), chosen(mask, dbefore, dc)], [da]

    shape = one.hidden.shape
    assert shape is not None
    size = shape[2]
    gates = one.gates().with_shape((*shape[:2], 4 * size if isinstance(size, int) else None))
    cells, earlier = cells_of(one, gates)
    sequences = [gates, earlier, one.dhidden, *one.mask]
    dh, dc, da = scan(op, list(one.dlast), sequences, backward, reverse=True)
    da.with_shape(gates.shape)
    peepholes = None
    if one.peepholes is not None:
        di, do, df, _ = split(da, 4)
        parts = [sum_over_steps(part) for part in (di * earlier, do * cells, df * earlier)]
        peepholes = op.Concat(*parts, axis=0)
    return Found.of(one, da, [dh, dc], dpeepholes=peepholes)


@register_gradient("GRU")
def gru(node: Node, *dys: Value | None) -> Gradients:
    """h_t = (1 - z) n + z h_t-1 with z, r of W X_t + R h_t-1 + b and n of W X_t + R (r h_t-1) + b.

    With linear_before_reset the candidate n is of W X_t + r (R h_t-1 + Rb) + Wb. The gradients of the gates'
    inputs go back to h_t-1 and the weights as in an LSTM.
    """
    after = node.attribute("linear_before_reset", 0) == 1
    return differentiate(node, dys, GRU_DEFAULT, gru_reset_after if after else gru_reset_before)


def parts_of_gru(one: Direction) -> tuple[Value, Value, tuple[Value, Value], tuple[Value, Value]]:
    """The inputs of the gates z and r [t, b, 2 h], X Wᵀ + Wb of the candidate [t, b, h], and R and Rb split alike."""
    op, hidden = one.node.op, one.hidden.shape
    assert hidden is not None
    size = hidden[2]
    assert isinstance(size, int)
    w_gates, w_candidate = _two_and_one(one.weight, size)
    r_gates, r_candidate = _two_and_one(one.recurrence, size)
    gates = one.x @ op.Transpose(w_gates, perm=[1, 0]) + one.before @ op.Transpose(r_gates, perm=[1, 0])
    candidate = one.x @ op.Transpose(w_candidate, perm=[1, 0])
    if one.biases is None:
        zeros = op.constant([0] * 3 * size, one.x.dtype)
        biases = _two_and_one(zeros, size), _two_and_one(zeros, size)
    else:
        biases = _two_and_one(one.biases[0], size), _two_and_one(one.biases[1], size)
        gates = gates + (biases[0][0] + biases[1][0])
        candidate = candidate + biases[0][1]
    gates.with_shape((*hidden[:2], 2 * size))
    return gates, candidate.with_shape(hidden), (r_gates, r_candidate), biases[1]


def _two_and_one(value: Value, size: int) -> tuple[Value, Value]:
    """Split into the part of both gates and the part of the candidate."""
    first, second = value.op.several("Split", value, value.op.ints(2 * size, size), outputs=2, axis=0)
    return first, second


def gru_reset_before(one: Direction) -> Found:
    """The gradients of one direction: the candidate multiplies R by r h, which is known for all steps."""
    node, op = one.node, one.node.op
    gates, candidate, (r_gates, r_candidate), (_, bias) = parts_of_gru(one)
    reset = one.functions[0](clipped(node, split(gates, 2)[1])) * one.before
    reset.with_shape(one.hidden.shape)
    candidate = candidate + (reset @ op.Transpose(r_candidate, perm=[1, 0]) + bias)
    candidate.with_shape(one.hidden.shape)

    def step(body: Builder, states: list[Value], items: list[Value]) -> tuple[list[Value], list[Value]]:
        (dh,), (zr, n, before, dy, *mask) = states, items
        h, kept = _gru_step(one, zr, n, before)
        dzr, dn, dbefore = node.pull_back(body, [(h, dh + dy)], [zr, n, before])
        (dn,) = certain([dn])
        dkept = (dn @ body.wrap(r_candidate.ir)).with_shape(dh.shape)
        dreset, dbefore_reset = certain(node.pull_back(body, [(kept, dkept)], [zr, before]))
        dzr, dbefore = certain([dzr, dbefore])
        dzr = dzr + dreset
        back = dbefore + dbefore_reset + dzr @ body.wrap(r_gates.ir)
        parts = [dzr, dn]
        return [chosen(mask, back.with_shape(dh.shape), dh)], [chosen(mask, d, body.zeros_like(d)) for d in parts]

    sequences = [gates, candidate, one.before, one.dhidden, *one.mask]
    dinitial, dgates, dcandidate = scan(op, [one.dlast[0]], sequences, step, reverse=True)
    da = op.Concat(dgates, dcandidate, axis=2)
    drecurrence = op.Concat(outer_sum(dgates, one.before), outer_sum(dcandidate, reset), axis=0)
    return Found.of(one, da, [dinitial], drecurrence)


def _gru_step(one: Direction, zr: Value, n: Value, before: Value) -> tuple[Value, Value]:
    """h after a step and r h_t-1, from the inputs of the gates [b, 2 h] and of the candidate [b, h]."""
    gate, function = one.functions
    z, r = (gate(clipped(one.node, part)) for part in split(zr, 2))
    candidate = function(clipped(one.node, n))
    return candidate + z * (before - candidate), r * before


def gru_reset_after(one: Direction) -> Found:
    """The gradients of one direction: the gate r scales R h + Rb, which is known for all steps."""
    node, op = one.node, one.node.op
    gates, candidate, (r_gates, r_candidate), (_, bias) = parts_of_gru(one)
    linear = one.before @ op.Transpose(r_candidate, perm=[1, 0]) + bias
    linear.with_shape(one.hidden.shape)

    def step(body: Builder, states: list[Value], items: list[Value]) -> tuple[list[Value], list[Value]]:
        (dh,), (zr, n, q, before, dy, *mask) = states, items
        gate, function = one.functions
        z, r = (gate(clipped(node, part)) for part in split(zr, 2))
        new = function(clipped(node, n + r * q))
        h = new + z * (before - new)
        dzr, dn, dq, dbefore = certain(node.pull_back(body, [(h, dh + dy)], [zr, n, q, before]))
        back = dbefore + dzr @ body.wrap(r_gates.ir) + dq @ body.wrap(r_candidate.ir)
        parts = [dzr, dn, dq]
        return [chosen(mask, back.with_shape(dh.shape), dh)], [chosen(mask, d, body.zeros_like(d)) for d in parts]

    sequences = [gates, candidate, linear, one.before, one.dhidden, *one.mask]
    dinitial, dgates, dcandidate, dlinear = scan(op, [one.dlast[0]], sequences, step, reverse=True)
    da = op.Concat(dgates, dcandidate, axis=2)
    drecurrent = op.Concat(dgates, dlinear, axis=2)
    return Found.of(one, da, [dinitial], drecurrent=drecurrent, dlinear=dlinear)
