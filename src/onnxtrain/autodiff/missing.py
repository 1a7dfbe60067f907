"""Find the parameters that a gradient reaches, and report operators on its path that have no rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.autodiff import registry
from onnxtrain.autodiff.expand import expand_functions
from onnxtrain.autodiff.node import describe
from onnxtrain.autodiff.path import Forward, Route
from onnxtrain.errors.formatting import listed
from onnxtrain.graph.clone import values_read
from onnxtrain.graph.domains import MICROSOFT_DOMAIN, NCHWC_DOMAIN

GPU_ONLY = frozenset(
    {"PackedAttention", "PackedMultiHeadAttention", "RemovePadding", "RestorePadding", "RelativePositionBias"}
    | {"GatedRelativePositionBias", "LongformerAttention", "DecoderAttention", "DecoderMaskedSelfAttention"}
    | {"BiasAdd", "BiasSplitGelu", "GroupNorm", "SkipGroupNorm", "NhwcConv", "PagedAttention"}
)
"""Operators of ONNX Runtime that its optimizer writes for GPUs: they have no CPU kernel."""


FOR_ONE_CPU = (
    "ONNX Runtime optimized the model for one kind of CPU (NCHWc layout); take the model from before it was "
    "optimized, or one optimized at the level ORT_ENABLE_EXTENDED."
)


def reached(forward: Forward, y: ir.Value, xs: Sequence[ir.Value]) -> set[ir.Value]:
    """The xs that y depends on through floating values and operators that pass a gradient on."""
    path, _ = expand_functions(forward, Route((y,), tuple(xs)), shapes=False)
    candidates = set(xs)
    return {value for node in path for value in values_read(node) if value in candidates} | ({y} & candidates)


def missing_rules(forward: Forward, y: ir.Value, xs: Sequence[ir.Value]) -> list[ir.Node]:
    """The nodes between xs and y that have neither a rule nor a body."""
    return expand_functions(forward, Route((y,), tuple(xs)), shapes=False)[1]


def missing_rules_message(nodes: Iterable[ir.Node], opsets: Mapping[str, int]) -> str:
    """Report the nodes without a rule, and how to add one; quantizing and GPU-only nodes get sentences of their own."""
    nodes = list(nodes)
    blocked = [node for node in nodes if node.domain == NCHWC_DOMAIN]
    if blocked:
        return f"{_some(blocked)}: {FOR_ONE_CPU}"
    quantized = [node for node in nodes if _is_listed(node, opsets)]
    known = [node for node in nodes if node not in quantized and _find(node, opsets) is not None]
    optimized = [node for node in nodes if node.domain == MICROSOFT_DOMAIN and node.op_type in GPU_ONLY]
    unknown = [node for node in nodes if node not in (*quantized, *known, *optimized)]
    parts = [_quantized_message(quantized)] * bool(quantized) + [_bodies_message(known)] * bool(known)
    parts += [_optimized_message(optimized)] * bool(optimized)
    return " ".join(parts + [_unknown_message(unknown, opsets)] * bool(unknown))


def _is_listed(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    entry = _find(node, opsets)
    return entry is not None and entry.function is None


def _find(node: ir.Node, opsets: Mapping[str, int]) -> registry.Entry | None:
    return registry.find(node.op_type, node.domain, opsets.get(node.domain, 1))


def _bodies_message(nodes: Sequence[ir.Node]) -> str:
    return (
        f"{_some(nodes)} reads quantized values in its bodies, into which no straight-through gradient flows; "
        "quantize inside of the bodies, or freeze the parameters before them (freeze=)."
    )


def _some(nodes: Sequence[ir.Node]) -> str:
    return listed(map(describe, nodes), counted=False)


def _quantized_message(nodes: Sequence[ir.Node]) -> str:
    return (
        f"Between the parameters and the loss values are handed on as quantized integers, whose gradient is zero, by "
        f"{_some(nodes)}. Train the quantized weights (qat=True), let gradients pass straight through "
        "(straight_through=True), or freeze the parameters before them (freeze=)."
    )


def _optimized_message(nodes: Sequence[ir.Node]) -> str:
    return (
        f"{_some(nodes)}: ONNX Runtime has this operator for GPUs only, and there is no gradient rule for it; train "
        "the model from before it was optimized, and optimize the trained one again; or optimize it with use_gpu=False."
    )


def _unknown_message(nodes: Iterable[ir.Node], opsets: Mapping[str, int]) -> str:
    operators: dict[tuple[str, str], list[ir.Node]] = {}
    for node in nodes:
        operators.setdefault((node.domain, node.op_type), []).append(node)
    parts = []
    for (domain, operator), found in operators.items():
        parts.append(f"{domain or 'ai.onnx'}::{operator} (opset {opsets.get(domain, 'not imported')}): {_some(found)}")
    return (
        f"No gradient rule for {len(operators)} operator{'s' if len(operators) > 1 else ''} between the "
        f"parameters and the loss: {'; '.join(parts)}. Freeze the parameters before them (freeze=), or add a "
        "rule with @onnxtrain.register_gradient."
    )
