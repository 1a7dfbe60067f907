"""Limits on constants, shapes and nesting in a graph, checked before memory is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.graph.clone import subgraphs

LARGEST_TABLE = 1 << 24
"""Elements of the largest constant that a rule writes into a graph where sizes are known."""

LARGEST_SHAPE = (1 << 63) - 1
"""Elements that a tensor can have: their number is a signed 64-bit integer."""

MOST_POSITIONS = 1 << 16
"""Most positions of a window for which a rule writes nodes of their own."""


class TooLargeError(ValueError):
    """A constant would be too large; the message continues a sentence that begins with the name of a node."""


def fits(*sizes: int) -> bool:
    """Return whether a constant of these sizes may be written into the graph."""
    return math.prod(sizes) <= LARGEST_TABLE


def check_table(*sizes: int) -> None:
    """Check that a constant of these sizes may be written into the graph."""
    if not fits(*sizes):
        raise TooLargeError(
            f"needs a table of {' x '.join(map(str, sizes))} numbers in the graph, where {LARGEST_TABLE} are the most"
        )


def check_positions(*sizes: int) -> None:
    """Check that a rule may write nodes for each position of a window."""
    if math.prod(sizes) > MOST_POSITIONS:
        raise TooLargeError(
            f"writes out a window of {' x '.join(map(str, sizes))} positions, where {MOST_POSITIONS} are the most"
        )


def check_shapes(graph: ir.Graph) -> None:
    """Check that no tensor has more elements than a tensor can have."""
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None and math.prod(size for size in value.shape if isinstance(size, int)) > LARGEST_SHAPE:
            raise GradientError(
                f"{value.name!r} has the shape {value.shape}, more elements than a tensor can have; give it sizes that "
                "are true, or leave them out."
            )


DEEPEST = 31
"""Most levels of bodies: each is three nested messages, and protocol buffers read 100."""


def check_depth(graph: ir.Graph) -> None:
    """Check that protocol buffers can read a graph."""
    found = _depth(graph)
    if found > DEEPEST:
        raise GradientError(
            f"The graph nests the bodies of If, Loop and Scan {found} levels deep, but protocol buffers read "
            f"{DEEPEST}, and the gradient of a Loop may need a level more than the Loop; export the model with fewer."
        )


def _depth(graph: ir.Graph) -> int:
    return max((1 + _depth(body) for node in graph for body in subgraphs(node)), default=0)


def has_body_in_branches(model: ir.Model, branches: int) -> bool:
    """Return whether a node with a body lies inside that many nested branches; functions count at their calls.

    ONNX Runtime has a bug with these nodes (workarounds: branches that move twice).
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
