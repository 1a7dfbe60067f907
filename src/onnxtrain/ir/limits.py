"""How large what is written into a graph may be: sizes are looked at before memory is taken."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.errors import GradientError

LARGEST_TABLE = 1 << 24
"""Elements of the largest constant that is written into a graph because sizes are known."""

LARGEST_SHAPE = (1 << 63) - 1
"""Elements that a tensor can have: more than 63 bits do not count."""

MOST_POSITIONS = 1 << 16
"""Positions of a window that are written out, each as nodes of its own."""


class TooLargeError(ValueError):
    """A table would be larger than is written; the message goes on after the name of a node."""


def fits(*sizes: int) -> bool:
    """Whether a table of these sizes may be written."""
    return math.prod(sizes) <= LARGEST_TABLE


def check_table(*sizes: int) -> None:
    """Make sure of it.

    Raises:
        TooLargeError: It may not.
    """
    if not fits(*sizes):
        raise TooLargeError(
            f"needs a table of {' x '.join(map(str, sizes))} numbers in the graph, where {LARGEST_TABLE} are the most"
        )


def check_positions(*sizes: int) -> None:
    """Make sure that a window may be written out position by position.

    Raises:
        TooLargeError: It may not.
    """
    if math.prod(sizes) > MOST_POSITIONS:
        raise TooLargeError(
            f"writes out a window of {' x '.join(map(str, sizes))} positions, where {MOST_POSITIONS} are the most"
        )


def check_shapes(graph: ir.Graph) -> None:
    """Make sure that no tensor is declared or found to have more elements than one can have.

    Raises:
        GradientError: One is.
    """
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None and math.prod(size for size in value.shape if isinstance(size, int)) > LARGEST_SHAPE:
            raise GradientError(
                f"{value.name!r} has the shape {value.shape}, more elements than a tensor can have; give it sizes that "
                "are true, or leave them out."
            )
