"""Recurrent layers: a hidden unit owns a row of every gate, and both directions have as many units."""

from __future__ import annotations

import numpy as np

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ZERO = frozenset({"Tanh", "Relu", "Affine", "LeakyRelu", "ScaledTanh", "Elu", "Softsign"})


@axes_of("LSTM", "GRU", "RNN")
def recurrent(node: Node) -> list[list[Axis]]:
    """Y [t, d, n, h], Y_h [d, n, h], Y_c [d, n, h] from X [t, n, i], W [d, g h, i], R [d, g h, h], B [d, 2 g h]."""
    gates = _GATES[node.operator]
    by_batch = node.attribute("layout", 0)
    node.sum_over(node.axis(0, -1), node.axis(1, -1))
    rows = node.axis(2, -1)
    units = rows
    if rows.labels is not None:
        zero = _cell_is_zero(node)
        for index, count in ((1, gates), (2, gates), (3, 2 * gates), (7, 3)):
            if node.has(index):
                stacked = node.axis(index, 1)
                node.join(Axis(np.tile(rows.labels, count)), stacked)
                zero = zero and (stacked.zero or index == 7)
        for index in (5, 6):
            if node.has(index):
                state = node.axis(index, -1)
                node.join(rows, state)
                zero = zero and state.zero
        units = rows.with_zero(zero)
        if not zero:
            node.fix(rows, f"{node.describe()}: masked units would not stay at zero")
        node.tag(units, "hidden")
        node.on_cut(lambda cut: cut.set_attribute(node.ir, "hidden_size", cut.count(rows)))
    shape = node.shape()
    length, batch = (1, 0) if by_batch else (0, 1)
    node.multiplies(shape[length], shape[batch], gates, units, node.axis(1, -1))
    node.multiplies(shape[length], shape[batch], gates, units, units)
    rest = fixed("it is an axis of steps, directions or examples")
    for axis in (0, 1):
        node.fix(node.axis(0, axis), rest.reason)
    return [[rest, rest, rest, units], [rest, rest, units], [rest, rest, units]][: len(node.ir.outputs)]


def _cell_is_zero(node: Node) -> bool:
    """Return whether the activations that make a cell's content are zero at zero."""
    default = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[node.operator]
    names = node.attribute("activations") or default
    per = len(default)
    contents = [name for index, name in enumerate(names) if per == 1 or index % per]
    betas = node.attribute("activation_beta")
    return all(name in _ZERO for name in contents) and not ("Affine" in contents and betas)


no_rule("LSTM", "GRU", "RNN", domain=ONNXTRAIN_DOMAIN, reason="it is a part of training graphs, not of model files")
