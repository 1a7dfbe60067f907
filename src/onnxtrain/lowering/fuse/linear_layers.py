"""The pattern of a linear layer, for the passes that replace it: fuse_linear and use_half_weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES
from onnxtrain.graph.patterns import match_alike
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.lowering.fuse.patterns import Match, OneOf, Op, Pattern, Var
from onnxtrain.lowering.fuse.transposition import is_identity, order_of

OPERATOR = "Linear"
"""Operator of the domain ``onnxtrain`` that replaces the nodes."""

_X, _W, _BIAS = Var("x"), Var("w"), Var("bias")
_MATMUL = OneOf(
    Op("MatMul", _X, _W, name="matmul"), Op("Gemm", _X, _W, name="matmul", transA=(None, 0), alpha=(None, 1.0))
)
_GEMM = Op("Gemm", _X, _W, _BIAS, name="matmul", transA=(None, 0), alpha=(None, 1.0), beta=(None, 1.0))
_LAYER = OneOf(Op("Add", _MATMUL, _BIAS), _GEMM, _MATMUL)

LAYER = Pattern("linear layer", _LAYER, {"MatMul", "Gemm"})
LAYER_WITH_RELU = Pattern("linear layer", OneOf(Op("Relu", _LAYER, name="relu"), _LAYER), {"MatMul", "Gemm"})


class Layer(NamedTuple):
    """Operands of a linear layer.

    Attributes:
        x: [..., K].
        w: [K, N], or [N, K] if transposed.
        transposed: True if w is transposed.
        bias: [N], or none.
    """

    x: ir.Value
    w: ir.Value
    transposed: bool
    bias: ir.Value | None


def layer_of(match: Match, named: Collection[str] = (), patterns: Sequence[str] = ()) -> Layer:
    """Return the operands of a match, with w as it was before transpositions.

    Args:
        match: A match of ``LAYER`` or ``LAYER_WITH_RELU``.
        named: Names of values that must stay.
        patterns: Patterns of the nodes to recompute. A Transpose stays if a pattern matches it and not the matmul, or
            the matmul and not it.
    """
    matmul, w = match["matmul"], match["w"]
    transposed = "transB" in matmul.attributes and matmul.attributes["transB"].as_int() != 0
    while (node := w.producer()) is not None and not node.domain and node.op_type == "Transpose":
        if (
            w.name in named
            or is_identity(order_of(node, 2))
            or not match_alike(patterns, [matmul.name or "", node.name or ""])
        ):
            break
        w, transposed = node.inputs[0], not transposed
    return Layer(match["x"], w, transposed, match.get("bias"))


def check_layer(match: Match, patterns: Sequence[str] = ()) -> str | None:
    """Return why the operator does not compute this layer."""
    x, w, bias, matmul = match["x"], match["w"], match.get("bias"), match["matmul"]
    if x.dtype not in KERNEL_TYPES or w.dtype != x.dtype:
        return f"x has type {x.dtype} and w {w.dtype}; the kernel takes FLOAT or DOUBLE, the same for both"
    if x.shape is None or w.shape is None or len(x.shape) < 2 or len(w.shape) != 2:
        return f"x has shape {dimensions(x)} and w {dimensions(w)}; x needs two axes or more, and w two"
    transposed = "transB" in matmul.attributes and matmul.attributes["transB"].as_int() != 0
    size: Dimension = (dimensions(w) or ())[0 if transposed else 1]
    if bias is not None and (size is None or dimensions(bias) != (size,) or bias.dtype != x.dtype):
        return f"the bias has shape {dimensions(bias)} and type {bias.dtype}; it must be known as [{size}] of {x.dtype}"
    if not match_alike(patterns, [node.name or "" for node in match.nodes]):
        return "recompute= has patterns for some of its nodes and not for the others"
    return None
