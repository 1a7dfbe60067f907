"""Rotary embeddings."""

from __future__ import annotations

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.plugins.structures.axes.broadcasting import same_shape
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule


@axes_of("RotaryEmbedding")
def rotary_embedding(node: Node) -> list[Axis]:
    """y [n, heads, t, d] = x with its entries rotated in pairs: heads are structures, if they have an axis."""
    mixed = [-1, -2] if node.rank() == 4 else range(node.rank())
    return same_shape(node, keeps_zero=True, mixed=mixed, reason="rotates its entries in pairs")


no_rule("RotaryEmbedding", domain=MICROSOFT_DOMAIN, reason="its heads have no axis of their own")
