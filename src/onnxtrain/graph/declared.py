"""Shapes that a file declares and that cannot be true."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.clone import subgraphs


def contradictions(graph: ir.Graph) -> int:
    """How many outputs of standard operators have no type after inference, though all inputs have one.

    ONNX's inference stops at a node whose inputs have shapes that do not go together. TorchScript's exporter
    declares such shapes for the branches of an If that are never taken.
    """
    count = 0
    for node in graph:
        if node.domain == "" and all(value is None or value.type is not None for value in node.inputs):
            count += sum(bool(output.name) and output.type is None for output in node.outputs)
    return count


def forget_shapes(graph: ir.Graph) -> dict[ir.Value, ir.Shape]:
    """Remove the shapes of all that nodes give, those in subgraphs included; the graph's outputs keep their rank.

    Returns:
        The shapes that were removed.
    """
    removed: dict[ir.Value, ir.Shape] = {}
    _forget(graph, removed)
    for output in graph.outputs:
        if output in removed:
            output.shape = ir.Shape([None] * len(removed[output]))
    return removed


def _forget(graph: ir.Graph, removed: dict[ir.Value, ir.Shape]) -> None:
    for node in graph:
        for output in node.outputs:
            if output.shape is not None:
                removed[output] = output.shape
                output.shape = None
        for inner in subgraphs(node):
            _forget(inner, removed)
