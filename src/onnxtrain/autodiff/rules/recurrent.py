"""Gradients of recurrent operators: directions, lengths, the backward Scan that LSTM, GRU and RNN share; RNN.

The gates of all steps are computed at once: Y gives the hidden states before every step, so two large matmuls apply the
weights. Only the gradient of the state goes from step to step, in a Scan over the steps in reverse order with one
matmul per step; the gradients of the weights are large matmuls again. In the body of that Scan the rules of its
operators differentiate the element-wise part of a step, for any activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.placement import count_to, reversed_along, size_of, zeros
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules.activation import activation
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder, Value

Step = Callable[[Builder, list[Value], list[Value]], tuple[list[Value], list[Value]]]
"""(builder of the body, states, items of this step) -> (next states, results of this step)."""


class Activation(NamedTuple):
    """An activation function with its parameters, by the name that the recurrent operators know."""

    name: str
    alpha: float | None
    beta: float | None

    def __call__(self, x: Value) -> Value:
        """The function's value, emitted through the builder of its argument."""
        alpha, beta = self.alpha, self.beta
        if self.name not in ("Affine", "ScaledTanh"):
            return activation(self.name, x, alpha=alpha, beta=beta)
        assert alpha is not None
        assert beta is not None
        return x * alpha + beta if self.name == "Affine" else x.op.Tanh(x * beta) * alpha


# Defaults of alpha and beta; None for a function without that parameter.
_PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "Affine": (1.0, 0.0),
    "Elu": (1.0, None),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01, None),
    "Relu": (None, None),
    "ScaledTanh": (1.0, 1.0),
    "Sigmoid": (None, None),
    "Softplus": (None, None),
    "Softsign": (None, None),
    "Tanh": (None, None),
    "ThresholdedRelu": (1.0, None),
}
_NAMES = {name.lower(): name for name in _PARAMETERS}


def activations(node: Node, default: Sequence[str], directions: int) -> list[list[Activation]]:
    """The activation functions of each direction; alpha and beta go to the functions that have them, in order."""
    names = node.attribute("activations") or list(default) * directions
    if isinstance(names, str):  # of a fused operator: names in one string, alpha and beta for every function
        numbers = [node.attribute(f"activation_{kind}") for kind in ("alpha", "beta")]
        triples = zip(names.split(), *numbers, strict=True)
        return _by_direction([_with_numbers(name, alpha, beta) for name, alpha, beta in triples], len(default))
    alphas, betas = (iter(node.attribute(f"activation_{kind}") or ()) for kind in ("alpha", "beta"))
    found = []
    for name in names:
        if name.lower() not in _NAMES:
            raise GradientError(
                f"{describe(node.ir)}: the activation {name!r} is unknown; the operator knows "
                f"{', '.join(sorted(_PARAMETERS))}."
            ).about(describe(node.ir), got=name, wanted=sorted(_PARAMETERS))
        alpha, beta = _PARAMETERS[_NAMES[name.lower()]]
        found.append(
            _with_numbers(
                name,
                next(alphas, alpha) if alpha is not None else None,
                next(betas, beta) if beta is not None else None,
            )
        )
    return _by_direction(found[: directions * len(default)], len(default))


def numbers_with_defaults(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]
) -> tuple[list[float], list[float]] | None:
    """Complete ``activation_alpha`` and ``activation_beta`` by the defaults; ``None`` where a function is unknown."""
    if any(name.lower() not in _NAMES for name in names):
        return None
    defaults = [_PARAMETERS[_NAMES[name.lower()]] for name in names]
    alpha, beta = ([number for number in column if number is not None] for column in zip(*defaults, strict=True))
    return [*alphas, *alpha[len(alphas) :]], [*betas, *beta[len(betas) :]]


def _with_numbers(name: str, alpha: float | None, beta: float | None) -> Activation:
    """A function with the parameters that it has."""
    name = _NAMES[name.lower()]
    has_alpha, has_beta = (number is not None for number in _PARAMETERS[name])
    return Activation(name, alpha if has_alpha else None, beta if has_beta else None)


def _by_direction(found: list[Activation], count: int) -> list[list[Activation]]:
    return [found[begin : begin + count] for begin in range(0, len(found), count)]


def scan(
    op: Builder, initial: Sequence[Value], sequences: Sequence[Value], step: Step, *, reverse: bool
) -> list[Value]:
    """Emit a Scan over the first axis of some sequences, in either direction."""
    body = op.body([], "step")
    states = [_input(body, value, value.shape) for value in initial]
    items = [_input(body, value, None if value.shape is None else value.shape[1:]) for value in sequences]
    body.graph.inputs.extend(value.ir for value in (*states, *items))
    following, results = step(body, states, items)
    for value in (*following, *results):
        body.output(value)
    return list(
        op.several(
            "Scan",
            *initial,
            *sequences,
            outputs=len(following) + len(results),
            body=body.graph,
            num_scan_inputs=len(sequences),
            scan_input_directions=[int(reverse)] * len(sequences),
            scan_output_directions=[int(reverse)] * len(results),
        )
    )


def _input(body: Builder, like: Value, shape: tuple[int | str | None, ...] | None) -> Value:
    value = ir.Value(name=f"{body.unique_prefix()}input", type=ir.TensorType(like.dtype))
    return body.wrap(value).with_shape(shape)


class Sequences:
    """The tensors of a recurrent node, time-major and one direction at a time."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.op = node.op
        self.batch_first = node.attribute("layout", 0) == 1
        direction = node.attribute("direction", "forward")
        self.backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
        self.count = len(self.backwards)
        self.lengths = node.input(4)
        recurrence = node.input_required(2)
        size = node.attribute("hidden_size") or (recurrence.shape[-1] if recurrence.shape else None)
        if not isinstance(size, int):
            raise GradientError(
                f"{describe(node.ir)}: the gradient needs hidden_size, which the node does not say and the shape of "
                f"{recurrence.name!r} does not give; add the attribute."
            ).about(recurrence.name)
        initial_states = (node.input(5), node.input(6))
        for value in (recurrence, *(state for state in initial_states if state is not None)):
            known = value.shape[-1] if value.shape else size
            if isinstance(known, int) and known != size:
                raise GradientError(
                    f"{describe(node.ir)} has hidden_size {size}, but {value.name!r} is for {known}; export it again."
                )
        self.hidden = size

    def input(self, direction: int) -> Value:
        """X [t, b, i] in the time order of a direction."""
        value = self.node.x
        if self.batch_first:
            value = self.op.Transpose(value, perm=[1, 0, 2])
        return self.turned(value, direction)

    def output(self, value: Value, direction: int) -> Value:
        """A direction's part [t, b, h] of Y or dY in its own time."""
        op = self.op
        part = op.Gather(value, op.constant(direction, np.int64), axis=2 if self.batch_first else 1)
        if self.batch_first:
            part = op.Transpose(part, perm=[1, 0, 2])
        return self.turned(part.with_shape((None, None, self.hidden)), direction)

    def turned(self, value: Value, direction: int) -> Value:
        """Reverse the time of a time-major sequence if the direction is reversed."""
        op = self.op
        if not self.backwards[direction]:
            return value
        if self.lengths is not None:
            lengths = op.cast(self.lengths, ir.DataType.INT64)
            return op.ReverseSequence(value, lengths, time_axis=0, batch_axis=1).with_shape(value.shape)
        return reversed_along(value, 0)

    def weight(self, index: int, direction: int) -> Value | None:
        """One direction's part of a weight, bias or peephole input."""
        value = self.node.input(index)
        if value is None:
            return None
        return self.op.Gather(value, self.op.constant(direction, np.int64), axis=0)

    def state(self, value: Value | None, direction: int, like: Value) -> Value:
        """One direction's part of a state [b, h]; zeros, one per item of ``like`` [t, b, n], where it is left out."""
        op = self.op
        if value is None:
            return zeros(op, [size_of(like, 1), self.hidden], self.node.x.dtype)
        part = op.Gather(value, op.constant(direction, np.int64), axis=1 if self.batch_first else 0)
        return part.with_shape((None, self.hidden))

    def mask(self, steps: Value) -> list[Value]:
        """True for steps [t, b, 1] within the lengths; no mask where all are."""
        if self.lengths is None:
            return []
        op = self.op
        time = op.Unsqueeze(count_to(op, size_of(steps, 0)), op.ints(1, 2))
        return [op.Less(time, op.Unsqueeze(op.cast(self.lengths, ir.DataType.INT64), op.ints(0, 2)))]

    def together(self, parts: Sequence[Value], axis: int = 0) -> Value:
        """Join the parts of the directions along a new axis."""
        op = self.op
        wide = [op.Unsqueeze(part, op.ints(axis)) for part in parts]
        return wide[0] if len(wide) == 1 else op.Concat(*wide, axis=axis)

    def total_input(self, parts: Sequence[Value]) -> Value:
        """Sum the gradients of X of all directions, each in its own time order."""
        dx = self.op.sum_of([self.turned(part, direction) for direction, part in enumerate(parts)])
        return self.op.Transpose(dx, perm=[1, 0, 2]) if self.batch_first else dx


class Direction(NamedTuple):
    """One direction of a node, time-major and in its own time."""

    node: Node
    x: Value
    hidden: Value
    before: Value
    weight: Value
    recurrence: Value
    biases: tuple[Value, Value] | None
    functions: list[Activation]
    mask: list[Value]
    dhidden: Value
    dlast: tuple[Value, Value]
    cell: Value
    peepholes: Value | None

    def gates(self) -> Value:
        """X Wᵀ + H Rᵀ + Wb + Rb for all steps at once [t, b, gates h]."""
        op = self.node.op
        total = self.x @ op.Transpose(self.weight, perm=[1, 0])
        total = total + self.before @ op.Transpose(self.recurrence, perm=[1, 0])
        return total if self.biases is None else total + (self.biases[0] + self.biases[1])


class Found(NamedTuple):
    """The gradients of one direction."""

    dx: Value
    dweight: Value
    drecurrence: Value
    dbias: Value
    dinitial: list[Value]
    dgates: Value
    dpeepholes: Value | None = None
    dlinear: Value | None = None

    @classmethod
    def of(
        cls,
        one: Direction,
        da: Value,
        dinitial: list[Value],
        drecurrence: Value | None = None,
        drecurrent: Value | None = None,
        **more: Value | None,
    ) -> Found:
        """The gradients from da of W X_t + Wb; the gates may read R otherwise, and R h_t-1 + Rb may have its own."""
        recurrent = da if drecurrent is None else drecurrent
        dbias = one.node.op.Concat(sum_over_steps(da), sum_over_steps(recurrent), axis=0)
        drecurrence = outer_sum(recurrent, one.before) if drecurrence is None else drecurrence
        return cls(da @ one.weight, outer_sum(da, one.x), drecurrence, dbias, dinitial, da, **more)


Rule = Callable[[Direction], Found]


def differentiate(node: Node, dys: Sequence[Value | None], default: Sequence[str], rule: Rule) -> Gradients:
    """Apply a rule to each direction of a node and join the gradients."""
    sequences = Sequences(node)
    return joined(sequences, [rule(one) for one in directions(sequences, visible_output(node), dys, default)])


def directions(
    sequences: Sequences, hidden: Value, dys: Sequence[Value | None], default: Sequence[str]
) -> list[Direction]:
    """The directions of a node with the states ``hidden`` and the gradients ``dys`` of its outputs."""
    functions = activations(sequences.node, default, sequences.count)
    return [_one_direction(sequences, hidden, dys, direction, own) for direction, own in enumerate(functions)]


def joined(sequences: Sequences, parts: Sequence[Found]) -> list[Value | None]:
    """Combine the gradients of the directions into the gradients of the node's inputs."""
    gradients: list[Value | None] = [
        sequences.total_input([part.dx for part in parts]),
        sequences.together([part.dweight for part in parts]),
        sequences.together([part.drecurrence for part in parts]),
        sequences.together([part.dbias for part in parts]),
        None,
    ]
    axis = 1 if sequences.batch_first else 0
    gradients += [sequences.together(states, axis) for states in zip(*(part.dinitial for part in parts), strict=True)]
    peepholes = [part.dpeepholes for part in parts if part.dpeepholes is not None]
    gradients.append(sequences.together(peepholes) if peepholes else None)
    return gradients[: len(sequences.node.inputs)]


def _one_direction(
    sequences: Sequences, hidden: Value, dys: Sequence[Value | None], direction: int, functions: list[Activation]
) -> Direction:
    node = sequences.node
    x, states = sequences.input(direction), sequences.output(hidden, direction)
    initial = sequences.state(node.input(5), direction, states)
    weight, recurrence, bias = (sequences.weight(index, direction) for index in (1, 2, 3))
    assert weight is not None
    assert recurrence is not None
    dhidden = node.op.zeros_like(hidden) if dys[0] is None else dys[0]
    first, second = (sequences.state(dys[index] if index < len(dys) else None, direction, states) for index in (1, 2))
    return Direction(
        node,
        x,
        states,
        states_before(states, initial),
        weight,
        recurrence,
        None if bias is None else (split(bias, 2)[0], split(bias, 2)[1]),
        functions,
        sequences.mask(states),
        sequences.output(dhidden, direction),
        (first, second),
        sequences.state(node.input(6), direction, states),
        sequences.weight(7, direction),
    )


def states_before(values: Value, initial: Value) -> Value:
    """The states before every step: the initial state, then all values but the last."""
    op = values.op
    earlier = op.Slice(values, op.ints(0), op.ints(-1), op.ints(0))
    return op.Concat(op.Unsqueeze(initial, op.ints(0)), earlier, axis=0).with_shape(values.shape)


def visible_output(node: Node) -> Value:
    """The output Y with all hidden states, which is added to a node that leaves it out."""
    value = node.outputs[0]
    if not value.name:
        value.ir.name = f"{node.op.unique_prefix()}Y"
        value.ir.dtype = node.x.dtype
    return value if value.rank is not None else value.with_shape((None,) * 4)


def clipped(node: Node, value: Value) -> Value:
    """Clip the input of an activation where the node has the attribute ``clip``."""
    bound = node.attribute("clip")
    if bound is None:
        return value
    return value.op.Clip(value, value.op.scalar(-bound, value), value.op.scalar(bound, value))


def split(value: Value, count: int) -> tuple[Value, ...]:
    """Equal parts along the last axis, one per gate."""
    parts = value.op.several("Split", value, outputs=count, axis=-1, num_outputs=count)
    shape = value.shape
    if shape is not None:
        size = shape[-1]
        for part in parts:
            part.with_shape((*shape[:-1], size // count if isinstance(size, int) else None))
    return parts


def outer_sum(left: Value, right: Value) -> Value:
    """sum_tb left[t, b, :] right[t, b, :]ᵀ, the gradient of a weight [n, m]."""
    op = left.op
    return op.Gemm(op.Flatten(left, axis=2), op.Flatten(right, axis=2), transA=1).with_shape((None, None))


def sum_over_steps(value: Value) -> Value:
    """The sum over time and batch [n]."""
    return value.op.ReduceSum(value, value.op.ints(0, 1), keepdims=0).with_shape((None,))


def chosen(mask: Sequence[Value], value: Value, otherwise: Value) -> Value:
    """The value where there is no mask or it is true, else the other one."""
    return value if not mask else value.op.Where(mask[0], value, otherwise).with_shape(value.shape)


def certain(gradients: Sequence[Value | None]) -> list[Value]:
    """Return the gradients of a step's inputs; every input has one, since the output depends on all of them."""
    found = [gradient for gradient in gradients if gradient is not None]
    assert len(found) == len(gradients)
    return found


RNN_DEFAULT = ("Tanh",)


@register_gradient("RNN")
def rnn(node: Node, *dys: Value | None) -> Gradients:
    """h_t = f(a_t), a_t = W X_t + R h_t-1 + b: da_t = f'(a_t) (dY_t + dh_t), dh_t-1 = Rᵀ da_t, dW = sum da_t X_tᵀ."""
    return differentiate(node, dys, RNN_DEFAULT, rnn_direction)


def rnn_direction(one: Direction) -> Found:
    """The gradients of one direction of an RNN."""
    node, op = one.node, one.node.op
    function = one.functions[0]

    def step(body: Builder, states: list[Value], items: list[Value]) -> tuple[list[Value], list[Value]]:
        (dh,), (a, dy, *mask) = states, items
        h = function(clipped(node, a))
        (da,) = certain(node.pull_back(body, [(h, dh + dy)], [a]))
        da = chosen(mask, da, body.zeros_like(da))
        before = (da @ body.wrap(one.recurrence.ir)).with_shape(dh.shape)
        return [chosen(mask, before, dh)], [da]

    gates = one.gates().with_shape(one.hidden.shape)
    dinitial, da = scan(op, [one.dlast[0]], [gates, one.dhidden, *one.mask], step, reverse=True)
    return Found.of(one, da, [dinitial])
