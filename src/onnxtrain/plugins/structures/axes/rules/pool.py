"""Pooling: images shrink, channels stay."""

from __future__ import annotations

from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule


@axes_of("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def pool(node: Node) -> list[list[Axis]]:
    """y [n, c, ...] = a summary of windows of x [n, c, ...]."""
    kept = [node.axis(0, 0), node.axis(0, 1)]
    if len(node.ir.outputs) > 1 and node.ir.outputs[1].name:
        kept[1] = node.fix(kept[1], f"{node.describe()} returns positions, which count channels")
    image = [fixed("it is an image axis of a pooling") for _ in range(node.rank() - 2)]
    return [[*kept, *image]] * len(node.ir.outputs)


no_rule("MaxUnpool", reason="its positions count channels")
