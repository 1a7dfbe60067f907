"""LSTM, GRU and RNN as operators of this project's domain that save values for their gradients, and those gradients.

Attributes are those of the standard operators, but ``activations`` is one string with spaces between the names, and
``activation_alpha`` and ``activation_beta`` have a number for each of them. The operators save the values of the gates
or, where the slope of an activation does not follow from its value (or is cut by ``clip``), the inputs of the gates.

No input is left out: one of shape [0] is the placeholder for it (workarounds: optional inputs of custom operators).
ONNX Runtime gives the outputs of a custom operator the type of its last input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.engine import Engine
from onnxtrain.autodiff.fused import VERSION, emit, register_fused
from onnxtrain.autodiff.node import Node, Seeds
from onnxtrain.autodiff.path import Forward
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules import gated, recurrent
from onnxtrain.autodiff.rules.recurrent import Activation, Direction, Sequences, activations, clipped, split
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

OPERATORS = {"LSTM": gated.LSTM_DEFAULT, "GRU": gated.GRU_DEFAULT, "RNN": recurrent.RNN_DEFAULT}
"""Operators, and the default activation functions of one direction."""

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
INPUTS = {"LSTM": 8, "GRU": 6, "RNN": 6}
_LENGTHS = 4
_FOLLOW_FROM_VALUE = frozenset({"Sigmoid", "Tanh", "Relu"})
_ATTRIBUTES = ("direction", "hidden_size", "clip", "input_forget", "linear_before_reset")
_FUNCTIONS = ("activations", "activation_alpha", "activation_beta")
_PARTS = frozenset({"Expand", "Identity", "Slice", "Squeeze", "Unsqueeze"})  # zeros of zeros
_ONLY = {"input_forget": "LSTM", "linear_before_reset": "GRU"}


def given(node: Node, index: int) -> Value | None:
    """An input of a fused operator; ``None`` for the placeholder of one that is left out."""
    value = node.input(index)
    return None if value is None or value.static_shape == (0,) else value


def all_inputs(node: Node, values: Sequence[Value | None]) -> list[Value]:
    """Inputs of a fused operator, with a placeholder of shape [0] for each one that is left out."""
    types = [ir.DataType.INT32 if index == _LENGTHS else node.x.dtype for index in range(len(values))]
    return [
        node.op.constant(np.zeros(0, kind.numpy())) if value is None else value
        for kind, value in zip(types, values, strict=True)
    ]


def standard_inputs(node: Node) -> list[Value | None]:
    """The inputs of the standard operator, from a fused operator or its gradient."""
    return [given(node, index) for index in range(INPUTS[_standard_name(node)])]


def _standard_name(node: Node) -> str:
    return node.operator.removesuffix("Gradient")


def settings(node: Node) -> dict[str, Any]:
    """Attributes of the fused operator for a standard node."""
    functions = _functions(node)
    return node.attributes(*_ATTRIBUTES) | {
        "activations": " ".join(function.name for function in functions),
        "activation_alpha": [function.alpha or 0.0 for function in functions],
        "activation_beta": [function.beta or 0.0 for function in functions],
    }


def states(operator: str) -> int:
    """The number of outputs of the standard operator: Y and the last states."""
    return 3 if operator == "LSTM" else 2


def keeps_linear(node: Node) -> bool:
    """Return whether a GRU also saves R h + Rb of its candidate, which the reset gate scales."""
    return node.operator.startswith("GRU") and bool(node.attribute("linear_before_reset", 0))


def _saved_count(node: Node) -> int:
    """The number of outputs that a node saves for its gradient."""
    return 2 if node.operator == "LSTM" or keeps_linear(node) else 1


def _functions(node: Node) -> list[Activation]:
    """The activation functions of all directions of a standard or fused node."""
    count = 2 if node.attribute("direction", "forward") == "bidirectional" else 1
    return [function for one in activations(node, OPERATORS[node.operator], count) for function in one]


def _standard(node: Node) -> tuple[Value, ...]:
    """The standard operator with the inputs and attributes of a fused node."""
    functions = _functions(node)
    outputs = node.op.several(
        node.operator,
        *node.inputs,
        outputs=states(node.operator),
        activations=[function.name for function in functions],
        activation_alpha=[function.alpha for function in functions if function.alpha is not None] or None,
        activation_beta=[function.beta for function in functions if function.beta is not None] or None,
        **node.attributes(*(name for name in _ATTRIBUTES if _ONLY.get(name, node.operator) == node.operator)),
    )
    for output, like in zip(outputs, node.outputs, strict=False):
        output.ir.dtype = node.x.dtype
        output.with_shape(like.shape)
    return outputs


def _gate(one: Direction, function: Activation, value: Value) -> tuple[Value, Value]:
    """The value of a gate, and the saved value: itself or its input."""
    found = function(clipped(one.node, value))
    return found, value if _keeps_inputs(one.node) else found


def _keeps_inputs(node: Node) -> bool:
    """Return whether the inputs of the gates are saved, not their values."""
    names = node.attribute("activations").split()
    return node.attribute("clip") is not None or not _FOLLOW_FROM_VALUE.issuperset(names)


def _joined(*parts: Value) -> Value:
    return parts[0].op.Concat(*parts, axis=-1).with_shape((None,) * 3)


def _keep_rnn(one: Direction) -> list[Value]:
    return [_gate(one, one.functions[0], one.gates())[1].with_shape((None,) * 3)]


def _keep_lstm(one: Direction) -> list[Value]:
    gates = one.gates().with_shape((None,) * 3)
    cells, earlier = gated.cells_of(one, gates)
    i, o, f, g = split(gates, 4)
    if one.peepholes is not None:
        peepholes = split(one.peepholes, 3)
        i, o, f = i + peepholes[0] * earlier, o + peepholes[1] * cells, f + peepholes[2] * earlier
    gate, candidate, _ = one.functions
    value, i = _gate(one, gate, i)
    (_, o), (_, g) = _gate(one, gate, o), _gate(one, candidate, g)
    if not one.node.attribute("input_forget", 0):
        _, f = _gate(one, gate, f)
    elif not _keeps_inputs(one.node):
        f = 1 - value
    return [_joined(i, o, f, g), cells]


def _keep_gru(one: Direction) -> list[Value]:
    op = one.node.op
    gates, candidate, (_, r_candidate), (_, bias) = gated.parts_of_gru(one)
    gate, function = one.functions
    (_, z), (reset, r) = (_gate(one, gate, part) for part in split(gates, 2))
    transposed = op.Transpose(r_candidate, perm=[1, 0])
    if not keeps_linear(one.node):
        n = candidate + ((reset * one.before) @ transposed + bias)
        return [_joined(z, r, _gate(one, function, n)[1])]
    linear = one.before @ transposed + bias
    return [_joined(z, r, _gate(one, function, candidate + reset * linear)[1]), linear.with_shape((None,) * 3)]


@register_gradient(*OPERATORS, domain=ONNXTRAIN_DOMAIN)
def recurrent_rule(node: Node, *dys: Value | None) -> Gradients:
    """One node from X ... P, Y, the saved values, and the gradients of Y and the last states."""
    inputs = standard_inputs(node)
    operator, count = node.operator, states(node.operator)
    for index in range(count + _saved_count(node)):
        node.output_required(index, node.x.dtype)
    saved = node.outputs[count:]
    arriving = [None if dy is None or is_zero(dy) else dy for dy in dys[:count]]
    arriving += [None] * (count - len(arriving))
    wanted = [value if index != _LENGTHS and node.wants(value) else None for index, value in enumerate(inputs)]
    second = saved[1] if len(saved) > 1 else None
    gate_parts = [saved[0], second] if operator == "GRU" else [saved[0]]
    likes = [*gate_parts, *(value for index, value in enumerate(wanted) if index != _LENGTHS)]
    while likes[-1] is None:
        likes.pop()
    read = all_inputs(node, [*inputs, node.y, saved[0], *([] if operator == "RNN" else [second]), *arriving])
    found = emit(node.op, f"{operator}Gradient", *read, like=likes, **node.attributes(*_ATTRIBUTES, *_FUNCTIONS))
    for value, like in zip(found, likes, strict=True):
        if like is None:
            value.ir.name = ""
    gradients: list[Value | None] = [*found[len(gate_parts) :], *[None] * len(inputs)]
    gradients.insert(_LENGTHS, None)
    return [None if value is None else gradient for value, gradient in zip(wanted, gradients, strict=False)]


def is_zero(value: Value) -> bool:
    """Return whether a value is known to be zero: an initial state, or the gradient of an output without readers."""
    node = value.ir.producer()
    if node is not None and node.op_type in _PARTS and not node.domain and node.inputs[0] is not None:
        return is_zero(value.op.wrap(node.inputs[0]))
    if node is None or node.op_type != "ConstantOfShape" or node.domain:
        constant = value.constant()
        return constant is not None and not constant.any()
    fill = node.attributes.get("value")
    return fill is None or not fill.as_tensor().numpy().any()


@register_fused(*(f"{name}Gradient" for name in OPERATORS))
def recurrent_gradient(node: Node) -> Sequence[Value | None]:
    """The rule of the standard operator, which reads Y and none of the saved values."""
    operator = _standard_name(node)
    count, direction_rule = INPUTS[operator], _RULES[operator]
    if keeps_linear(node):
        direction_rule = gated.gru_reset_after
    first = count + (2 if operator == "RNN" else 3)
    dys = [given(node, first + index) for index in range(states(operator))]
    standard = Node(node.ir, node.op, pull_back=_pull_back)
    view = standard.with_values(standard_inputs(node), [node.input_required(count)])
    sequences = Sequences(view)
    sides = recurrent.directions(sequences, recurrent.visible_output(view), dys, OPERATORS[operator])
    parts = [direction_rule(one) for one in sides]
    gate_parts: list[Value | None] = [_in_time(sequences, [part.dgates for part in parts])]
    if operator == "GRU":
        linear = [part.dlinear for part in parts if part.dlinear is not None]
        gate_parts.append(_in_time(sequences, linear) if linear else None)
    gradients = recurrent.joined(sequences, parts)
    return [*gate_parts, *(value for index, value in enumerate(gradients) if index != _LENGTHS)]


def _pull_back(op: Builder, seeds: Seeds, xs: Sequence[ir.Value]) -> list[Value | None]:
    """Pull gradients back inside the step that a body writes."""
    return Engine(Forward(op.graph, {"": op.opset, ONNXTRAIN_DOMAIN: VERSION}, {}), op).pull_back(seeds, xs)


def _in_time(sequences: Sequences, parts: Sequence[Value]) -> Value:
    """Join [t, b, n] of each direction, in its own time, to [t, b, d, n]."""
    return sequences.together([sequences.turned(part, d) for d, part in enumerate(parts)], 2)


_KEEP = {"LSTM": _keep_lstm, "GRU": _keep_gru, "RNN": _keep_rnn}
"""The values that each operator saves of a direction."""

_RULES = {"LSTM": gated.lstm_direction, "GRU": gated.gru_reset_before, "RNN": recurrent.rnn_direction}


@register_fused(*OPERATORS)
def recurrent_body(fused: Node) -> Sequence[Value | None]:
    """The standard operator, and the values that are saved of each direction."""
    node = fused.with_values(standard_inputs(fused))
    results = _standard(node)
    hidden = results[0] if results[0].rank is not None else results[0].with_shape((None,) * 4)
    sequences = Sequences(node)
    sides = recurrent.directions(sequences, hidden, [None], OPERATORS[node.operator])
    keep = _KEEP[node.operator]
    saved = [[sequences.turned(value, index) for value in keep(one)] for index, one in enumerate(sides)]
    axes = (2, 1) if node.operator == "LSTM" else (2, 2)
    parts = zip(*saved, strict=True)
    return [*results, *(sequences.together(part, axis) for part, axis in zip(parts, axes, strict=False))]
