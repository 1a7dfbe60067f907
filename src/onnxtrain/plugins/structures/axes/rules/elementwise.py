"""Operators that work on each entry."""

from __future__ import annotations

from onnxtrain.plugins.structures.axes.broadcasting import same_shape
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of


@axes_of(
    *("Identity", "Neg", "Abs", "Sqrt", "Erf", "Sin", "Tan", "Asin", "Atan", "Sinh", "Tanh", "Asinh", "Atanh"),
    *("Ceil", "Floor", "Round", "Sign"),
)
def keeps_zero(node: Node) -> list[Axis]:
    """y = f(x) with f(0) = 0."""
    return same_shape(node, keeps_zero=True)


@axes_of(
    *("Reciprocal", "Exp", "Log", "Cos", "Acos", "Cosh", "Acosh"),
    *("IsNaN", "IsInf", "Not", "BitwiseNot", "Bernoulli"),
)
def other(node: Node) -> list[Axis]:
    """y = f(x)."""
    if node.operator in ("Reciprocal", "Log"):
        node.keep_values(0)
    return same_shape(node, keeps_zero=False)


@axes_of("Cast", "CastLike")
def cast(node: Node) -> list[Axis]:
    """y = x in another type; 8-bit integers may have a zero point, which is another number."""
    if node.has(1):
        for axis in range(node.rank(1)):
            node.axis(1, axis)
    return same_shape(node, keeps_zero=not node.is_8_bit(0))


@axes_of("Clip")
def clip(node: Node) -> list[Axis]:
    """y = min(max(x, low), high): zero stays zero if the bounds are known to include it."""
    low, high = node.attribute("min", node.number(1)), node.attribute("max", node.number(2))
    known = (low is not None or not node.has(1)) and (high is not None or not node.has(2))
    return same_shape(node, keeps_zero=known and (low is None or low <= 0) and (high is None or high >= 0))
