"""How deep the bodies of If, Loop and Scan may be nested."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.graph.clone import subgraphs

DEEPEST = 31
"""Levels of bodies that protocol buffers read: each is three messages within another, of which there may be 100."""


def check_depth(graph: ir.Graph) -> None:
    """Make sure that protocol buffers can hold a graph.

    Raises:
        GradientError: Its bodies are nested too deeply.
    """
    found = _depth(graph)
    if found > DEEPEST:
        raise GradientError(
            f"The graph nests the bodies of If, Loop and Scan {found} levels deep, but protocol buffers read "
            f"{DEEPEST}, and the gradient of a Loop may need a level more than the Loop; export the model with fewer."
        )


def _depth(graph: ir.Graph) -> int:
    return max((1 + _depth(body) for node in graph for body in subgraphs(node)), default=0)
