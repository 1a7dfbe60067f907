"""Facts of elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.bounds.facts import (
    LINEAR,
    NOTHING,
    RULES,
    SAME,
    SMALL,
    UNIT,
    Fact,
    Facts,
    Rule,
    attribute,
    common,
    constantly,
    hull,
    is_weight,
    of_array,
    rank_of,
    times,
    totals_of,
)
from onnxtrain.graph.value import behind, dimensions, producer_of


def _increasing(function: Callable[[float], Any]) -> Rule:
    def rule(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
        x = facts.of(node.inputs[0])
        with np.errstate(all="ignore"):
            return Fact(float(function(x.low)), float(function(x.high)), linear=x.linear and node.op_type == "Tanh")

    return rule


def first(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Pass on the fact of the first input, whose elements the operator keeps or rounds."""
    return facts.of(node.inputs[0])


def _quantize(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Integers whose least one stands for zero replace a Relu, which quantizers remove."""
    x, zero = facts.of(node.inputs[0]), facts.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if x.low >= 0 or value.dtype is None or zero is None or (zero != value.dtype.min).any():
        return x
    return Fact(0, max(x.high, 0), x.sums if x.is_probability else {})


def _dequantize(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Return the fact of the numbers that integers stand for."""
    array, integers = facts.constant(value), node.inputs[0]
    if array is not None:
        return of_array(array)
    return NOTHING if integers is None or integers.producer() is None else facts.of(integers)


def _cast(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    is_rounded = value.dtype is not None and value.dtype.is_integer()
    return Fact(x.low - 1, x.high + 1) if is_rounded and x.number is None else x


def _exp(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    return x.log if x.log is not None else _increasing(np.exp)(facts, node, value)


def _log(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    found = _increasing(lambda number: np.log(max(number, 0)))(facts, node, value)
    return replace(found, log=x) if x.low >= 0 else found


def _neg(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, producer = facts.of(node.inputs[0]), _maker(node.inputs[0])
    log = UNIT if producer is not None and producer.op_type == "Softplus" else None  # -softplus(-z) = log sigmoid(z)
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
    if low <= max(x.low, SMALL) and high >= x.high - SMALL:  # limits that avoid log(0)
        found = replace(found, sums=x.sums)
    return replace(found, log=x.log, linear=False) if x.log is not None and high >= -SMALL else found


def _clip(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    low, high = attribute(node, "min", -math.inf), attribute(node, "max", math.inf)
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


def _sum(facts: Facts, node: ir.Node, value: ir.Value, signs: Sequence[float] = (1.0, 1.0)) -> Fact:
    """Add or subtract."""
    given = [facts.of(each) for each in node.inputs]
    low = high = 0.0
    for fact, sign in zip(given, signs, strict=False):
        low, high = (
            low + sign * (fact.low if sign > 0 else fact.high),
            high + sign * (fact.high if sign > 0 else fact.low),
        )
    totals = [totals_of(facts, each, value) for each in node.inputs]
    axes = set.intersection(*map(set, totals))
    sums = {axis: sum(sign * own[axis] for own, sign in zip(totals, signs, strict=False)) for axis in axes}
    numbers = [fact.number for fact in given]
    for index, number in enumerate(numbers):
        if number is not None and abs(number) <= SMALL and len(given) == 2 and (index or signs[1] > 0):
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


def scaled(x: Fact, scale: float) -> Fact:
    """Return the fact of a multiple."""
    low, high = sorted((times(x.low, scale), times(x.high, scale)))
    return Fact(low, high, {axis: total * scale for axis, total in x.sums.items()}, x.linear)


def _mul(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    left, right = node.inputs
    for one, other in ((left, right), (right, left)):
        inverse = _maker(other)
        if inverse is not None and inverse.op_type == "Reciprocal" and not inverse.domain:
            return _quotient(facts, one, inverse.inputs[0], value)
        number = facts.of(one).number
        if number is not None:
            sums = {axis: total * number for axis, total in totals_of(facts, other, value).items()}
            return replace(scaled(facts.of(other), number), sums=sums)
    x, y = facts.of(left), facts.of(right)
    if left is right:
        return Fact(min(x.low, x.high) ** 2 if x.low >= 0 else 0, max(abs(x.low), abs(x.high)) ** 2)
    ends = [times(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    is_logit = (x.linear and is_weight(right)) or (y.linear and is_weight(left))
    mixtures = (_mixture(facts, left, right, value), _mixture(facts, right, left, value))
    return Fact(min(ends), max(ends), linear=is_logit, mixtures=dict(each for each in mixtures if each))


def _mixture(
    facts: Facts, weights: ir.Value | None, mixed: ir.Value | None, value: ir.Value
) -> tuple[int, Fact] | None:
    """Return the axis along which weights sum to one, and the fact of the values that they multiply."""
    rank, own = rank_of(value), dimensions(weights)
    fact, values = facts.of(weights), facts.of(mixed)
    if rank is None or own is None or fact.low < 0:
        return None
    shift = rank - len(own)
    axis = next((axis + shift for axis, total in fact.sums.items() if abs(total - 1) <= SMALL), None)
    if axis is None:
        return None
    kept = {
        index: total
        for index, total in totals_of(facts, mixed, value).items()
        if index != axis and (index < shift or own[index - shift] == 1)
    }
    return axis, Fact(values.low, values.high, kept)


def _quotient(facts: Facts, whole: ir.Value | None, divisor: ir.Value | None, value: ir.Value) -> Fact:
    x, y = facts.of(whole), facts.of(divisor)
    if y.number:
        return replace(
            scaled(x, 1 / y.number), sums={a: s / y.number for a, s in totals_of(facts, whole, value).items()}
        )
    share = _share_of(facts, whole, divisor)
    if share is not None:
        return share
    if x.linear and is_weight(divisor):
        return LINEAR
    if y.low >= 0 or y.high <= 0:
        with np.errstate(all="ignore"):
            inverse = sorted(float(np.float64(1) / np.float64(end)) for end in (y.low, y.high) if end or y.low >= 0)
        if len(inverse) == 2:
            ends = [times(a, b) for a in (x.low, x.high) for b in inverse]
            return Fact(min(ends), max(ends))
    return NOTHING


def _reciprocal(x: Fact) -> Fact:
    return Fact(1 / x.high if x.high else 0, 1 / x.low if x.low else math.inf) if x.low >= 0 else NOTHING


def _where(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    condition, one, other = node.inputs
    truth = facts.of(condition).number
    if truth is not None:
        return facts.of(one if truth else other)
    test = producer_of(condition)
    limit = None if test is None or test.op_type not in _COMPARISONS else facts.number(test.inputs[1])
    if test is not None and limit is not None:
        is_above = test.op_type.startswith("Greater")
        cut = [
            _cut(facts, each, test.inputs[0], limit, above=is_above == first)
            for first, each in ((True, one), (False, other))
        ]
        found = hull(*cut)
    else:
        found = hull(facts.of(one), facts.of(other))
    rank, own = rank_of(value), dimensions(condition)
    if rank is None or own is None:
        return found
    shift, same = rank - len(own), common(*(totals_of(facts, each, value) for each in (one, other)))
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
    return Fact(0, 0) if x.high < y.low else Fact(1, 1) if x.low > y.high else UNIT


def _is_infinite(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    return UNIT if math.isinf(x.low) or math.isinf(x.high) else Fact(0, 0)


def _both(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    given = [facts.of(each) for each in node.inputs]
    return Fact(min(fact.low for fact in given), min(fact.high for fact in given))


def _maker(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a value, behind those that keep its elements."""
    source = behind(value, SAME)
    return producer_of(source)


def _between(facts: Facts, node: ir.Node, value: ir.Value) -> Fact | None:
    """Return the fact of a + w (b - a) and b - w (b - a), which lie between a and b for w in [0, 1]."""
    for start, step in (node.inputs, node.inputs[::-1]) if node.op_type == "Add" else (node.inputs,):
        product = _maker(step)
        if product is None or product.op_type != "Mul":
            continue
        for difference, weight in (product.inputs, product.inputs[::-1]):
            minus = _maker(difference)
            if minus is None or minus.op_type != "Sub" or not facts.of(weight).is_probability:
                continue
            if behind(start, SAME) is behind(minus.inputs[node.op_type == "Add"], SAME):
                same = common(*(totals_of(facts, each, value) for each in minus.inputs))
                shape, rank = dimensions(weight) or (None,), rank_of(value) or 0
                sums = {a: s for a, s in same.items() if a < rank - len(shape) or shape[a - rank] == 1}
                return replace(hull(*map(facts.of, minus.inputs)), sums=sums)
    return None


# Values that are divided by their sum, or of which the logarithm of a sum is subtracted


def _share_of(facts: Facts, whole: ir.Value | None, divisor: ir.Value | None) -> Fact | None:
    """Return the fact of values, none below 0, that are divided by a sum of which they are a part."""
    targets = {behind(each, SAME) for each in (whole, *_unguarded(facts, whole))}
    if facts.of(whole).low < 0 and not any(facts.of(each).low >= 0 for each in _unguarded(facts, whole)):
        return None
    for part in _unguarded(facts, divisor):
        node = producer_of(part)
        if node is None or node.domain:
            continue
        if node.op_type in ("ReduceSum", "ReduceL1"):
            inner = behind(node.inputs[0], SAME)
            producer = producer_of(inner)
            if producer is not None and producer.op_type == "Abs":
                inner = behind(producer.inputs[0], SAME)
            if inner in targets:
                axes, rank = facts.ints(node, "axes", 1), rank_of(node.inputs[0])
                one = axes is not None and len(axes) == 1 and rank is not None
                return Fact(0, 1, {axes[0] % rank: 1.0} if one and axes and rank else {})
        if node.op_type == "Add" and any(behind(term, SAME) in targets for term in node.inputs):
            return UNIT if all(facts.of(term).low >= 0 for term in node.inputs) else None
    return None


def _unguarded(facts: Facts, value: ir.Value | None, steps: int = 6) -> list[ir.Value | None]:
    """Return a value, and those in it that small terms, limits and conditions keep from zero."""
    source = behind(value, SAME | {"Expand"})
    node = producer_of(source)
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
        return 0 <= number <= SMALL
    node = producer_of(value)
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
    source = behind(total, SAME)
    node = producer_of(source)
    if node is not None and node.op_type == "Log":
        inner = behind(node.inputs[0], SAME)
        node = producer_of(inner)
        raised = None if node is None or node.op_type != "ReduceSum" else behind(node.inputs[0], SAME)
        exp = producer_of(raised)
        summed = None if exp is None or exp.op_type != "Exp" else exp.inputs[0]
    else:
        summed = node.inputs[0] if node is not None and node.op_type == "ReduceLogSumExp" else None
    if node is None or summed is None or behind(summed, SAME) is not behind(z, SAME):
        return None
    axes, rank = facts.ints(node, "axes", 1), rank_of(z)
    return axes[0] % rank if axes is not None and len(axes) == 1 and rank else None


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

RULES.update(
    {
        **{name: _increasing(function) for name, function in _INCREASING.items()},
        **dict.fromkeys(("Identity", "Dropout"), first),
        **dict.fromkeys(("QuantizeLinear", "com.microsoft.QuantizeLinear"), _quantize),
        **dict.fromkeys(("DequantizeLinear", "com.microsoft.DequantizeLinear"), _dequantize),
        **dict.fromkeys(("HardSigmoid", "com.microsoft.QLinearSigmoid"), constantly(UNIT)),
        **dict.fromkeys(("Sin", "Cos"), constantly(Fact(-1, 1))),
        **dict.fromkeys(("Cast", "CastLike"), _cast),
        **dict.fromkeys(("Max", "Min"), _extreme),
        **dict.fromkeys(("Add", "Sum"), _add),
        **dict.fromkeys(_COMPARISONS, _compared),
        "Exp": _exp,
        "Log": _log,
        "Neg": _neg,
        "Abs": _abs,
        "Pow": _pow,
        "Clip": _clip,
        "Sub": _sub,
        "Mean": lambda facts, node, value: scaled(_add(facts, node, value), 1 / len(node.inputs)),
        "Mul": _mul,
        "Div": lambda facts, node, value: _quotient(facts, node.inputs[0], node.inputs[1], value),
        "Reciprocal": lambda facts, node, value: _reciprocal(facts.of(node.inputs[0])),
        "Where": _where,
        "IsInf": _is_infinite,
        "And": _both,
    }
)
