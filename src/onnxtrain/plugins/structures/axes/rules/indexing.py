"""Operators that look entries up by their position."""

from __future__ import annotations

import numpy as np

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.plugins.structures.axes.broadcasting import same_shape
from onnxtrain.plugins.structures.axes.cut import Cut
from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule


@axes_of("Gather")
def gather(node: Node) -> list[Axis]:
    """y = the entries of x at positions along an axis; constant positions follow the structures."""
    axis = node.attribute("axis", 0) % node.rank()
    data, positions = node.positions(0, axis), node.constant(1)
    found = [fixed("it lists positions") for _ in range(node.rank(1))]
    if data.labels is not None:
        if positions is None or positions.ndim != 1:
            node.fix(data, f"{node.describe()} looks positions up along it")
        else:
            node.axis(1, 0)
            size = len(data.labels)
            places = positions.astype(np.int64) % size
            found = [data.taken(data.labels[places])]
            node.on_cut(lambda cut: _renumber(cut, node, data, places))
    others = [node.axis(0, place) for place in range(node.rank())]
    return [*others[:axis], *found, *others[axis + 1 :]]


def _renumber(cut: Cut, node: Node, data: Axis, places: np.ndarray) -> None:
    kept = cut.kept(data)
    if not kept.all():
        numbers = np.cumsum(kept) - 1
        cut.set_constant(node.ir, 1, numbers[places[kept[places]]].astype(np.int64))


@axes_of("ArgMax", "ArgMin", "CumSum", "CumProd", "TopK")
def mixes_one_axis(node: Node) -> list[list[Axis]]:
    """y = an operation along an axis."""
    if node.operator.startswith("Cum"):
        axis = node.number(1)
        mixed = range(node.rank()) if axis is None else [int(axis)]
    else:
        mixed = [node.attribute("axis", -1 if node.operator == "TopK" else 0)]
    found = same_shape(node, keeps_zero=False, mixed=mixed, reason="orders it")
    if node.operator.startswith("Arg") and not node.attribute("keepdims", 1):
        del found[mixed[0] % node.rank()]
    return [found] * len(node.ir.outputs)


no_rule(
    *("GatherElements", "GatherND", "Compress", "Unique", "OneHot", "TensorScatter", "ScatterElements", "ScatterND"),
    reason="its positions may lie on any axis",
)
no_rule("NonZero", "NonMaxSuppression", reason="it lists positions")
no_rule("GatherGradient", domain=ONNXTRAIN_DOMAIN, reason="it is a part of training graphs, not of model files")
