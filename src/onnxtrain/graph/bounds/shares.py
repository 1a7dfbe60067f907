"""Facts of values that are divided by their sum, or of which the logarithm of a sum is subtracted."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.bounds.facts import SAME, SMALL, UNIT, Fact, Facts, rank_of
from onnxtrain.graph.value import behind


def share_of(facts: Facts, whole: ir.Value | None, divisor: ir.Value | None) -> Fact | None:
    """Return the fact of values, none below 0, that are divided by a sum of which they are a part."""
    targets = {behind(each, SAME) for each in (whole, *_unguarded(facts, whole))}
    if facts.of(whole).low < 0 and not any(facts.of(each).low >= 0 for each in _unguarded(facts, whole)):
        return None
    for part in _unguarded(facts, divisor):
        node = None if part is None else part.producer()
        if node is None or node.domain:
            continue
        if node.op_type in ("ReduceSum", "ReduceL1"):
            inner = behind(node.inputs[0], SAME)
            producer = None if inner is None else inner.producer()
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
        return 0 <= number <= SMALL
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


def normalizes_log(facts: Facts, z: ir.Value | None, total: ir.Value | None) -> int | None:
    """Return the axis of z - log sum exp(z); ``None`` for other differences."""
    source = behind(total, SAME)
    node = None if source is None else source.producer()
    if node is not None and node.op_type == "Log":
        inner = behind(node.inputs[0], SAME)
        node = None if inner is None else inner.producer()
        raised = None if node is None or node.op_type != "ReduceSum" else behind(node.inputs[0], SAME)
        exp = None if raised is None else raised.producer()
        summed = None if exp is None or exp.op_type != "Exp" else exp.inputs[0]
    else:
        summed = node.inputs[0] if node is not None and node.op_type == "ReduceLogSumExp" else None
    if node is None or summed is None or behind(summed, SAME) is not behind(z, SAME):
        return None
    axes, rank = facts.ints(node, "axes", 1), rank_of(z)
    return axes[0] % rank if axes is not None and len(axes) == 1 and rank else None
