"""Operators that work on each entry, of one input or of several that broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of

Zero = Callable[[Sequence[Axis | None]], bool]
"""Decides whether removed entries of the result are zero, from the operands' axes (``None``: it broadcasts)."""


def all_zero(axes: Sequence[Axis | None]) -> bool:
    """Sums and selections are zero where all operands are."""
    return all(axis is not None and axis.zero for axis in axes)


def any_zero(axes: Sequence[Axis | None]) -> bool:
    """Products are zero where one factor is."""
    return any(axis is not None and axis.zero for axis in axes)


def first_zero(axes: Sequence[Axis | None]) -> bool:
    """Quotients and powers are zero where the first operand is."""
    return axes[0] is not None and axes[0].zero


def never_zero(axes: Sequence[Axis | None]) -> bool:
    """Other results may have any value."""
    return False


def broadcast(node: Node, zero: Zero, *, indices: Iterable[int] | None = None, skip: int = 0) -> list[Axis]:
    """Join the axes of inputs that broadcast, aligned at the last axis; by default all inputs."""
    inputs = [index for index in (range(len(node.ir.inputs)) if indices is None else indices) if node.has(index)]
    ranks = {index: node.rank(index) - skip for index in inputs}
    found: list[Axis] = []
    for position in range(-max(ranks.values()), 0):
        place = position - skip
        present = [index for index in inputs if ranks[index] >= -position]
        wide = [index for index in present if node.shape(index)[place] != 1]
        taken = {index: node.axis(index, place) for index in wide or present}
        joined = node.join(*taken.values())
        found.append(joined.with_zero(zero([taken.get(index) for index in inputs])))
    return found


def same_shape(node: Node, *, keeps_zero: bool, mixed: Iterable[int] = (), reason: str = "mixes it") -> list[Axis]:
    """Return the axes of the first input for the output, fixed where the operator mixes the entries of an axis."""
    places = {axis % max(node.rank(), 1) for axis in mixed}
    found = []
    for position in range(node.rank()):
        axis = node.axis(0, position)
        if position in places:
            found.append(node.fix(axis, f"{node.describe()} {reason}"))
        else:
            found.append(axis.with_zero(axis.zero and keeps_zero))
    return found


@axes_of("Identity", "Neg", "Abs", "Sqrt", "Erf", "Sin", "Tan", "Asin", "Atan", "Sinh", "Tanh", "Asinh", "Atanh")
@axes_of("Ceil", "Floor", "Round", "Sign", "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "HardSwish", "Softsign")
@axes_of("ThresholdedRelu", "Swish", "Mish", "Gelu")
@axes_of("Gelu", "QuickGelu", domain=MICROSOFT_DOMAIN)
def keeps_zero(node: Node) -> list[Axis]:
    """y = f(x) with f(0) = 0."""
    return same_shape(node, keeps_zero=True)


@axes_of("Reciprocal", "Exp", "Log", "Cos", "Acos", "Cosh", "Acosh", "Sigmoid", "HardSigmoid", "Softplus", "Shrink")
@axes_of("IsNaN", "IsInf", "Not", "BitwiseNot", "Bernoulli")
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


@axes_of("Dropout")
def dropout(node: Node) -> list[list[Axis]]:
    """y = x, or zeros; the mask has the shape of x."""
    return [same_shape(node, keeps_zero=True)] * len(node.ir.outputs)


@axes_of("Add", "Sub", "Sum", "Mean", "Max", "Min", since=7)
@axes_of("BiasGelu", "FastGelu", domain=MICROSOFT_DOMAIN)
def add(node: Node) -> list[Axis]:
    """y = x_1 + x_2 + ..., or another result that is zero where all inputs are."""
    return broadcast(node, all_zero)


@axes_of("Mul", since=7)
def mul(node: Node) -> list[Axis]:
    """y = x_1 x_2."""
    return broadcast(node, any_zero)


@axes_of("PRelu")
def prelu(node: Node) -> list[Axis]:
    """y = x or slope x."""
    return broadcast(node, first_zero)


@axes_of("Div", "Mod", since=7)
def div(node: Node) -> list[Axis]:
    """y = x_1 / x_2: a masked divisor keeps its values."""
    node.keep_values(1)
    return broadcast(node, first_zero)


@axes_of("Pow", since=7)
def power(node: Node) -> list[Axis]:
    """y = x_1 ^ x_2, zero for a zero base where the exponent is a positive number."""
    node.keep_values(1)
    exponent = node.number(1)
    return broadcast(node, first_zero if exponent is not None and exponent > 0 else never_zero)


@axes_of("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", since=7)
@axes_of("And", "Or", "Xor", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", since=7)
def compare(node: Node) -> list[Axis]:
    """y = a truth value, or other bits, of two entries."""
    return broadcast(node, never_zero)


@axes_of("Where")
def where(node: Node) -> list[Axis]:
    """y = x_1 or x_2."""
    return broadcast(node, lambda axes: all_zero(axes[1:]))


@axes_of("QuantizeLinear", "DequantizeLinear")
@axes_of("QuantizeLinear", "DequantizeLinear", domain=MICROSOFT_DOMAIN)
def quantize(node: Node) -> list[Axis]:
    """y = round(x / scale) + zero point, or back; masked entries are at the zero point."""
    found = same_shape(node, keeps_zero=True)
    value = node.ir.inputs[0]
    if node.operator == "DequantizeLinear" and value is not None and value.is_initializer():
        found = [axis.with_zero(axis.labels is not None) for axis in found]
    place = node.attribute("axis", 1) % max(node.rank(), 1)
    for index in (1, 2):
        if not node.has(index) or node.rank(index) == 0 or node.shape(index) == (1,):
            continue
        node.keep_values(index)
        if node.rank(index) == 1 and not node.attribute("block_size", 0):
            zero = found[place].zero
            found[place] = node.join(found[place], node.axis(index, 0)).with_zero(zero)
        else:
            for axis in range(node.rank()):
                found[axis] = node.fix(found[axis], f"{node.describe()} has scales per block")
    return found


@axes_of("DynamicQuantizeLinear")
def dynamic_quantize(node: Node) -> list[list[Axis]]:
    """y, scale, zero point = x quantized within its range, which always includes zero."""
    found = same_shape(node, keeps_zero=True)
    for axis in found:
        if axis.labels is not None and not axis.zero:
            node.fix(axis, f"{node.describe()} measures its range, and masked entries are not zero")
    return [found, [], []]
