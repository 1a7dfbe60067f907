"""The numbered layers of a model, which nodes have in their names."""

from __future__ import annotations

import re

import onnx_ir as ir

LAYERS = "layers"
"""The word that stands for all nodes of numbered layers, each layer computed again by itself."""

_LAYER = r"(?:^|[/._])(?:layers?|blocks?|h)[/._]?\d+(?=$|[/._])"
"""A numbered layer in the name of a node, as exporters write it: ``/model/layers.3/mlp``, ``layer0.norm1``."""


def layer_of(node: ir.Node) -> str:
    """What the name of a node says up to the number of its layer; "" where it says none."""
    found = re.search(_LAYER, node.name or "")
    return "" if found is None else (node.name or "")[: found.end()]
