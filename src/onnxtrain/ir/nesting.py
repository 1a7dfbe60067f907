"""How deep the bodies of If, Loop and Scan may be nested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.ir.clone import subgraphs

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


def has_body_in_branches(model: ir.Model, branches: int) -> bool:
    """Whether a node with a body lies that many branches of If nodes deep, functions counted where they are called.

    ONNX Runtime has a bug with these (workarounds: branches that move twice).
    """
    return _has_body(model.graph, model.functions, set(), branches)


def _has_body(
    nodes: Iterable[ir.Node],
    functions: Mapping[ir.OperatorIdentifier, ir.Function],
    seen: set[tuple[ir.OperatorIdentifier, int]],
    branches: int,
) -> bool:
    for node in nodes:
        bodies = subgraphs(node)
        if bodies and not branches:
            return True
        left = max(0, branches - (node.op_type == "If"))
        if any(_has_body(body, functions, seen, left) for body in bodies):
            return True
        if not functions:
            continue
        call = (node.op_identifier(), branches)
        if call[0] in functions and call not in seen:
            seen.add(call)
            if _has_body(functions[call[0]], functions, seen, branches):
                return True
    return False
