"""Sampling at positions."""

from __future__ import annotations

from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule


@axes_of("GridSample")
def grid_sample(node: Node) -> list[Axis]:
    """y [n, c, ...] = x [n, c, ...] at positions."""
    return [node.axis(0, 0), node.axis(0, 1), *(fixed("it is an image axis") for _ in range(node.rank() - 2))]


no_rule("AffineGrid", reason="its output is positions")
