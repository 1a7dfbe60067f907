"""Facts that a graph proves about its values: bounds, and equal sums along an axis.

:class:`Facts` propagates them from constants and activations to the outputs, operator by operator, like shapes. So a value
is known to hold probabilities, whatever nodes stand behind the Softmax or Sigmoid, and without one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.value import Dimension, behind, constant_array, dimensions

_DEPTH: Final = 60
"""Nodes on a path from an output that are searched; facts about deeper ones are not needed to prove probabilities."""

_LARGEST: Final = 1 << 16
"""Elements of the largest constant that is evaluated."""

_SMALL: Final = 1e-3
"""Size of the terms and limits that avoid log(0) and 0 / 0."""

_SLACK: Final = 5e-3
"""Tolerance of bounds and sums, for numbers that are rounded to 8 bits."""


@dataclass(frozen=True)
class Fact:
    """Properties of the elements of a value.

    Attributes:
        low: Lower bound of all elements.
        high: Upper bound of all elements.
        sums: Axes along which all sums are equal, to that sum.
        linear: True for the result of a linear layer, perhaps shifted, scaled or capped by Tanh.
        log: The fact of the exponential, for logarithms.
        mixtures: For products of values and weights, which sum to one along an axis: that axis, to the fact of the values.
    """

    low: float = -math.inf
    high: float = math.inf
    sums: Mapping[int, float] = field(default_factory=dict)
    linear: bool = False
    log: Fact | None = None
    mixtures: Mapping[int, Fact] = field(default_factory=dict)

    @property
    def is_probability(self) -> bool:
        """True where all elements are proved to lie in [0, 1]."""
        return self.low >= -_SLACK and self.high <= 1 + _SLACK

    @property
    def axis(self) -> int | None:
        """The axis, not that of examples, along which probabilities sum to one; ``None`` where there is none."""
        if not self.is_probability:
            return None
        return next((axis for axis, total in self.sums.items() if axis and abs(total - 1) <= 2 * _SLACK), None)

    @property
    def number(self) -> float | None:
        """The value of all elements, where they have one."""
        return self.low if self.low == self.high else None


NOTHING: Final = Fact()

_UNIT: Final = Fact(0, 1)

_LINEAR: Final = Fact(linear=True)

_OF_FUSED: Final = {"": _LINEAR, "Sigmoid": _UNIT, "HardSigmoid": _UNIT}
"""Facts of layers of ONNX Runtime with an activation."""


class Facts:
    """The facts of the values of a graph, found on request.

    Args:
        functions: The functions of the model.
        learned: Names of initializers whose values change.
        given: Facts that are known, such as those of a function's inputs.

    Attributes:
        relied: Names of the initializers whose values facts depend on.
    """

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
            return NOTHING if array is None else _of_array(array)
        function = self._functions.get(node.op_identifier())
        if function is not None:
            inner = Facts(self._functions, self._learned)
            inner._known.update(zip(function.inputs, map(self.of, node.inputs), strict=False))
            return inner.of(function.outputs[value.index() or 0])
        rule = _RULES.get(f"{node.domain}.{node.op_type}" if node.domain else node.op_type)
        if rule is None:
            return _UNIT if value.dtype == ir.DataType.BOOL else NOTHING
        return rule(self, node, value)

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Return the array of a small constant whose value does not change."""
        if value is None or value.name in self._learned or (value.is_graph_input() and not value.is_initializer()):
            return None
        found = value.const_value
        if found is not None and found.size > _LARGEST:
            return None
        array = constant_array(value)
        if array is None or array.size > _LARGEST or array.dtype.kind not in "fiub" or not array.size:
            return None
        if value.is_initializer():
            self.relied.add(str(value.name))
        return array

    def number(self, value: ir.Value | None) -> float | None:
        """Return the number of a constant of equal elements."""
        array = self.constant(value)
        return None if array is None or array.dtype.kind == "b" else _of_array(array).number

    def ints(self, node: ir.Node, name: str, index: int) -> list[int] | None:
        """Return integers of a node that are an attribute or, in later opsets, a constant input."""
        if name in node.attributes and not node.attributes[name].is_ref():
            found = node.attributes[name].value
            return [found] if isinstance(found, int) else list(found)
        array = self.constant(node.inputs[index]) if index < len(node.inputs) else None
        return None if array is None else [int(item) for item in array.reshape(-1)]

    def affine(self, value: ir.Value | None) -> tuple[Any, float, float]:
        """Return x, a and b of a value a x + b, where x is as plain as possible; a Sigmoid of -x is 1 - Sigmoid(x)."""
        source = behind(value, _SAME)
        node = None if source is None else source.producer()
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

_SAME: Final = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators that keep the elements and their order."""

_MOVING_WEIGHTS: Final = frozenset({"Identity", "Cast", "Transpose", "Reshape", "DequantizeLinear", "Mul", "Unsqueeze"})


def is_weight(value: ir.Value | None) -> bool:
    """Return whether a value is a constant of the model, perhaps transposed or dequantized."""
    source = behind(value, _MOVING_WEIGHTS)
    return source is not None and (source.is_initializer() or constant_array(source) is not None)


def _of_array(array: np.ndarray) -> Fact:
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        return NOTHING
    sums: dict[int, float] = {}
    for axis in range(numbers.ndim):
        totals = numbers.sum(axis)
        if float(np.ptp(totals)) <= _SMALL * _SMALL:
            sums[axis] = float(totals.flat[0])
    return Fact(float(numbers.min()), float(numbers.max()), sums)


def _times(one: float, other: float) -> float:
    return 0.0 if not one or not other else one * other


def _hull(*facts: Fact) -> Fact:
    return Fact(min(fact.low for fact in facts), max(fact.high for fact in facts), linear=all(f.linear for f in facts))


def _rank(value: ir.Value | None) -> int | None:
    shape = None if value is None else dimensions(value)
    return None if shape is None else len(shape)


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Return an attribute's value; ``None`` for a reference to that of a function."""
    if name not in node.attributes:
        return default
    given = node.attributes[name]
    return None if given.is_ref() else given.value


def _axis(node: ir.Node, value: ir.Value | None, default: int = -1) -> int | None:
    """Return the attribute ``axis`` of a node, counted from 0."""
    rank, axis = _rank(value), _attribute(node, "axis", default)
    if axis is None or (rank is None and axis < 0) or rank == 0:
        return None
    return int(axis if rank is None else axis % rank)


# Elementwise operators


def _increasing(function: Callable[[float], Any]) -> Rule:
    def rule(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
        x = facts.of(node.inputs[0])
        with np.errstate(all="ignore"):
            return Fact(float(function(x.low)), float(function(x.high)), linear=x.linear and node.op_type == "Tanh")

    return rule


def _constantly(fact: Fact) -> Rule:
    return lambda facts, node, value: fact


def _first(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Pass on the fact of the first input, whose elements the operator keeps or rounds."""
    return facts.of(node.inputs[0])


def _cast(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    is_rounded = value.dtype is not None and value.dtype.is_integer()
    return Fact(x.low - 1, x.high + 1) if is_rounded and x.number is None else x


def _hard_sigmoid(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    return _UNIT


def _exp(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    return x.log if x.log is not None else _increasing(np.exp)(facts, node, value)


def _log(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    found = _increasing(lambda number: np.log(max(number, 0)))(facts, node, value)
    return replace(found, log=x) if x.low >= 0 else found


def _neg(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, inner = facts.of(node.inputs[0]), behind(node.inputs[0], _SAME)
    producer = None if inner is None else inner.producer()
    log = _UNIT if producer is not None and producer.op_type == "Softplus" else None  # -softplus(-z) = log sigmoid(z)
    return Fact(-x.high, -x.low, {axis: -total for axis, total in x.sums.items()}, x.linear, log)


def _abs(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    return x if x.low >= 0 else Fact(0, max(abs(x.low), abs(x.high)))


def _pow(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, power = facts.of(node.inputs[0]), facts.number(node.inputs[1])
    if power is None or power <= 0:
        return NOTHING
    if x.low >= 0:
        return Fact(x.low**power, x.high**power)
    return Fact(0) if power % 2 == 0 else NOTHING


def _clipped(x: Fact, low: float, high: float) -> Fact:
    found = Fact(min(max(x.low, low), high), min(max(x.high, low), high), linear=x.linear)
    if low <= max(x.low, _SMALL) and high >= x.high - _SMALL:  # limits that avoid log(0)
        found = replace(found, sums=x.sums)
    return replace(found, log=x.log, linear=False) if x.log is not None and high >= -_SMALL else found


def _clip(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    low, high = _attribute(node, "min", -math.inf), _attribute(node, "max", math.inf)
    given = [*map(facts.of, node.inputs[1:])] if len(node.inputs) > 1 else []
    ends = [low, high]
    for index, fact in enumerate(given[:2]):
        if node.inputs[1 + index] is not None:
            ends[index] = fact.low if index == 0 else fact.high
    if None in ends:
        return NOTHING
    return _clipped(facts.of(node.inputs[0]), *ends)


def _extreme(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Bound the elementwise maximum or minimum."""
    given, is_max = [*map(facts.of, node.inputs)], node.op_type == "Max"
    for index, fact in enumerate(given):
        if fact.number is not None and len(given) == 2:
            limits = (fact.number, math.inf) if is_max else (-math.inf, fact.number)
            return _clipped(given[1 - index], *limits)
    choose = max if is_max else min
    return Fact(choose(fact.low for fact in given), choose(fact.high for fact in given))


def _totals(facts: Facts, operand: ir.Value | None, value: ir.Value) -> dict[int, float]:
    """Return the sums of an operand along the axes of the broadcast result."""
    fact, shape, own = facts.of(operand), dimensions(value), None if operand is None else dimensions(operand)
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


def _sum(facts: Facts, node: ir.Node, value: ir.Value, signs: Sequence[float] = (1.0, 1.0)) -> Fact:
    """Add or subtract."""
    given = [facts.of(each) for each in node.inputs]
    low = high = 0.0
    for fact, sign in zip(given, signs, strict=False):
        low, high = low + sign * (fact.low if sign > 0 else fact.high), high + sign * (fact.high if sign > 0 else fact.low)
    totals = [_totals(facts, each, value) for each in node.inputs]
    axes = set.intersection(*map(set, totals))
    sums = {
        axis: sum(sign * own[axis] for own, sign in zip(totals, signs, strict=False)) for axis in axes
    }
    numbers = [fact.number for fact in given]
    for index, number in enumerate(numbers):
        if number is not None and abs(number) <= _SMALL and len(given) == 2 and (index or signs[1] > 0):
            sums = dict(totals[1 - index]) | sums
            if given[1 - index].log is not None:
                return given[1 - index]
    return Fact(low, high, sums, any(fact.linear for fact in given))


def _add(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    between = _between(facts, node, value) if node.op_type == "Add" else None
    if between is not None:
        return between
    return _sum(facts, node, value, [1.0] * len(node.inputs))


def _sub(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    axis = _normalizes_log(facts, *node.inputs)
    if axis is not None:
        return Fact(-math.inf, 0, log=Fact(0, 1, {axis: 1.0}))
    return _between(facts, node, value) or _sum(facts, node, value, (1.0, -1.0))


def _mean(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    return _scaled(_add(facts, node, value), 1 / len(node.inputs))


def _scaled(x: Fact, scale: float) -> Fact:
    ends = sorted((_times(x.low, scale), _times(x.high, scale)))
    return Fact(*ends, {axis: total * scale for axis, total in x.sums.items()}, x.linear)


def _mul(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    for one, other in (node.inputs, node.inputs[::-1]):
        inverse = None if other is None else other.producer()
        if inverse is not None and inverse.op_type == "Reciprocal" and not inverse.domain:
            return _quotient(facts, one, inverse.inputs[0], value)
    x, y = map(facts.of, node.inputs)
    for index, (one, other) in enumerate(((x, y), (y, x))):
        if one.number is not None:
            found = _scaled(other, one.number)
            return replace(found, sums={a: s * one.number for a, s in _totals(facts, node.inputs[1 - index], value).items()})
    if node.inputs[0] is node.inputs[1]:
        return _pow_two(x)
    ends = [_times(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    is_logit = (x.linear and is_weight(node.inputs[1])) or (y.linear and is_weight(node.inputs[0]))
    mixtures = [found for pair in (node.inputs, node.inputs[::-1]) if (found := _mixture(facts, *pair, value))]
    return Fact(min(ends), max(ends), linear=is_logit, mixtures=dict(mixtures))


def _pow_two(x: Fact) -> Fact:
    most = max(abs(x.low), abs(x.high)) ** 2
    return Fact(min(x.low, x.high) ** 2 if x.low >= 0 else 0, most)


def _mixture(
    facts: Facts, weights: ir.Value | None, mixed: ir.Value | None, value: ir.Value
) -> tuple[int, Fact] | None:
    """Return the axis along which weights sum to one, and the fact of the values that they multiply."""
    rank, own = _rank(value), None if weights is None else dimensions(weights)
    fact, values = facts.of(weights), facts.of(mixed)
    if rank is None or own is None or fact.low < 0:
        return None
    shift = rank - len(own)
    axis = next((axis + shift for axis, total in fact.sums.items() if abs(total - 1) <= _SMALL), None)
    if axis is None:
        return None
    kept = {
        index: total
        for index, total in _totals(facts, mixed, value).items()
        if index != axis and (index < shift or own[index - shift] == 1)
    }
    return axis, Fact(values.low, values.high, kept)


def _div(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    return _quotient(facts, *node.inputs, value)


def _quotient(facts: Facts, whole: ir.Value | None, divisor: ir.Value | None, value: ir.Value) -> Fact:
    x, y = facts.of(whole), facts.of(divisor)
    if y.number:
        return replace(_scaled(x, 1 / y.number), sums={a: s / y.number for a, s in _totals(facts, whole, value).items()})
    share = _share(facts, whole, divisor)
    if share is not None:
        return share
    if x.linear and is_weight(divisor):
        return _LINEAR
    if y.low >= 0 or y.high <= 0:
        with np.errstate(all="ignore"):
            inverse = sorted(float(np.float64(1) / np.float64(end)) for end in (y.low, y.high) if end or y.low >= 0)
        if len(inverse) == 2:
            ends = [_times(a, b) for a in (x.low, x.high) for b in inverse]
            return Fact(min(ends), max(ends))
    return NOTHING


def _where(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    condition, one, other = node.inputs
    truth = facts.of(condition).number
    if truth is not None:
        return facts.of(one if truth else other)
    test = None if condition is None else condition.producer()
    limit = None if test is None or test.op_type not in _COMPARISONS else facts.number(test.inputs[1])
    if test is not None and limit is not None:
        is_above = test.op_type.startswith("Greater")
        cut = [_cut(facts, each, test.inputs[0], limit, above=is_above == first) for first, each in ((True, one), (False, other))]
        found = _hull(*cut)
    else:
        found = _hull(facts.of(one), facts.of(other))
    rank, own = _rank(value), None if condition is None else dimensions(condition)
    if rank is None or own is None:
        return found
    totals = [_totals(facts, each, value) for each in (one, other)]
    shift = rank - len(own)
    same = {axis: total for axis, total in totals[0].items() if abs(totals[1].get(axis, math.inf) - total) <= _SMALL}
    return replace(found, sums={a: total for a, total in same.items() if a < shift or own[a - shift] == 1})


_COMPARISONS: Final = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")


def _cut(facts: Facts, value: ir.Value | None, compared: ir.Value | None, limit: float, *, above: bool) -> Fact:
    """Return the fact of a value where it is above, or below, a limit that it is compared with."""
    fact = facts.of(value)
    if value is not compared:
        return fact
    return replace(fact, low=max(fact.low, limit)) if above else replace(fact, high=min(fact.high, limit))


def _compared(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, y = map(facts.of, node.inputs)
    if node.op_type.startswith("Less"):
        x, y = y, x
    return Fact(0, 0) if x.high < y.low else Fact(1, 1) if x.low > y.high else _UNIT


def _is_infinite(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    return _UNIT if math.isinf(x.low) or math.isinf(x.high) else Fact(0, 0)


def _between(facts: Facts, node: ir.Node, value: ir.Value) -> Fact | None:
    """Return the fact of a + w (b - a) and b - w (b - a), which lie between a and b for w in [0, 1]."""
    for start, step in (node.inputs, node.inputs[::-1]) if node.op_type == "Add" else (node.inputs,):
        scaled = None if step is None else step.producer()
        if scaled is None or scaled.op_type != "Mul":
            continue
        for difference, weight in (scaled.inputs, scaled.inputs[::-1]):
            minus = None if difference is None else difference.producer()
            if minus is None or minus.op_type != "Sub" or not facts.of(weight).is_probability:
                continue
            if start is minus.inputs[node.op_type == "Add"]:
                one, other = (_totals(facts, each, value) for each in minus.inputs)
                shape, rank = _dims(weight) or (None,), _rank(value) or 0
                sums = {
                    axis: total
                    for axis, total in one.items()
                    if abs(other.get(axis, math.inf) - total) <= _SMALL
                    and (axis < rank - len(shape) or shape[axis - rank] == 1)
                }
                return replace(_hull(*map(facts.of, minus.inputs)), sums=sums)
    return None


# Values divided by their sum


def _share(facts: Facts, whole: ir.Value | None, divisor: ir.Value | None) -> Fact | None:
    """Return the fact of values, none below 0, that are divided by a sum of which they are a part."""
    targets = {behind(each, _SAME) for each in (whole, *_unguarded(facts, whole))}
    if facts.of(whole).low < 0 and not any(facts.of(each).low >= 0 for each in _unguarded(facts, whole)):
        return None
    for part in _unguarded(facts, divisor):
        node = None if part is None else part.producer()
        if node is None or node.domain:
            continue
        if node.op_type in ("ReduceSum", "ReduceL1"):
            inner = behind(node.inputs[0], _SAME)
            producer = None if inner is None else inner.producer()
            if producer is not None and producer.op_type == "Abs":
                inner = behind(producer.inputs[0], _SAME)
            if inner in targets:
                axes, rank = facts.ints(node, "axes", 1), _rank(node.inputs[0])
                one = axes is not None and len(axes) == 1 and rank is not None
                return Fact(0, 1, {axes[0] % rank: 1.0} if one and axes and rank else {})
        if node.op_type == "Add" and any(behind(term, _SAME) in targets for term in node.inputs):
            return _UNIT if all(facts.of(term).low >= 0 for term in node.inputs) else None
    return None


def _unguarded(facts: Facts, value: ir.Value | None, steps: int = 6) -> list[ir.Value | None]:
    """Return a value, and those in it that nodes keep from zero: small terms and limits, and ones where a sum is zero."""
    source = behind(value, _SAME | {"Expand"})
    node = None if source is None else source.producer()
    found = [source]
    if node is None or node.domain or not steps:
        return found
    if node.op_type in ("Add", "Max", "Sum"):
        for index, term in enumerate(node.inputs[:2]):
            if _is_guard(facts, node.inputs[1 - index]):
                found += _unguarded(facts, term, steps - 1)
    elif node.op_type == "Clip":
        found += _unguarded(facts, node.inputs[0], steps - 1)
    elif node.op_type == "Where":
        given = [facts.number(each) for each in node.inputs[1:]]
        for index, number in enumerate(given):
            if number is not None:
                found += _unguarded(facts, node.inputs[2 - index], steps - 1)
    return found


def _is_guard(facts: Facts, value: ir.Value | None) -> bool:
    """Return whether a term is small, or not zero only where a condition like "the sum is 0" is true."""
    number = facts.number(value)
    if number is not None:
        return 0 <= number <= _SMALL
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Mul":
        pairs = (node.inputs, node.inputs[::-1])
        return any(facts.number(one) is not None and _is_guard(facts, other) for one, other in pairs)
    if node.op_type != "Cast" or node.inputs[0] is None:
        return False
    condition = node.inputs[0].producer()
    return condition is not None and condition.op_type in ("Not", "Equal")


def _normalizes_log(facts: Facts, z: ir.Value | None, total: ir.Value | None) -> int | None:
    """Return the axis of z - log sum exp(z); ``None`` for other differences."""
    source = behind(total, _SAME)
    node = None if source is None else source.producer()
    if node is not None and node.op_type == "Log":
        inner = behind(node.inputs[0], _SAME)
        node = None if inner is None else inner.producer()
        raised = None if node is None or node.op_type != "ReduceSum" else behind(node.inputs[0], _SAME)
        exp = None if raised is None else raised.producer()
        summed = None if exp is None or exp.op_type != "Exp" else exp.inputs[0]
    else:
        summed = node.inputs[0] if node is not None and node.op_type == "ReduceLogSumExp" else None
    if node is None or summed is None or behind(summed, _SAME) is not behind(z, _SAME):
        return None
    axes, rank = facts.ints(node, "axes", 1), _rank(z)
    return axes[0] % rank if axes is not None and len(axes) == 1 and rank else None


# Activations over an axis


def _softmax(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    known = value if dimensions(value) is not None else node.inputs[0]
    axis = _axis(node, known)
    found = _UNIT if axis is None else Fact(0, 1, {axis: 1.0})
    return Fact(-math.inf, 0, log=found) if node.op_type == "LogSoftmax" else found


def _lp_normalization(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    norm = _attribute(node, "p", 2) if node.op_type == "LpNormalization" else _attribute(node, "norm", b"MAX")
    axis = _axis(node, value) if node.op_type == "LpNormalization" else 1
    sums = {axis: 1.0} if norm in (1, b"L1", "L1") and axis is not None and x.low >= 0 else {}
    return Fact(0 if x.low >= 0 else -1, 1, sums)


def _of_scikit_learn(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Read what a classifier of ai.onnx.ml applies to its scores."""
    ending = str(_attribute(node, "post_transform", "NONE"))
    if value.index() != 1:
        return NOTHING
    return Fact(0, 1, {1: 1.0}) if "SOFTMAX" in ending else _UNIT if "LOGISTIC" in ending else NOTHING


# Reductions, pools and linear layers


def _reduced_axes(facts: Facts, node: ir.Node) -> list[int] | None:
    rank = _rank(node.inputs[0])
    if node.op_type.startswith("Global"):
        return None if rank is None else list(range(2, rank))
    axes = facts.ints(node, "axes", 1)
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        return None
    if rank is None:
        return None
    return [axis % rank for axis in axes] if axes else [] if _attribute(node, "noop_with_empty_axes", 0) else [*range(rank)]


def _without(sums: Mapping[int, float], axes: Sequence[int], *, keep: bool) -> dict[int, float]:
    """Return the sums along the axes that are not reduced, by their new positions."""
    return {
        axis if keep else axis - sum(other < axis for other in axes): total
        for axis, total in sums.items()
        if axis not in axes
    }


def _reduce(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, axes = facts.of(node.inputs[0]), _reduced_axes(facts, node)
    name = node.op_type
    keep = bool(_attribute(node, "keepdims", 1)) or name.startswith("Global")
    if name in ("ReduceL1", "ReduceL2", "ReduceSumSquare") and not (name == "ReduceL1" and x.low >= 0):
        return Fact(0)
    if name == "ReduceProd":
        return _UNIT if x.is_probability else NOTHING
    if name in ("ReduceSum", "ReduceL1"):
        return _summed(x, axes, node.inputs[0], keep=keep)
    averages = name in ("ReduceMean", "GlobalAveragePool", "QLinearGlobalAveragePool")
    sums = _without(x.sums, axes, keep=keep) if axes is not None and averages else {}
    return Fact(x.low, x.high, sums, x.linear)


def _summed(x: Fact, axes: list[int] | None, summed: ir.Value | None, *, keep: bool) -> Fact:
    """Return the fact of sums over axes."""
    if axes is not None and len(axes) == 1:
        if axes[0] in x.mixtures:
            mixed = x.mixtures[axes[0]]
            return replace(mixed, sums=_without(mixed.sums, axes, keep=keep))
        if axes[0] in x.sums:
            return Fact(x.sums[axes[0]], x.sums[axes[0]])
    shape = None if summed is None else dimensions(summed)
    sizes = [shape[axis] for axis in axes] if shape is not None and axes is not None else [None]
    if all(isinstance(size, int) for size in sizes):
        count = math.prod(size for size in sizes if isinstance(size, int))
        sums = {axis: total * count for axis, total in _without(x.sums, axes or (), keep=keep).items()}
        return Fact(_times(x.low, count), _times(x.high, count), sums, x.linear)
    return Fact(0 if x.low >= 0 else -math.inf, 0 if x.high <= 0 else math.inf, linear=x.linear)


def _average_pool(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    padded = any(_attribute(node, "pads", ()) or ()) or _attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if padded and _attribute(node, "count_include_pad", 0):
        return Fact(min(x.low, 0), max(x.high, 0), linear=x.linear)
    return Fact(x.low, x.high, {axis: total for axis, total in x.sums.items() if axis < 2}, x.linear)


def _bounds_only(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    return Fact(x.low, x.high, linear=x.linear)


def _resize(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, sizes, old = facts.of(node.inputs[0]), dimensions(value), _dims(node.inputs[0])
    mode, transform = _attribute(node, "mode", "nearest"), _attribute(node, "coordinate_transformation_mode", "")
    if str(mode) == "cubic" or transform == "tf_crop_and_resize":
        return NOTHING
    return Fact(x.low, x.high, _unmoved(x.sums, old, sizes), x.linear)


def _matmul(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Return the means that rows of weights, which sum to one, take of the other operand, or a linear layer."""
    left, right = node.inputs[:2]
    for weights, mixed, axis in ((left, right, -1), (right, left, -2)):
        rank, other = _rank(weights), _rank(mixed)
        if rank is None or other is None or min(rank, other) < 2 or _is_learned(facts, weights):
            continue
        fact = facts.of(weights)
        if fact.low >= 0 and abs(fact.sums.get(axis % rank, 0) - 1) <= _SMALL:
            values, kept = facts.of(mixed), other - 1 if axis == -1 else other - 2
            moved = (_rank(value) or other) - other + kept
            return Fact(values.low, values.high, {moved: values.sums[kept]} if kept in values.sums else {})
    return _LINEAR if is_weight(left) or is_weight(right) else NOTHING


def _is_learned(facts: Facts, value: ir.Value | None) -> bool:
    """Return whether an operand is a weight with entries below 0, which needs no search."""
    array = facts.constant(value)
    return is_weight(value) and (array is None or float(array.min()) < 0)


# Operators that move elements


def _dims(value: ir.Value | None) -> tuple[Dimension, ...] | None:
    return None if value is None else dimensions(value)


def _unmoved(
    sums: Mapping[int, float], old: tuple[Dimension, ...] | None, new: tuple[Dimension, ...] | None
) -> dict[int, float]:
    """Return the sums along the axes whose size does not change."""
    if old is None or new is None or len(old) != len(new):
        return {}
    return {axis: total for axis, total in sums.items() if old[axis] is not None and old[axis] == new[axis]}


def _after(shape: Sequence[Dimension], axis: int) -> tuple[int, Counter[Dimension]] | None:
    """Return the number of elements behind an axis, as an integer and symbols."""
    rest = shape[axis + 1 :]
    if None in rest:
        return None
    return math.prod(size for size in rest if isinstance(size, int)), Counter(d for d in rest if isinstance(d, str))


def _reshape(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Find the axes whose size, and the number of elements behind which, stay."""
    x, old, new = facts.of(node.inputs[0]), _dims(node.inputs[0]), dimensions(value)
    return _moved(x, lambda fact: _reshaped(fact.sums, old, new))


def _moved(x: Fact, move: Callable[[Fact], Mapping[int, float]]) -> Fact:
    log = None if x.log is None else replace(x.log, sums=move(x.log), mixtures={})
    return replace(x, sums=move(x), log=log, mixtures={})


def _reshaped(
    sums: Mapping[int, float], old: tuple[Dimension, ...] | None, new: tuple[Dimension, ...] | None
) -> dict[int, float]:
    if old is None or new is None:
        return {}
    found: dict[int, float] = {}
    for axis, total in sums.items():
        behind_it = _after(old, axis)
        for index, size in enumerate(new):
            same = behind_it is not None and _after(new, index) == behind_it
            begins = index == axis and None not in old[:axis] and old[:axis] == new[:axis]
            if size is not None and size == old[axis] and (same or begins):
                found[index] = total
                break
    return found


def _transpose(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, rank = facts.of(node.inputs[0]), _rank(node.inputs[0]) or _rank(value)
    order = _attribute(node, "perm", None if rank is None else list(range(rank))[::-1])
    return _moved(x, lambda fact: {} if order is None else {[*order].index(axis): s for axis, s in fact.sums.items()})


def _slice(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, rank = facts.of(node.inputs[0]), _rank(node.inputs[0])
    starts, ends = facts.ints(node, "starts", 1), facts.ints(node, "ends", 2)
    axes, steps = facts.ints(node, "axes", 3), facts.ints(node, "steps", 4)
    if axes is None and starts is not None and len(node.inputs) < 4:
        axes = [*range(len(starts))]
    if axes is None or rank is None:
        return _moved(x, lambda fact: {})
    cut, shape = {axis % rank for axis in axes}, _dims(node.inputs[0])
    if starts and ends and shape and (steps or len(node.inputs) < 5):  # reversed axes are whole
        for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=False):
            size = shape[axis]
            if isinstance(size, int):
                stop = None if step < 0 and end < -size else end
                if len(range(size)[slice(start, stop, step)]) == size:
                    cut.discard(axis % rank)
    return _moved(x, lambda fact: {axis: total for axis, total in fact.sums.items() if axis not in cut})


def _gather(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, axis, rank = facts.of(node.inputs[0]), _axis(node, node.inputs[0], 0), _rank(node.inputs[1])
    order, shape = facts.constant(node.inputs[1]), _dims(node.inputs[0])
    if axis is None or rank is None:
        return _moved(x, lambda fact: {})
    size = shape[axis] if shape else None
    whole = rank == 1 and order is not None and isinstance(size, int) and sorted(order % size) == [*range(size)]
    return _moved(
        x,
        lambda fact: {
            index if index <= axis else index + rank - 1: total
            for index, total in fact.sums.items()
            if index != axis or whole
        },
    )


def _gather_nd(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, shape, own = facts.of(node.inputs[0]), _dims(node.inputs[1]), _dims(node.inputs[0])
    if not shape or not own or not isinstance(shape[-1], int) or _attribute(node, "batch_dims", 0):
        return Fact(x.low, x.high, linear=x.linear)
    order, indexed, shift = facts.constant(node.inputs[1]), shape[-1], len(shape) - 1 - shape[-1]
    size = own[0]
    whole = (
        indexed == 1 == len(shape) - 1
        and order is not None
        and isinstance(size, int)
        and sorted(order.reshape(-1) % size) == [*range(size)]
    )
    return _moved(x, lambda fact: {a + shift: total for a, total in fact.sums.items() if a >= indexed or whole})


def _concat(facts: Facts, node: ir.Node, value: ir.Value, inputs: Sequence[ir.Value | None] = ()) -> Fact:
    parts = list(inputs or node.inputs)
    given, axis = [facts.of(part) for part in parts], _axis(node, value)
    logs = [fact.log for fact in given]
    found = _hull(*given)
    if all(logs):
        found = replace(found, log=_hull(*(log for log in logs if log is not None)))
    if axis is None:
        return found
    sums = {}
    for index in set.intersection(*(set(fact.sums) for fact in given)):
        totals = [fact.sums[index] for fact in given]
        if index == axis:
            sums[index] = sum(totals)
        elif max(totals) - min(totals) <= _SMALL:
            sums[index] = totals[0]
    sizes = [(_dims(part) or ())[axis : axis + 1] for part in parts]
    if all(size == (1,) for size in sizes):  # such as p and 1 - p
        terms = [facts.affine(part) for part in parts]
        slopes: dict[Any, float] = {}
        for x, a, _ in terms:
            slopes[x] = slopes.get(x, 0.0) + a
        if not any(slopes.values()):
            sums[axis] = sum(b for _, _, b in terms)
    return replace(found, sums=sums)


def _expand(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, old, new = facts.of(node.inputs[0]), _dims(node.inputs[0]), dimensions(value)
    if old is None or new is None or len(old) > len(new):
        return _moved(x, lambda fact: {})
    shift = len(new) - len(old)
    return _moved(x, lambda fact: {a + shift: s for a, s in _unmoved(fact.sums, old, new[shift:]).items()})


def _split(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, axis = facts.of(node.inputs[0]), _axis(node, node.inputs[0], 0)
    return _moved(x, lambda fact: {index: total for index, total in fact.sums.items() if axis not in (None, index)})


def _pad(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, rank, pads = facts.of(node.inputs[0]), _rank(node.inputs[0]), facts.ints(node, "pads", 1)
    if str(_attribute(node, "mode", "constant")) != "constant":
        return Fact(x.low, x.high, linear=x.linear)
    fill = facts.number(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else 0.0
    if fill is None:
        return NOTHING
    padded = {axis for axis in range(rank) if pads[axis] or pads[axis + rank]} if pads and rank else None
    if rank is None or padded is None or len(pads or ()) != 2 * rank:
        return Fact(min(x.low, fill), max(x.high, fill))
    sums = {axis: total for axis, total in x.sums.items() if not padded - {axis} and (not padded or not fill)}
    return Fact(min(x.low, fill), max(x.high, fill), sums)


# Quantized operators, bodies


def _qlinear(count: int, rule: Rule | None = None) -> Rule:
    """Read the facts of a quantized operator, whose numbers are those that the integers stand for."""

    def found(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
        if rule is not None:
            return rule(facts, node, value)
        given = [facts.of(node.inputs[3 * index]) for index in range(count)]
        if node.op_type == "QLinearAdd":
            return Fact(sum(fact.low for fact in given), sum(fact.high for fact in given))
        ends = [_times(a, b) for a in (given[0].low, given[0].high) for b in (given[-1].low, given[-1].high)]
        return Fact(min(ends), max(ends))

    return found


def _qlinear_concat(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    return _concat(facts, node, value, node.inputs[2::3])


def _if(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    branches = [node.attributes[name].value for name in ("then_branch", "else_branch")]
    one, other = (facts.of(branch.outputs[value.index() or 0]) for branch in branches)
    same = {a: s for a, s in one.sums.items() if abs(other.sums.get(a, math.inf) - s) <= _SMALL}
    return replace(_hull(one, other), sums=same)


def _loop(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Return the hull of a carried value before and after any pass, or the fact of stacked results."""
    body, index = node.attributes["body"].value, value.index() or 0
    scan = node.op_type == "Scan"
    stacked = _attribute(node, "num_scan_inputs", 0) if scan else 0
    carried = len(node.inputs) - (stacked or 0 if scan else 2)
    result = facts.of(body.outputs[index if scan else index + 1])
    if index < carried:
        found = _hull(result, facts.of(node.inputs[index if scan else index + 2]))
        return replace(found, sums=result.sums if result.sums == facts.of(node.inputs[index + (0 if scan else 2)]).sums else {})
    axes = _attribute(node, "scan_output_axes", None) or [0] * len(node.outputs)
    at = axes[index - carried]
    return replace(result, sums={a + (a >= at): s for a, s in result.sums.items()} if at >= 0 else {}, log=None)


_INCREASING: Final[dict[str, Callable[[float], Any]]] = {
    "Sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "Tanh": np.tanh,
    "Sqrt": lambda v: np.sqrt(max(v, 0)),
    "Relu": lambda v: max(v, 0),
    "Softplus": lambda v: np.logaddexp(0, v),
    "Erf": math.erf,
    "Softsign": lambda v: math.copysign(1, v) if math.isinf(v) else v / (1 + abs(v)),
    "Atan": np.arctan,
    "Sign": np.sign,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
}
"""Functions that grow with their argument: the bounds of the result are the results at the bounds."""

_RULES: Final[dict[str, Rule]] = {
    **{name: _increasing(function) for name, function in _INCREASING.items()},
    **dict.fromkeys(("Identity", "Dropout", "QuantizeLinear", "DequantizeLinear"), _first),
    **dict.fromkeys(("com.microsoft.QuantizeLinear", "com.microsoft.DequantizeLinear"), _first),
    "Cast": _cast,
    "CastLike": _cast,
    "HardSigmoid": _hard_sigmoid,
    "Exp": _exp,
    "Log": _log,
    "Neg": _neg,
    "Abs": _abs,
    "Pow": _pow,
    "Sin": _constantly(Fact(-1, 1)),
    "Cos": _constantly(Fact(-1, 1)),
    "Clip": _clip,
    "Max": _extreme,
    "Min": _extreme,
    "Add": _add,
    "Sum": _add,
    "Sub": _sub,
    "Mean": _mean,
    "Mul": _mul,
    "Div": _div,
    "Reciprocal": lambda facts, node, value: _reciprocal(facts.of(node.inputs[0])),
    "Where": _where,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "com.microsoft.BiasSoftmax", "com.microsoft.QLinearSoftmax"), _softmax),
    "LpNormalization": _lp_normalization,
    "ai.onnx.ml.Normalizer": _lp_normalization,
    **dict.fromkeys(("ai.onnx.ml.LinearClassifier", "ai.onnx.ml.SVMClassifier"), _of_scikit_learn),
    "ai.onnx.ml.TreeEnsembleClassifier": _of_scikit_learn,
    **dict.fromkeys((f"Reduce{name}" for name in ("Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare", "Prod")), _reduce),
    "GlobalAveragePool": _reduce,
    "GlobalMaxPool": _bounds_only,
    "AveragePool": _average_pool,
    **dict.fromkeys(("MaxPool", "TopK", "GatherElements", "Tile", "Compress", "DepthToSpace"), _bounds_only),
    **dict.fromkeys(("SpaceToDepth", "ReverseSequence", "CenterCropPad"), _bounds_only),
    "Resize": _resize,
    "Upsample": _resize,
    "MatMul": _matmul,
    **dict.fromkeys(("Gemm", "Conv", "ConvTranspose", "MatMulInteger", "ConvInteger", "QLinearMatMul"), _constantly(_LINEAR)),
    **dict.fromkeys(("QLinearConv", "BatchNormalization", "LayerNormalization"), _constantly(_LINEAR)),
    **dict.fromkeys(
        (f"com.microsoft.{name}" for name in ("MatMulNBits", "FusedMatMul", "FusedGemm", "FusedConv", "QGemm")),
        lambda facts, node, value: _OF_FUSED.get(str(_attribute(node, "activation", "")), NOTHING),
    ),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    "Transpose": _transpose,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "ConstantOfShape": lambda facts, node, value: _of_array(np.asarray(_attribute(node, "value", np.zeros(1)))),
    **dict.fromkeys(_COMPARISONS, _compared),
    "IsInf": _is_infinite,
    "And": lambda facts, node, value: Fact(*(min(ends) for ends in zip(*map(_ends, map(facts.of, node.inputs))))),
    "Concat": _concat,
    "Expand": _expand,
    "Split": _split,
    "Pad": _pad,
    "com.microsoft.QLinearSigmoid": _constantly(_UNIT),
    "com.microsoft.QLinearConcat": _qlinear_concat,
    "com.microsoft.QLinearGlobalAveragePool": _reduce,
    "com.microsoft.QLinearAveragePool": _average_pool,
    "com.microsoft.QLinearAdd": _qlinear(2),
    "com.microsoft.QLinearMul": _qlinear(2),
    "If": _if,
    "Loop": _loop,
    "Scan": _loop,
}
"""What each operator proves about its result; about those of other operators nothing is known."""


def _ends(x: Fact) -> tuple[float, float]:
    return x.low, x.high


def _reciprocal(x: Fact) -> Fact:
    return Fact(1 / x.high if x.high else 0, 1 / x.low if x.low else math.inf) if x.low >= 0 else NOTHING
