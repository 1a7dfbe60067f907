"""Resizing of images."""

from __future__ import annotations

from onnxtrain.plugins.structures.axes.cut import Cut
from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of


@axes_of("Resize")
def resize(node: Node) -> list[Axis]:
    """y = x in other sizes along some axes; the axes with structures keep theirs."""
    before, after = node.shape(), node.output_shape()
    axes = node.attribute("axes")
    places = range(node.rank()) if axes is None else [axis % node.rank() for axis in axes]
    keeps_zero = node.attribute("extrapolation_value", 0.0) == 0
    found = []
    for place in range(node.rank()):
        axis = node.positions(0, place)
        if axis.labels is not None and before[place] != after[place]:
            axis = node.fix(axis, f"{node.describe()} resizes it")
        found.append(axis.with_zero(axis.zero and keeps_zero) if axis.labels is not None else fixed(axis.reason))

    def change(cut: Cut) -> None:
        changes = {
            number: cut.count(found[place])
            for number, place in enumerate(places)
            if found[place].labels is not None and cut.count(found[place]) != after[place]
        }
        if changes and node.has(3):
            cut.set_elements(node.ir, 3, changes)

    node.on_cut(change)
    return found
