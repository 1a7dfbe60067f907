"""Operators that ONNX Runtime computes by a power for each element, written as sums once gradients are built."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.rules.normalization import local_response
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import dimensions
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rule


def _pools(match: Match) -> str | None:
    (node,) = match.nodes
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT or not dimensions(x) or match.context.main.opset < 13:
        return "it is not of floats of known rank"
    if node.attributes.get_int("ceil_mode", 0) or ("dilations" in node.attributes and match.context.main.opset < 19):
        return "its last windows are no whole ones"
    return None if node.attributes.get_int("p", 2) in (1, 2) else "its powers are neither squares nor absolute values"


def _emit_pool(op: Builder, match: Match) -> Value:
    """Roots of sums: of all, or of means over windows times their elements."""
    view = Node(match.nodes[0], op)
    x, attributes = view.x, view.attributes()
    squares = attributes.pop("p", 2) == 2
    terms = x * x if squares else op.Abs(x).with_shape(x.shape)
    if view.operator == "GlobalLpPool":
        sums = op.ReduceSum(terms, op.ints(*range(2, len(x.shape or ()))), keepdims=1)
    else:
        sums = op.AveragePool(terms, count_include_pad=1, **attributes) * float(math.prod(attributes["kernel_shape"]))
    return op.Sqrt(sums) if squares else sums


def _normalizes(match: Match) -> str | None:
    (node,) = match.nodes
    x = node.inputs[0]
    taken = x is not None and x.dtype == ir.DataType.FLOAT and node.attributes["size"].as_int() % 2
    return None if taken else "it is not of floats, or ONNX Runtime refuses its size"


def _emit_normalization(op: Builder, match: Match) -> Value:
    view = Node(match.nodes[0], op)
    return view.x / local_response(view)[1]


SUMS = (
    Rule(operators("norms of windows", "LpPool", "GlobalLpPool"), _emit_pool, _pools),
    Rule(operators("local response", "LRN"), _emit_normalization, _normalizes),
)
"""Norms of windows, and normalization by near channels."""
