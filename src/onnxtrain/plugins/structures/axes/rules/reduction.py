"""Sums and other summaries over axes: zeros add nothing to a sum, but a mean or a largest entry changes."""

from __future__ import annotations

from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule

_SUMS = frozenset({"ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare"})


@axes_of(
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
)
def reduce(node: Node) -> list[Axis]:
    """y = a summary of x over axes."""
    listed = node.integers("axes", 1)
    if listed is None and node.has(1):
        return [node.fix(axis, f"{node.describe()} has computed axes") for axis in node.all_axes()][: _rank(node)]
    if not listed and node.attribute("noop_with_empty_axes", 0):
        return node.all_axes()
    gone = {axis % node.rank() for axis in listed} if listed else set(range(node.rank()))
    keeps_zero = node.operator in _SUMS | {"ReduceMean", "ReduceMax", "ReduceMin"}
    found = []
    for place in range(node.rank()):
        axis = node.axis(0, place)
        if place not in gone:
            found.append(axis.with_zero(axis.zero and keeps_zero))
            continue
        if axis.labels is not None and not (axis.zero and node.operator in _SUMS):
            node.fix(axis, f"{node.describe()} summarizes it: fewer entries give another result")
        if node.attribute("keepdims", 1):
            found.append(fixed("its size is 1"))
    return found


def _rank(node: Node) -> int:
    return len(node.output_shape())


no_rule("Range", "Size", reason="its result depends on sizes")
