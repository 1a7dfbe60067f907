"""Fuse activations that exporters write as several nodes into the one operator that ONNX Runtime has for them.

ONNX Runtime fuses them itself, but not in a training step: gradients read the values between, which then have to be
kept, four or five tensors of the size of the widest layer where one is enough. So they are fused before the gradient
is built, in working copies for sessions of ONNX Runtime only: a step graph for any runtime has standard operators.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.lowering.fuse.patterns import Match, Number, OneOf, Op, Pattern, Product, Var, find, named_by_gradients

_X = Var("x")


def _near(number: float) -> Number:
    return Number(number, tolerance=1e-3)


_CUBE = OneOf(Op("Pow", _X, _near(3)), Op("Mul", Op("Mul", _X, _X), _X))
_ERF = Op("Erf", Product(_X, number=math.sqrt(0.5)))
_TANH = Op("Tanh", Product(Op("Add", Product(_CUBE, number=0.044715), _X), number=math.sqrt(2 / math.pi)))

PATTERNS = {
    "Gelu": Pattern("Gelu", Product(Op("Add", _ERF, _near(1)), _X, number=0.5), {"Erf"}),
    "FastGelu": Pattern("Gelu by tanh", Product(Op("Add", _TANH, _near(1)), _X, number=0.5), {"Tanh"}),
}
"""x (1 + erf(x / sqrt(2))) / 2 and x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, by ONNX Runtime's operator."""


def fuse_activations(model: ir.Model) -> None:
    """Replace Gelu, exact or approximated by tanh, by one node of ONNX Runtime's own domain, in place.

    Requires: shapes. Ensures: the new node is where the last of the old ones was.
    """
    graph = model.graph
    named = named_by_gradients(graph)
    for operator, pattern in PATTERNS.items():
        replaced: set[ir.Node] = set()
        for match in find(graph, pattern, named, _check):
            last = match.nodes[0]
            op = Builder(graph, graph.opset_imports[""], before=last)
            result = op.several(operator, op.wrap(match["x"]), outputs=1, domain=MICROSOFT_DOMAIN)[0].ir
            op.emitted[-1].name = last.name  # recompute= names the node that computes y
            take_over(graph, {match.y: result})
            replaced.update(match.nodes)
        if replaced:
            graph.opset_imports.setdefault(MICROSOFT_DOMAIN, 1)
            remove_nodes(graph, replaced)


def _check(match: Match) -> str | None:
    """Return why the operator cannot compute y from x."""
    x, y = match["x"], match.y
    if x.shape is None or y.shape is None or len(x.shape) != len(y.shape):
        return "a constant of higher rank gives the result more axes, or the ranks are unknown"
    return None if x.dtype == ir.DataType.FLOAT else f"x has type {x.dtype.name}; the kernel takes FLOAT"
