"""Tell by its nodes whether a classifier's output holds probabilities or logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import onnx_ir as ir

from onnxtrain.ir.value import behind, constant_number, constant_tensor

_SAME: Final = frozenset({"Identity", "Cast", "Reshape"})

_GUARDS: Final = _SAME | {"Add", "Max", "Clip", "Where"}
"""Operators between a sum and a division by it, which avoid a division by zero."""

_STEPS: Final = 8
"""Nodes that are searched for the sum behind a divisor."""


ScoreKind = Literal["logits", "distribution", "independent"]
"""Meaning of scores: logits, probabilities that sum to one, or independent probabilities."""

_MOVING: Final = _SAME | {"Squeeze", "Unsqueeze", "Flatten", "Transpose", "QuantizeLinear", "DequantizeLinear"}

_LAYERS: Final = frozenset({"Gemm", "MatMul", "Conv", "LogSoftmax"})

_LAYERS_OF_RUNTIME: Final = frozenset({"MatMulNBits", "FusedMatMul", "FusedGemm", "FusedConv", "QGemm"})


def kind_of_scores(value: ir.Value | None) -> ScoreKind | None:
    """Return what the nodes before an output of scores make of them; ``None`` where they do not tell."""
    if sums_to_one(value):
        return "distribution"
    source = behind(value, _MOVING)
    node = None if source is None else source.producer()
    if node is None:
        return None
    name = node.op_type
    if name in ("Softmax", "QLinearSoftmax") or (source is not value and sums_to_one(source)):
        return "distribution"
    if name in ("Sigmoid", "HardSigmoid", "QLinearSigmoid"):
        return "independent"
    if name in (_LAYERS_OF_RUNTIME if node.domain else _LAYERS):
        return "logits"
    if name in ("Add", "Sub") and not node.domain:  # a bias
        kinds = [kind_of_scores(each) for each in node.inputs if each is not None and constant_tensor(each) is None]
        return "logits" if kinds and set(kinds) == {"logits"} else None
    return None


def sums_to_one(value: ir.Value | None) -> bool:
    """Return whether a value is built as probabilities.

    It is a pair (1 - p, p), values divided by their sum, exp(z - log sum exp(z)), or a mean of these and of softmaxes.
    Other quotients and pairs, such as logits divided by a temperature, are not.
    """
    node = _producer(value)
    if node is None:
        return False
    match node.op_type:
        case "Normalizer":
            return "norm" in node.attributes and node.attributes["norm"].as_string() == "L1"
        case "LpNormalization":
            return "p" in node.attributes and node.attributes["p"].as_int() == 1
        case "Concat":
            return len(node.inputs) == 2 and (_are_complements(*node.inputs) or _are_complements(*node.inputs[::-1]))
        case "Div":
            whole, divisor = node.inputs
            return _is_sum_of(divisor, whole) or _is_mean(list(_terms(whole)), divisor)
        case "Exp":
            return _is_log_softmax(node.inputs[0])
        case "Mean":
            return all(map(_is_distribution, node.inputs))
        case "ReduceMean":
            several = _producer(node.inputs[0])
            return several is not None and several.op_type == "Concat" and all(map(_is_distribution, several.inputs))
    return False


def _is_distribution(value: ir.Value | None) -> bool:
    node = _producer(value)
    return node is not None and (node.op_type == "Softmax" or sums_to_one(value))


def _same(value: ir.Value | None) -> ir.Value | None:
    """Return the value behind operators that keep its elements."""
    return behind(value, _SAME)


def _producer(value: ir.Value | None) -> ir.Node | None:
    source = _same(value)
    return None if source is None else source.producer()


def _are_complements(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Return whether the first is 1 minus the second, or both are sigmoids of z and -z."""
    node, second = _producer(one), _producer(other)
    if node is None:
        return False
    if node.op_type == "Sub":
        return constant_number(node.inputs[0]) == 1 and _same(node.inputs[1]) is _same(other)
    if node.op_type != "Sigmoid" or second is None or second.op_type != "Sigmoid":
        return False
    negated = _producer(node.inputs[0])
    return negated is not None and negated.op_type == "Neg" and _same(negated.inputs[0]) is _same(second.inputs[0])


def _is_sum_of(divisor: ir.Value | None, whole: ir.Value | None) -> bool:
    """Return whether a divisor is the sum of the values that it divides, perhaps kept from zero."""
    waiting, targets = [divisor], {_same(term) for term in (whole, *_terms(whole))}
    for _ in range(_STEPS):
        node = _producer(waiting.pop(0)) if waiting else None
        if node is None:
            if not waiting:
                return False
            continue
        if node.op_type in ("ReduceSum", "ReduceL1"):
            source = _producer(node.inputs[0])
            summed = source.inputs[0] if source is not None and source.op_type == "Abs" else node.inputs[0]
            if _same(summed) in targets:
                return True
        elif node.op_type in _GUARDS:
            waiting += node.inputs
    return False


def _is_log_softmax(value: ir.Value | None) -> bool:
    """Return whether a value is z - log sum exp(z)."""
    node = _producer(value)
    log_sum = _producer(node.inputs[1]) if node is not None and node.op_type == "Sub" else None
    if node is None or log_sum is None or log_sum.op_type != "ReduceLogSumExp":
        return False
    return _same(log_sum.inputs[0]) is _same(node.inputs[0])


def _terms(value: ir.Value | None) -> Iterator[ir.Value | None]:
    """Yield what a sum adds up."""
    node = _producer(value)
    if node is not None and node.op_type in ("Add", "Sum"):
        for operand in node.inputs:
            yield from _terms(operand)
    else:
        yield value


def _is_mean(terms: Sequence[ir.Value | None], divisor: ir.Value | None) -> bool:
    """Return whether probabilities are divided by their number."""
    return constant_number(divisor) == len(terms) and all(map(_is_distribution, terms))
