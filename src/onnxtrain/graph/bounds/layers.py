"""Facts of normalizations, reductions, pools, linear layers and operators with bodies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import onnx_ir as ir

from onnxtrain.graph.bounds.facts import (
    LINEAR,
    NOTHING,
    RULES,
    SMALL,
    UNIT,
    Fact,
    Facts,
    attribute,
    axis_of,
    common,
    constantly,
    hull,
    is_weight,
    rank_of,
    times,
)
from onnxtrain.graph.bounds.moving import unmoved
from onnxtrain.graph.value import dimensions

_OF_FUSED: Final = {"": LINEAR, "Sigmoid": UNIT, "HardSigmoid": UNIT}
"""Facts of layers of ONNX Runtime with an activation."""


def _softmax(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    known = value if dimensions(value) is not None else node.inputs[0]
    axis = axis_of(node, known)
    found = UNIT if axis is None else Fact(0, 1, {axis: 1.0})
    return Fact(-math.inf, 0, log=found) if node.op_type == "LogSoftmax" else found


def _lp_normalization(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    norm = attribute(node, "p", 2) if node.op_type == "LpNormalization" else attribute(node, "norm", b"MAX")
    axis = axis_of(node, value) if node.op_type == "LpNormalization" else 1
    sums = {axis: 1.0} if norm in (1, b"L1", "L1") and axis is not None and x.low >= 0 else {}
    return Fact(0 if x.low >= 0 else -1, 1, sums)


def _of_scikit_learn(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Read what a classifier of ai.onnx.ml applies to its scores."""
    ending = str(attribute(node, "post_transform", "NONE"))
    if value.index() != 1:
        return NOTHING
    return Fact(0, 1, {1: 1.0}) if "SOFTMAX" in ending else UNIT if "LOGISTIC" in ending else NOTHING


def _reduced_axes(facts: Facts, node: ir.Node) -> list[int] | None:
    rank = rank_of(node.inputs[0])
    if node.op_type.startswith("Global"):
        return None if rank is None else list(range(2, rank))
    axes = facts.ints(node, "axes", 1)
    if rank is None or (axes is None and len(node.inputs) > 1 and node.inputs[1] is not None):
        return None
    if not axes:
        return [] if attribute(node, "noop_with_empty_axes", 0) else [*range(rank)]
    return [axis % rank for axis in axes]


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
    keep = bool(attribute(node, "keepdims", 1)) or name.startswith("Global")
    if name in ("ReduceL1", "ReduceL2", "ReduceSumSquare") and not (name == "ReduceL1" and x.low >= 0):
        return Fact(0)
    if name == "ReduceProd":
        return UNIT if x.is_probability else NOTHING
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
    shape = dimensions(summed)
    sizes = [shape[axis] for axis in axes] if shape is not None and axes is not None else [None]
    if all(isinstance(size, int) for size in sizes):
        count = math.prod(size for size in sizes if isinstance(size, int))
        sums = {axis: total * count for axis, total in _without(x.sums, axes or (), keep=keep).items()}
        return Fact(times(x.low, count), times(x.high, count), sums, x.linear)
    return Fact(0 if x.low >= 0 else -math.inf, 0 if x.high <= 0 else math.inf, linear=x.linear)


def _average_pool(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x = facts.of(node.inputs[0])
    padded = any(attribute(node, "pads", ()) or ()) or attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if padded and attribute(node, "count_include_pad", 0):
        return Fact(min(x.low, 0), max(x.high, 0), linear=x.linear)
    return Fact(x.low, x.high, {axis: total for axis, total in x.sums.items() if axis < 2}, x.linear)


def _resize(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    x, sizes, old = facts.of(node.inputs[0]), dimensions(value), dimensions(node.inputs[0])
    mode, transform = attribute(node, "mode", "nearest"), attribute(node, "coordinate_transformation_mode", "")
    if str(mode) == "cubic" or transform == "tf_crop_and_resize":
        return NOTHING
    return Fact(x.low, x.high, unmoved(x.sums, old, sizes), x.linear)


def _matmul(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Return the means that rows of weights, which sum to one, take of the other operand, or a linear layer."""
    left, right = node.inputs[:2]
    for weights, mixed, axis in ((left, right, -1), (right, left, -2)):
        rank, other = rank_of(weights), rank_of(mixed)
        if rank is None or other is None or min(rank, other) < 2 or _is_learned(facts, weights):
            continue
        fact = facts.of(weights)
        if fact.low >= 0 and abs(fact.sums.get(axis % rank, 0) - 1) <= SMALL:
            values, kept = facts.of(mixed), other - 1 if axis == -1 else other - 2
            moved = (rank_of(value) or other) - other + kept
            return Fact(values.low, values.high, {moved: values.sums[kept]} if kept in values.sums else {})
    return LINEAR if is_weight(left) or is_weight(right) else NOTHING


def _einsum(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Return the means that weights take of the other operand: they sum to one along the only letter that is summed."""
    given, _, result = str(attribute(node, "equation", "")).replace(" ", "").partition("->")
    terms, shapes = given.split(","), [dimensions(each) for each in node.inputs]
    summed = {*given} - {*result, ","}
    if len(terms) != 2 or len(summed) != 1 or not all(t.isalpha() and len({*t}) == len(t) for t in (*terms, result)):
        return NOTHING
    (letter,) = summed
    sizes = [shape[term.index(letter)] if shape else None for term, shape in zip(terms, shapes, strict=True)]
    for weights, mixed in ((0, 1), (1, 0)):
        fact, values = facts.of(node.inputs[weights]), facts.of(node.inputs[mixed])
        total = fact.sums.get(terms[weights].index(letter), 0)
        if fact.low >= 0 and abs(total - 1) <= SMALL and sizes[0] is not None and sizes[0] == sizes[1]:
            names = {terms[mixed][axis]: total for axis, total in values.sums.items()}
            kept = {result.index(name): total for name, total in names.items() if name not in terms[weights]}
            return Fact(values.low, values.high, kept)
    return NOTHING


def _is_learned(facts: Facts, value: ir.Value | None) -> bool:
    """Return whether an operand is a weight with entries below 0, which needs no search."""
    array = facts.constant(value)
    return is_weight(value) and (array is None or float(array.min()) < 0)


def _if(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    branches = [node.attributes[name].value for name in ("then_branch", "else_branch")]
    one, other = (facts.of(branch.outputs[value.index() or 0]) for branch in branches)
    return replace(hull(one, other), sums=common(one.sums, other.sums))


def _loop(facts: Facts, node: ir.Node, value: ir.Value) -> Fact:
    """Return the hull of a carried value before and after any pass, or the fact of stacked results."""
    body, index = node.attributes["body"].value, value.index() or 0
    scan = node.op_type == "Scan"
    stacked = attribute(node, "num_scan_inputs", 0) if scan else 0
    carried = len(node.inputs) - (stacked or 0 if scan else 2)
    result = facts.of(body.outputs[index if scan else index + 1])
    if index < carried:
        start = facts.of(node.inputs[index if scan else index + 2])
        return replace(hull(result, start), sums=common(result.sums, start.sums))
    axes = attribute(node, "scan_output_axes", None) or [0] * len(node.outputs)
    at = axes[index - carried]
    return replace(result, sums={a + (a >= at): s for a, s in result.sums.items()} if at >= 0 else {}, log=None)


RULES.update(
    {
        **dict.fromkeys(
            ("Softmax", "LogSoftmax", "Hardmax", "com.microsoft.BiasSoftmax", "com.microsoft.QLinearSoftmax"), _softmax
        ),
        **dict.fromkeys(("LpNormalization", "ai.onnx.ml.Normalizer"), _lp_normalization),
        **dict.fromkeys(
            (f"ai.onnx.ml.{name}Classifier" for name in ("Linear", "SVM", "TreeEnsemble")), _of_scikit_learn
        ),
        **dict.fromkeys(
            (f"Reduce{name}" for name in ("Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare", "Prod")), _reduce
        ),
        **dict.fromkeys(("GlobalAveragePool", "com.microsoft.QLinearGlobalAveragePool"), _reduce),
        **dict.fromkeys(("AveragePool", "com.microsoft.QLinearAveragePool"), _average_pool),
        **dict.fromkeys(("Resize", "Upsample"), _resize),
        **dict.fromkeys(
            ("Gemm", "Conv", "ConvTranspose", "MatMulInteger", "ConvInteger", "QLinearMatMul"), constantly(LINEAR)
        ),
        **dict.fromkeys(("QLinearConv", "BatchNormalization", "LayerNormalization"), constantly(LINEAR)),
        **dict.fromkeys(
            (f"com.microsoft.{name}" for name in ("MatMulNBits", "FusedMatMul", "FusedGemm", "FusedConv", "QGemm")),
            lambda facts, node, value: _OF_FUSED.get(str(attribute(node, "activation", "")), NOTHING),
        ),
        "MatMul": _matmul,
        "Einsum": _einsum,
        "If": _if,
        "Loop": _loop,
        "Scan": _loop,
    }
)
