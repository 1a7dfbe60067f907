"""Fuse RMS norms that exporters write as several nodes into the one operator that ONNX Runtime has for them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES
from onnxtrain.graph import Builder
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import constant_tensor, dimensions
from onnxtrain.lowering.fuse.patterns import Match, Number, OneOf, Op, Pattern, Var, find, named_by_gradients

OPERATOR = "SimplifiedLayerNormalization"

_X = Var("x")
_MEAN = Op("ReduceMean", OneOf(Op("Pow", _X, 2), Op("Mul", _X, _X)), Var("axes"), keepdims=(None, 1))
_ROOT = Op("Sqrt", Op("Add", _MEAN, Number(name="epsilon")))
_QUOTIENT = OneOf(Op("Div", _X, _ROOT), Op("Mul", OneOf(Op("Reciprocal", _ROOT), Op("Div", 1, _ROOT)), _X))

PATTERN = Pattern("RMS norm", Op("Mul", _QUOTIENT, Var("scale")), {"ReduceMean"})


def fuse_norms(model: ir.Model) -> None:
    """Replace y = g x / sqrt(mean(x²) + ε) over the last axis by one node, whose gradient is one node, too, in place.

    The scale g is a vector as long as the axis.

    Requires: shapes. Ensures: the new node is where the last of the old ones was, and has its name.
    """
    graph = model.graph
    main, replaced = Builder(graph, graph.opset_imports[""]), set[ir.Node]()
    for match in find(graph, PATTERN, named_by_gradients(graph), _check):
        last = match.nodes[0]
        op = main.before(last)
        given, epsilon = (op.wrap(match["x"]), op.wrap(match["scale"])), match["epsilon"]
        result = op.several(OPERATOR, *given, outputs=1, axis=-1, epsilon=epsilon, stash_type=1)[0].ir
        op.emitted[-1].name = last.name  # recompute= names the node that computes y
        take_over(graph, {match.y: result})
        replaced.update(match.nodes)
    remove_nodes(graph, replaced)


def _check(match: Match) -> str | None:
    """Return why the operator does not compute this norm."""
    x, scale = match["x"], match["scale"]
    sizes, axes = dimensions(x), constant_tensor(match["axes"])
    if not sizes or not isinstance(sizes[-1], int) or x.dtype not in KERNEL_TYPES:
        return f"x has shape {sizes} and type {x.dtype}; the last axis must be known, and the type FLOAT or DOUBLE"
    if axes is None or [int(axis) % len(sizes) for axis in np.asarray(axes.numpy()).reshape(-1)] != [len(sizes) - 1]:
        return "the mean is not known to be over the last axis alone"
    if dimensions(scale) != sizes[-1:] or scale.dtype != x.dtype:
        return f"the scale has shape {dimensions(scale)} and type {scale.dtype}; it must be [{sizes[-1]}] of {x.dtype}"
    return None
