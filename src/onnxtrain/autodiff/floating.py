"""Rules of floating operators for quantized values: where gradients pass straight through, these stand for numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.autodiff.indices import kind_at, kinds_of, reads_index
from onnxtrain.autodiff.node import Node
from onnxtrain.ir import Value

Dys = list[Value | None]
"""The gradients of a node's outputs."""


def seen_as_floating(node: Node, wanted: Collection[ir.Value], dys: Dys, opsets: Mapping[str, int]) -> tuple[Node, Dys]:
    """The node and its gradients as they would be if the integers on which a gradient is asked for were floating.

    Indices, sizes and axes beside them stay integers. Where there are no such integers, they are as they were.

    Args:
        node: What a rule sees.
        wanted: The values of which gradients are asked for.
        dys: The gradients of the outputs, whose type the others take.
        opsets: Versions of the domains.
    """
    dtype = next((dy.dtype for dy in dys if dy is not None), None)
    carries = [
        value is not None
        and value.ir in wanted
        and not value.is_float
        and not value.is_sequence
        and not reads_index(node.ir, place, opsets)
        for place, value in enumerate(node.inputs)
    ]
    if dtype is None or not any(carries):
        return node, dys
    kinds, kinds_given = _kinds(node, opsets.get(node.ir.domain, 1))
    carrying = {kind for kind, carried in zip(kinds, carries, strict=True) if carried}
    inputs = [
        value if value is None or kind not in carrying else node.op.cast(value, dtype).with_shape(value.shape)
        for kind, value in zip(kinds, node.inputs, strict=True)
    ]
    outputs = [
        node.op.cast(y, dtype).with_shape(y.shape) if kind in carrying else y
        for kind, y in zip(kinds_given, node.outputs, strict=True)
    ]
    arriving = [
        node.op.zeros_like(y) if dy is None and kind in carrying else dy
        for kind, y, dy in zip(kinds_given, outputs, dys, strict=True)
    ]
    return node.with_values(inputs, outputs), arriving


def _kinds(node: Node, version: int) -> tuple[list[str], list[str]]:
    """The names that types of inputs and outputs have in the operator's schema: those of one name are one type."""
    counts = len(node.inputs), len(node.outputs)
    kinds = kinds_of(node.operator, node.ir.domain, version)
    if kinds is None:
        return [f"input {place}" for place in range(counts[0])], [f"output {place}" for place in range(counts[1])]
    return (
        [kind_at(kinds.inputs, place) for place in range(counts[0])],
        [kind_at(kinds.outputs, place) for place in range(counts[1])],
    )
