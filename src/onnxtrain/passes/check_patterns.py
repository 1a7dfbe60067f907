"""Patterns of names of nodes that are to be computed again, looked at while all nodes have their names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.passes.memory.numbered_layers import LAYERS, layer_of


def check_patterns(graph: ir.Graph, patterns: Sequence[str]) -> None:
    """Refuse patterns that match the name of no node.

    Requires: a graph with all of its nodes, before any is fused. Ensures: it is as it was; each pattern names a node.

    Raises:
        GradientError: There is such a pattern.
    """
    if not patterns:
        return
    nodes = [node for node in graph if node.name and not (node.op_type == "Gradient" and node.domain)]
    names = [node.name or "" for node in nodes]
    for pattern in patterns:
        if pattern == LAYERS and not any(map(layer_of, nodes)):
            raise GradientError(
                "recompute='layers', but no node has a name with a numbered layer, such as 'layers.3'; name nodes by "
                f"patterns; the model has {', '.join(map(repr, names[:8])) or 'no node with a name'}."
            )
        if pattern != LAYERS and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            raise GradientError(
                f"recompute={pattern!r} matches the name of no node; the model has {shown or 'no node with a name'}."
            )
