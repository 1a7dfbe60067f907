"""LSTM, GRU and RNN of the domain ``onnxtrain`` and their gradients in NumPy's float64, and random calls of them.

Gradients follow from the formulas, step by step backwards, independent of onnxtrain's gradient rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = dict[str, Array]


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(x / 2))


FUNCTIONS: dict[str, Callable[[Array, float, float], Array]] = {
    "Sigmoid": lambda x, a, b: sigmoid(x),
    "Tanh": lambda x, a, b: np.tanh(x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "Affine": lambda x, a, b: a * x + b,
    "LeakyRelu": lambda x, a, b: np.where(x < 0, a * x, x),
    "ThresholdedRelu": lambda x, a, b: np.where(x > a, x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "Elu": lambda x, a, b: np.where(x < 0, a * np.expm1(x), x),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "Softplus": lambda x, a, b: np.logaddexp(x, 0),
}
SLOPES: dict[str, Callable[[Array, float, float], Array]] = {
    "Sigmoid": lambda x, a, b: sigmoid(x) * sigmoid(-x),
    "Tanh": lambda x, a, b: 1 / np.cosh(x) ** 2,
    "Relu": lambda x, a, b: np.where(x > 0, 1.0, 0),
    "Affine": lambda x, a, b: np.full(x.shape, a),
    "LeakyRelu": lambda x, a, b: np.where(x < 0, a, 1),
    "ThresholdedRelu": lambda x, a, b: np.where(x > a, 1.0, 0),
    "ScaledTanh": lambda x, a, b: a * b / np.cosh(b * x) ** 2,
    "HardSigmoid": lambda x, a, b: np.where((a * x + b > 0) & (a * x + b < 1), a, 0),
    "Elu": lambda x, a, b: np.where(x < 0, a * np.exp(x), 1),
    "Softsign": lambda x, a, b: 1 / (1 + np.abs(x)) ** 2,
    "Softplus": lambda x, a, b: sigmoid(x),
}
DEFAULTS = {"LSTM": "Sigmoid Tanh Tanh", "GRU": "Sigmoid Tanh", "RNN": "Tanh"}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Recurrent:
    """One call of an operator, and of its gradient.

    Attributes:
        operator: LSTM, GRU or RNN.
        steps, batch, inputs, hidden: Sizes.
        given: Optional inputs: letters of b (biases), l (lengths), h and c (initial states), p (peepholes).
        attributes: The operator's.
        seed: Of the numbers.
    """

    operator: str
    steps: int = 5
    batch: int = 3
    inputs: int = 2
    hidden: int = 4
    given: str = "bhc"
    attributes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def all_inputs(self, names: list[str], feeds: Arrays) -> Arrays:
        """Inputs by name, in order: those that are not fed have the shape [0]."""
        dtype = feeds["X"].dtype
        return {n: feeds.get(n, np.zeros(0, np.int32 if n == "sequence_lens" else dtype)) for n in names}

    @property
    def directions(self) -> int:
        return 2 if self.attributes.get("direction") == "bidirectional" else 1

    @property
    def keeps_linear(self) -> bool:
        return self.operator == "GRU" and bool(self.attributes.get("linear_before_reset"))

    @property
    def input_names(self) -> list[str]:
        names = ["X", "W", "R", "B", "sequence_lens", "initial_h"]
        return names + ["initial_c", "P"] * (self.operator == "LSTM")

    @property
    def result_names(self) -> list[str]:
        return ["Y", "Y_h"] + ["Y_c"] * (self.operator == "LSTM")

    @property
    def checkpoint_names(self) -> list[str]:
        return ["gates"] + ["cells"] * (self.operator == "LSTM") + ["linear"] * self.keeps_linear

    @property
    def gradient_inputs(self) -> list[str]:
        kept = {"LSTM": ["gates", "cells"], "GRU": ["gates", "linear"], "RNN": ["gates"]}[self.operator]
        return [*self.input_names, "Y", *kept, *(f"d{name}" for name in self.result_names)]

    @property
    def gradient_outputs(self) -> list[str]:
        spaces = ["dgates"] + ["dlinear"] * (self.operator == "GRU")
        return spaces + [f"d{name}" for name in self.input_names if name != "sequence_lens"]

    def draw(self, dtype: Any) -> Arrays:
        """The inputs, and the gradients that arrive at the results."""
        rng = np.random.default_rng(self.seed)
        gates, d, n, h = GATES[self.operator] * self.hidden, self.directions, self.batch, self.hidden
        shapes = {
            "X": (self.steps, n, self.inputs),
            "W": (d, gates, self.inputs),
            "R": (d, gates, h),
            "B": (d, 2 * gates),
            "initial_h": (d, n, h),
            "initial_c": (d, n, h),
            "P": (d, 3 * h),
            "dY": (self.steps, d, n, h),
            "dY_h": (d, n, h),
            "dY_c": (d, n, h),
        }
        depth = max(1, self.inputs + h)
        scale = {"W": (2 / depth) ** 0.5, "R": (2 / depth) ** 0.5}
        made = {
            name: np.asarray(rng.standard_normal(shape) * scale.get(name, 1), dtype) for name, shape in shapes.items()
        }
        made["sequence_lens"] = rng.integers(0, self.steps + 1, n).astype(np.int32)
        letters = {"B": "b", "sequence_lens": "l", "initial_h": "h", "initial_c": "c", "P": "p"}
        names = [*self.input_names, *(f"d{name}" for name in self.result_names)]
        return {name: made[name] for name in names if letters.get(name, "b") in self.given + "b" * (name != "B")}

    def active(self, feeds: Arrays) -> Array:
        """Mask of the steps within the sequence lengths [steps, batch]."""
        lengths = feeds.get("sequence_lens", np.full(self.batch, self.steps))
        return np.arange(self.steps)[:, None] < lengths

    def expected(self, feeds: Arrays) -> Arrays:
        """Return all results, saved values and gradients; saved values are NaN beyond the lengths."""
        wide = {name: np.asarray(a, np.float64) for name, a in feeds.items() if name != "sequence_lens"}
        active = self.active(feeds)
        found = [_Direction(self, wide, active, d) for d in range(self.directions)]
        for one in found:
            one.forward()
            one.backward()
        joined = {"gates": 2, "linear": 2, "dgates": 2, "dlinear": 2, "Y": 1, "cells": 1, "dX": None}
        results: Arrays = {}
        for name in found[0].results:
            parts = [one.results[name] for one in found]
            axis = joined.get(name, 0)
            results[name] = sum(parts) if axis is None else np.stack(parts, axis)
        return results


class _Direction:
    """One direction of a call."""

    def __init__(self, call: Recurrent, feeds: Arrays, active: Array, direction: int) -> None:
        self.call, self.active = call, active
        h, gates = call.hidden, GATES[call.operator] * call.hidden
        zeros = np.zeros((call.batch, h))
        part = {name: a[direction] for name, a in feeds.items() if name not in ("X", "dY")}
        self.x, self.w, self.r = feeds["X"], part["W"], part["R"]
        self.wb, self.rb = np.split(part.get("B", np.zeros(2 * gates)), 2)
        self.h0, self.c0 = part.get("initial_h", zeros), part.get("initial_c", zeros)
        self.p = np.split(part.get("P", np.zeros(3 * h)), 3)
        self.dy = feeds["dY"][:, direction] if "dY" in feeds else np.zeros((call.steps, call.batch, h))
        self.dlast_h, self.dlast_c = part.get("dY_h", zeros), part.get("dY_c", zeros)
        attributes = call.attributes
        names = attributes.get("activations", " ".join([DEFAULTS[call.operator]] * call.directions)).split()
        count = len(DEFAULTS[call.operator].split())
        own = slice(direction * count, (direction + 1) * count)
        alphas, betas = (attributes.get(f"activation_{kind}", [0.0] * len(names)) for kind in ("alpha", "beta"))
        single = [np.asarray(numbers, np.float32).astype(float) for numbers in (alphas, betas)]
        self.functions = list(zip(names[own], single[0][own], single[1][own], strict=True))
        clip = attributes.get("clip")
        self.clip = np.inf if clip is None else float(np.float32(clip))
        self.keeps_inputs = clip is not None or not set(names) <= {"Sigmoid", "Tanh", "Relu"}
        back = attributes.get("direction") == "reverse" or direction == 1
        self.order = range(call.steps)[::-1] if back else range(call.steps)
        self.results: Arrays = {}

    def f(self, index: int, a: Array) -> Array:
        name, alpha, beta = self.functions[index]
        return FUNCTIONS[name](np.clip(a, -self.clip, self.clip), alpha, beta)

    def slope(self, index: int, a: Array) -> Array:
        name, alpha, beta = self.functions[index]
        return np.where(np.abs(a) <= self.clip, SLOPES[name](np.clip(a, -self.clip, self.clip), alpha, beta), 0)

    def output(self, c: Array, rule: Any) -> Array:
        name, alpha, beta = self.functions[2]
        return rule[name](c, alpha, beta)

    def forward(self) -> None:
        call = self.call
        shape = (call.steps, call.batch, call.hidden)
        gates = (call.steps, call.batch, GATES[call.operator] * call.hidden)
        y, cells, linear = np.zeros(shape), np.full(shape, np.nan), np.full(shape, np.nan)
        self.a, kept = np.zeros(gates), np.full(gates, np.nan)
        self.before, self.cells_before, self.reset = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        h, c = self.h0, self.c0
        for t in self.order:
            on = self.active[t][:, None]
            self.before[t], self.cells_before[t] = h, c
            a, values, new_h, new_c = getattr(self, f"_{call.operator.lower()}")(t, h, c)
            h, c = np.where(on, new_h, h), np.where(on, new_c, c)
            y[t] = np.where(on, h, 0)
            self.a[t] = a
            kept[t] = np.where(on, a if self.keeps_inputs else values, np.nan)
            cells[t] = np.where(on, c, np.nan)
            if call.keeps_linear:
                linear[t] = np.where(on, h * 0 + self.q[t], np.nan)
        self.results |= {"Y": y, "Y_h": h, "gates": kept}
        if call.operator == "LSTM":
            self.results |= {"Y_c": c, "cells": cells}
        if call.keeps_linear:
            self.results["linear"] = linear

    def _rnn(self, t: int, h: Array, c: Array) -> tuple[Array, ...]:
        a = self.x[t] @ self.w.T + h @ self.r.T + self.wb + self.rb
        value = self.f(0, a)
        return a, value, value, c

    def _lstm(self, t: int, h: Array, c: Array) -> tuple[Array, ...]:
        i, o, f, g = np.split(self.x[t] @ self.w.T + h @ self.r.T + self.wb + self.rb, 4, axis=1)
        coupled = self.call.attributes.get("input_forget")
        i, f = i + self.p[0] * c, f + self.p[2] * c
        of_i = self.f(0, i)
        of_f = 1 - of_i if coupled else self.f(0, f)
        c = of_f * c + of_i * self.f(1, g)
        o = o + self.p[1] * c
        a, values = np.hstack([i, o, f, g]), np.hstack([of_i, self.f(0, o), of_f, self.f(1, g)])
        if coupled and self.keeps_inputs:  # the saved value of the forget gate, which nothing reads
            a[:, 2 * self.call.hidden : 3 * self.call.hidden] = f
        return a, values, self.f(0, o) * self.output(c, FUNCTIONS), c

    def _gru(self, t: int, h: Array, c: Array) -> tuple[Array, ...]:
        wz, wr, wn = np.split(self.x[t] @ self.w.T + self.wb, 3, axis=1)
        rz, rr, rn = np.split(self.r, 3)
        bz, br, bn = np.split(self.rb, 3)
        z, r = wz + h @ rz.T + bz, wr + h @ rr.T + br
        of_z, of_r = self.f(0, z), self.f(0, r)
        self.reset[t] = of_r * h
        if self.call.keeps_linear:
            if t == self.order[0]:
                self.q = np.zeros(self.before.shape)
            self.q[t] = h @ rn.T + bn
            n = wn + of_r * self.q[t]
        else:
            n = wn + self.reset[t] @ rn.T + bn
        of_n = self.f(1, n)
        return np.hstack([z, r, n]), np.hstack([of_z, of_r, of_n]), (1 - of_z) * of_n + of_z * h, c

    def backward(self) -> None:
        call = self.call
        self.dh, self.dc = self.dlast_h, self.dlast_c
        da, dq = np.zeros(self.a.shape), np.zeros(self.before.shape)
        self.dp = np.zeros(3 * call.hidden)
        for t in self.order[::-1]:
            on = self.active[t][:, None]
            dh, dc, step_da, step_dq = getattr(self, f"_{call.operator.lower()}_back")(t, self.dh + self.dy[t], on)
            self.dh, self.dc = np.where(on, dh, self.dh), np.where(on, dc, self.dc)
            da[t], dq[t] = step_da * on, step_dq * on
        flat = da.reshape(-1, da.shape[-1]) if da.size else np.zeros((0, da.shape[-1]))
        size = call.hidden

        def product(left: Array, right: Array) -> Array:
            return np.einsum("tbn,tbm->nm", left, right)

        rows = da.copy()
        if call.keeps_linear:
            rows[..., 2 * size :] = dq
        dr = product(rows, self.before)
        if call.operator == "GRU" and not call.keeps_linear:
            dr[2 * size :] = product(da[..., 2 * size :], self.reset)
        self.results |= {
            "dgates": da,
            "dX": da @ self.w,
            "dW": product(da, self.x),
            "dR": dr,
            "dB": np.concatenate([flat.sum(0), rows.sum((0, 1))]),
            "dinitial_h": self.dh,
        }
        if call.keeps_linear:
            self.results["dlinear"] = dq
        if call.operator == "LSTM":
            self.results |= {"dinitial_c": self.dc, "dP": self.dp}

    def _rnn_back(self, t: int, dh: Array, on: Array) -> tuple[Array, ...]:
        da = dh * self.slope(0, self.a[t])
        return da @ self.r, self.dc, da, np.zeros(dh.shape)

    def _lstm_back(self, t: int, dh: Array, on: Array) -> tuple[Array, ...]:
        coupled = self.call.attributes.get("input_forget")
        i, o, f, g = np.split(self.a[t], 4, axis=1)
        before = self.cells_before[t]
        of_i = self.f(0, i)
        of_f = 1 - of_i if coupled else self.f(0, f)
        c = of_f * before + of_i * self.f(1, g)
        to_o = dh * self.output(c, FUNCTIONS) * self.slope(0, o)
        to_c = self.dc + dh * self.f(0, o) * self.output(c, SLOPES) + to_o * self.p[1]
        to_i, to_f, to_g = to_c * self.f(1, g), to_c * before, to_c * of_i * self.slope(1, g)
        if coupled:
            to_i, to_f = to_i - to_f, to_f * 0
        to_i, to_f = to_i * self.slope(0, i), to_f * (0 if coupled else self.slope(0, f))
        self.dp = self.dp + np.concatenate(
            [((part * on) * cell).sum(0) for part, cell in ((to_i, before), (to_o, c), (to_f, before))]
        )
        da = np.hstack([to_i, to_o, to_f, to_g])
        return da @ self.r, to_c * of_f + to_i * self.p[0] + to_f * self.p[2], da, np.zeros(dh.shape)

    def _gru_back(self, t: int, dh: Array, on: Array) -> tuple[Array, ...]:
        z, r, n = np.split(self.a[t], 3, axis=1)
        rz, rr, rn = np.split(self.r, 3)
        h, of_z, of_r = self.before[t], self.f(0, z), self.f(0, r)
        to_z, to_n = dh * (h - self.f(1, n)) * self.slope(0, z), dh * (1 - of_z) * self.slope(1, n)
        back = dh * of_z
        if self.call.keeps_linear:
            dq, to_r = to_n * of_r, to_n * self.q[t] * self.slope(0, r)
            back = back + dq @ rn
        else:
            dq, dreset = np.zeros(dh.shape), to_n @ rn
            to_r = dreset * h * self.slope(0, r)
            back = back + dreset * of_r
        return back + to_z @ rz + to_r @ rr, self.dc, np.hstack([to_z, to_r, to_n]), dq


FORMS = [
    Recurrent("LSTM"),
    Recurrent("LSTM", given=""),
    Recurrent("LSTM", given="", attributes={"direction": "reverse"}),
    Recurrent("LSTM", given="bhcp", attributes={"direction": "bidirectional"}),
    Recurrent("LSTM", given="bhcpl", attributes={"direction": "bidirectional"}),
    Recurrent("LSTM", given="bl"),
    Recurrent("LSTM", given="bl", attributes={"direction": "reverse"}),
    Recurrent("LSTM", given="bhcp", attributes={"clip": 0.5}),
    Recurrent("LSTM", given="bhcpl", attributes={"input_forget": 1}),
    Recurrent("LSTM", given="bp", attributes={"input_forget": 1, "clip": 0.5}),
    Recurrent("LSTM", attributes={"activations": "Relu Tanh Sigmoid"}),
    Recurrent(
        "LSTM",
        attributes={
            "direction": "bidirectional",
            "activations": "HardSigmoid Softsign Elu Sigmoid ScaledTanh Affine",
            "activation_alpha": [0.3, 0, 0.7, 0, 1.2, 0.5],
            "activation_beta": [0.4, 0, 0, 0, 0.8, 0.1],
        },
    ),
    Recurrent("GRU"),
    Recurrent("GRU", given="", attributes={"direction": "reverse"}),
    Recurrent("GRU", given="bhl", attributes={"direction": "bidirectional"}),
    Recurrent("GRU", attributes={"clip": 0.5}),
    Recurrent(
        "GRU", attributes={"activations": "Sigmoid LeakyRelu", "activation_alpha": [0, 0.2], "activation_beta": [0, 0]}
    ),
    Recurrent("GRU", attributes={"linear_before_reset": 1}),
    Recurrent("GRU", given="", attributes={"linear_before_reset": 1, "direction": "reverse"}),
    Recurrent("GRU", given="bhl", attributes={"linear_before_reset": 1, "direction": "bidirectional"}),
    Recurrent("GRU", attributes={"linear_before_reset": 1, "clip": 0.5}),
    Recurrent("RNN"),
    Recurrent("RNN", given="", attributes={"direction": "bidirectional"}),
    Recurrent("RNN", given="bhl", attributes={"direction": "reverse"}),
    Recurrent("RNN", attributes={"activations": "Relu", "clip": 0.6}),
    Recurrent("RNN", attributes={"activations": "Relu"}),
    Recurrent("RNN", attributes={"activations": "Softplus"}),
    Recurrent(
        "RNN", attributes={"activations": "ThresholdedRelu", "activation_alpha": [0.3], "activation_beta": [0.0]}
    ),
]
"""Every attribute, activation and optional input."""
