"""Dropout."""

from __future__ import annotations

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.plugins.structures.axes.broadcasting import same_shape
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule


@axes_of("Dropout")
def dropout(node: Node) -> list[list[Axis]]:
    """y = x, or zeros; the mask has the shape of x."""
    return [same_shape(node, keeps_zero=True)] * len(node.ir.outputs)


no_rule("CountedDropout", domain=ONNXTRAIN_DOMAIN, reason="it is a part of training graphs, not of model files")
