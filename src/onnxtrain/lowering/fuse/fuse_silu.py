"""Fuse the gradient of SiLU into one node.

Exporters write SiLU as x sigmoid(x), whose gradient is six nodes over tensors of the widest layer, and keeps sigmoid(x)
and the product for the backward pass. The gradient of Gelu with the logistic function for P is the same formula, and
its kernel reads x only.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.fused import emit
from onnxtrain.graph import Builder
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import dimensions
from onnxtrain.lowering.fuse.patterns import Match, Op, Pattern, Var, find

_DY, _X, _S = Var("dy"), Var("x"), Var("s")
GRADIENT = Pattern(
    "gradient of SiLU",
    Op("Add", Op("Mul", _DY, _S), Op("Mul", Op("Mul", _DY, _X), Op("Mul", _S, Op("Sub", 1, _S)))),
    {"Sub"},
)


def fuse_silu(model: ir.Model, backward: Backward) -> None:
    """Replace dy s + (dy x) (s (1 - s)), with s = sigmoid(x), by one node ``GeluGradient``, in place.

    The node has ``approximate`` = "sigmoid" and ``alpha`` = 1. Left alone is a gradient with further terms, one of
    another type than float or double, and one of unknown sizes.

    Requires: a sorted graph with shapes, in which all gradients are built. Ensures: a sorted graph.

    Args:
        model: The working copy.
        backward: The nodes that the engine emitted; the new nodes replace old ones in it.
    """
    graph = model.graph
    replaced: list[ir.Node] = []
    renamed: dict[ir.Value, ir.Value] = {}
    for match in find(graph, GRADIENT, check=_check):
        last = match.nodes[0]
        op = Builder(graph, graph.opset_imports[""], before=last)
        dy, x = op.wrap(match["dy"]), op.wrap(match["x"])
        (dx,) = emit(op, "GeluGradient", dy, x, like=[dy], approximate="sigmoid", alpha=1.0)
        op.emitted[-1].name = last.name
        take_over(graph, {match.y: dx.ir})
        renamed[match.y] = dx.ir
        replaced += dict.fromkeys(match.nodes)
        backward.nodes += op.emitted
    gone = {output for node in replaced for output in node.outputs}
    backward.arriving = {renamed.get(value, value) for value in backward.arriving} - gone
    remove_nodes(graph, replaced)


def _check(match: Match) -> str | None:
    """Return why the match is no gradient of SiLU."""
    x, s, dy = match["x"], match["s"], match["dy"]
    source = s.producer()
    if source is None or source.domain or source.op_type != "Sigmoid" or source.inputs[0] is not x:
        return "its factor is no sigmoid of x"
    sizes = [dimensions(value) for value in (x, dy, match.y)]
    if not sizes[0] or any(size != sizes[0] or None in size for size in sizes):
        return "the sizes of x and dy are not known to be equal"
    types = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return None if x.dtype in types and dy.dtype == x.dtype else f"x has type {x.dtype}"
