"""Check the patterns of `recompute=` while all nodes still have their names."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.passes.memory.numbered_layers import LAYERS, layer_of
from onnxtrain.patterns import matches, no_match


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
        if pattern != LAYERS and not matches(pattern, *names):
            raise GradientError(no_match("recompute", pattern, "named node", names))
