"""The fact of a value, and the search for it: rules by operator, constants, and values that are multiples of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import Dimension, behind, constant_array, dimensions, producer_of

_DEPTH: Final = 60
"""Nodes on a path from an output that are searched; facts about deeper ones are not needed to prove probabilities."""

_LARGEST: Final = 1 << 16
"""Elements of the largest constant that is evaluated."""

SMALL: Final = 1e-3
"""Size of the terms and limits that avoid log(0) and 0 / 0."""

SLACK: Final = 5e-3
"""Tolerance of bounds and sums, for numbers that are rounded to 8 bits."""


@dataclass(frozen=True)
class Fact:
    """Properties of the elements of a value."""

    low: float = -math.inf
    high: float = math.inf
    sums: Mapping[int, float] = field(default_factory=dict)
    linear: bool = False
    log: Fact | None = None
    mixtures: Mapping[int, Fact] = field(default_factory=dict)

    @property
    def is_probability(self) -> bool:
        """True where all elements are proved to lie in [0, 1]."""
        return self.low >= -SLACK and self.high <= 1 + SLACK

    @property
    def axis(self) -> int | None:
        """The axis, not that of examples, along which probabilities sum to one; ``None`` where there is none."""
        if not self.is_probability:
            return None
        return next((axis for axis, total in self.sums.items() if axis and abs(total - 1) <= 2 * SLACK), None)

    @property
    def number(self) -> float | None:
        """The value of all elements, where they have one."""
        return self.low if self.low == self.high else None


NOTHING: Final = Fact()

UNIT: Final = Fact(0, 1)

LINEAR: Final = Fact(linear=True)


class Facts:
    """The facts of the values of a graph, found on request."""

    def __init__(
        self,
        functions: Mapping[Any, ir.Function],
        learned: Collection[str] = (),
        given: Mapping[ir.Value, Fact] | None = None,
    ) -> None:
        self.relied: set[str] = set()
        self._functions, self._learned = functions, learned
        self._known: dict[ir.Value, Fact] = dict(given or {})
        self._depth = 0

    def of(self, value: ir.Value | None) -> Fact:
        """Return the fact of a value."""
        if value is None or self._depth > _DEPTH:
            return NOTHING
        if value not in self._known:
            self._known[value] = NOTHING  # of a value that depends on itself
            self._depth += 1
            self._known[value] = self._find(value)
            self._depth -= 1
        return self._known[value]

    def _find(self, value: ir.Value) -> Fact:
        node = value.producer()
        if node is None or (node.op_type == "Constant" and not node.domain):
            array = self.constant(value)
            return NOTHING if array is None else of_array(array)
        function = self._functions.get(node.op_identifier())
        if function is not None:
            inner = Facts(self._functions, self._learned)
            inner._known.update(zip(function.inputs, map(self.of, node.inputs), strict=False))
            return inner.of(function.outputs[value.index() or 0])
        rule = RULES.get(f"{node.domain}.{node.op_type}" if node.domain else node.op_type)
        if rule is None:
            return UNIT if value.dtype == ir.DataType.BOOL else NOTHING
        try:
            return rule(self, node, value)
        except (ArithmeticError, LookupError, TypeError, ValueError):  # an invalid node, which sessions refuse
            return NOTHING

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Return the array of a small constant whose value does not change."""
        if value is None or value.name in self._learned or (value.is_graph_input() and not value.is_initializer()):
            return None
        node = value.producer()
        if node is not None and node.op_type in _KEEPING_NUMBERS and not node.domain:
            return self._computed(node)
        found = value.const_value
        if found is not None and found.size > _LARGEST:
            return None
        array = constant_array(value)
        if array is None or array.size > _LARGEST or array.dtype.kind not in "fiub" or not array.size:
            return None
        if value.is_initializer():
            self.relied.add(str(value.name))
        return array

    def _computed(self, node: ir.Node) -> np.ndarray | None:
        """Return the array that a node makes of a constant: a number in another type or shape, or dequantized."""
        given, before = self.constant(node.inputs[0]), producer_of(node.inputs[0])
        if (
            given is None
            or node.op_type != "DequantizeLinear"
            or (before is not None and before.op_type == "QuantizeLinear")
        ):
            return given if given is None or given.size == 1 or node.op_type.endswith("Linear") else None
        scale, zero = (self.constant(each) if each is not None else np.zeros(1) for each in (*node.inputs, None)[1:3])
        if scale is None or zero is None or scale.size > 1:
            return None
        return np.asarray((given.astype(np.float64) - zero.reshape(()).astype(np.float64)) * scale.reshape(()))

    def number(self, value: ir.Value | None) -> float | None:
        """Return the number of a constant of equal elements."""
        array = self.constant(value)
        return None if array is None or array.dtype.kind == "b" else of_array(array).number

    def ints(self, node: ir.Node, name: str, index: int) -> list[int] | None:
        """Return integers of a node that are an attribute or, in later opsets, a constant input."""
        if name in node.attributes and not node.attributes[name].is_ref():
            found = node.attributes[name].value
            return [found] if isinstance(found, int) else list(found)
        array = self.constant(node.inputs[index]) if index < len(node.inputs) else None
        return None if array is None else [int(item) for item in array.reshape(-1)]

    def affine(self, value: ir.Value | None) -> tuple[Any, float, float]:
        """Return x, a and b of a value a x + b, where x is as plain as possible; a Sigmoid of -x is 1 - Sigmoid(x)."""
        source = behind(value, SAME)
        node = producer_of(source)
        if node is None or node.domain or not node.inputs:
            return source, 1.0, 0.0
        if node.op_type == "Neg":
            x, a, b = self.affine(node.inputs[0])
            return x, -a, -b
        if node.op_type == "Sigmoid":
            x, a, b = self.affine(node.inputs[0])
            return (("Sigmoid", x, abs(a)), math.copysign(1, a), float(a < 0)) if not b else (source, 1.0, 0.0)
        if node.op_type in ("Add", "Sub", "Mul", "Div"):
            left, right = self.number(node.inputs[0]), self.number(node.inputs[1])
            if left is not None and node.op_type != "Div":
                x, a, b = self.affine(node.inputs[1])
                sign = -1 if node.op_type == "Sub" else 1
                return (x, left * a, left * b) if node.op_type == "Mul" else (x, sign * a, left + sign * b)
            if right is not None and (node.op_type != "Div" or right):
                x, a, b = self.affine(node.inputs[0])
                if node.op_type in ("Mul", "Div"):
                    scale = right if node.op_type == "Mul" else 1 / right
                    return x, a * scale, b * scale
                return x, a, b + (right if node.op_type == "Add" else -right)
        return source, 1.0, 0.0


Rule = Callable[[Facts, ir.Node, ir.Value], Fact]

RULES: Final[dict[str, Rule]] = {}
"""The fact that each operator proves about its result; about those of other operators nothing is known."""

SAME: Final = frozenset(
    {"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "QuantizeLinear", "DequantizeLinear"}
)
"""Operators that keep the elements, perhaps rounded, and their order."""

_KEEPING_NUMBERS: Final = SAME - {"Flatten"}

_MOVING_WEIGHTS: Final = frozenset({"Identity", "Cast", "Transpose", "Reshape", "DequantizeLinear", "Mul", "Unsqueeze"})


def is_weight(value: ir.Value | None) -> bool:
    """Return whether a value is a constant of the model, perhaps transposed or dequantized."""
    source = behind(value, _MOVING_WEIGHTS)
    return source is not None and (source.is_initializer() or constant_array(source) is not None)


def of_array(array: np.ndarray) -> Fact:
    """Return the fact of a constant."""
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        return NOTHING
    sums: dict[int, float] = {}
    for axis in range(numbers.ndim):
        totals = numbers.sum(axis)
        if float(np.ptp(totals)) <= SMALL * SMALL:
            sums[axis] = float(totals.flat[0])
    return Fact(float(numbers.min()), float(numbers.max()), sums)


def times(one: float, other: float) -> float:
    """Multiply bounds: zero times infinity is zero."""
    return 0.0 if not one or not other else one * other


def hull(*facts: Fact) -> Fact:
    """Return the bounds of values of which each element is one."""
    return Fact(min(fact.low for fact in facts), max(fact.high for fact in facts), linear=all(f.linear for f in facts))


def common(first: Mapping[int, float], *others: Mapping[int, float]) -> dict[int, float]:
    """Return the sums that all have along the same axes."""
    return {
        axis: total
        for axis, total in first.items()
        if all(abs(other.get(axis, math.inf) - total) <= SMALL for other in others)
    }


def whole_order(order: np.ndarray | None, size: Dimension) -> bool:
    """Return whether indices take each entry of an axis once."""
    return order is not None and isinstance(size, int) and sorted(order.reshape(-1) % size) == [*range(size)]


def rank_of(value: ir.Value | None) -> int | None:
    """Return the number of axes of a value, where it is known."""
    shape = dimensions(value)
    return None if shape is None else len(shape)


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Return an attribute's value; ``None`` for a reference to that of a function."""
    if name not in node.attributes:
        return default
    given = node.attributes[name]
    return None if given.is_ref() else given.value


def axis_of(node: ir.Node, value: ir.Value | None, default: int = -1) -> int | None:
    """Return the attribute ``axis`` of a node, counted from 0."""
    rank, axis = rank_of(value), attribute(node, "axis", default)
    if axis is None or (rank is None and axis < 0) or rank == 0:
        return None
    return int(axis if rank is None else axis % rank)


def constantly(fact: Fact) -> Rule:
    """Return the rule of an operator whose result is the same kind for all inputs."""
    return lambda facts, node, value: fact


def totals_of(facts: Facts, operand: ir.Value | None, value: ir.Value) -> dict[int, float]:
    """Return the sums of an operand along the axes of the broadcast result."""
    fact, shape, own = facts.of(operand), dimensions(value), dimensions(operand)
    if shape is None:
        return {}
    if fact.number is not None and (own is None or math.prod(d if isinstance(d, int) else 2 for d in own) == 1):
        return {axis: fact.number * size for axis, size in enumerate(shape) if isinstance(size, int)}
    if own is None:
        return {}
    shift = len(shape) - len(own)
    return {
        axis + shift: total for axis, total in fact.sums.items() if axis < len(own) and own[axis] == shape[axis + shift]
    }
