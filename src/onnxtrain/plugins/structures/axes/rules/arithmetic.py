"""Operators whose inputs broadcast."""

from __future__ import annotations

from onnxtrain.plugins.structures.axes.broadcasting import all_zero, any_zero, broadcast, first_zero, never_zero
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of


@axes_of("Add", "Sub", "Sum", "Mean", "Max", "Min", since=7)
def add(node: Node) -> list[Axis]:
    """y = x_1 + x_2 + ..., or another result that is zero where all inputs are."""
    return broadcast(node, range(len(node.ir.inputs)), all_zero)


@axes_of("Mul", since=7)
def mul(node: Node) -> list[Axis]:
    """y = x_1 x_2."""
    return broadcast(node, (0, 1), any_zero)


@axes_of("Div", "Mod", since=7)
def div(node: Node) -> list[Axis]:
    """y = x_1 / x_2: a masked divisor keeps its values."""
    node.keep_values(1)
    return broadcast(node, (0, 1), first_zero)


@axes_of("Pow", since=7)
def power(node: Node) -> list[Axis]:
    """y = x_1 ^ x_2, zero for a zero base where the exponent is a positive number."""
    node.keep_values(1)
    exponent = node.number(1)
    return broadcast(node, (0, 1), first_zero if exponent is not None and exponent > 0 else never_zero)


@axes_of("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", since=7)
@axes_of("And", "Or", "Xor", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", since=7)
def compare(node: Node) -> list[Axis]:
    """y = a truth value, or other bits, of two entries."""
    return broadcast(node, (0, 1), never_zero)


@axes_of("Where")
def where(node: Node) -> list[Axis]:
    """y = x_1 or x_2."""
    return broadcast(node, (0, 1, 2), lambda axes: all_zero(axes[1:]))
