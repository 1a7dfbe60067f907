"""Find the numbered layers that nodes belong to, while nodes have the names that an exporter gave them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.parameters.exporters.pytorch import scopes

LAYERS = "layers"
"""The pattern of ``recompute`` that recomputes each numbered layer separately."""

_LAYER = r"(?:^|[/._])(?:layers?|blocks?|h)[/._]?\d+(?=$|[/._])"
"""A numbered layer in the name of a node, as exporters write it: ``/model/layers.3/mlp``, ``layer0.norm1``."""


def number_layers(graph: ir.Graph, patterns: Sequence[str]) -> dict[str, str]:
    """Return the layer of each value that a node of a numbered layer computes, by the names of both.

    Later passes fuse nodes, and give the result of the new one the name of the old.

    Requires: a graph with all of its nodes, before any is fused. Ensures: it is unchanged.

    Args:
        graph: The main graph.
        patterns: Patterns of ``recompute``; without ``"layers"`` the result is empty.
    """
    if LAYERS not in patterns:
        return {}
    found = {node: name for node in graph if (name := _layer_of(node))}
    full = _full_names(set(found.values()))
    return {value.name: full[name] for node, name in found.items() for value in node.outputs if value.name}


def _layer_of(node: ir.Node) -> str:
    """Return the dotted path of the layer that a node is in; "" if it is in none."""
    for name in (node.name or "", *(scopes(node.metadata_props) or ())):
        match = re.search(_LAYER, name)
        if match is not None:
            return name[: match.end()].replace("/", ".").strip(".")
    return ""


def _full_names(names: set[str]) -> dict[str, str]:
    """Map the names of layers to the longest that ends in them: adapters are named by weights, others by modules."""
    ordered = sorted(names, key=len, reverse=True)
    full: dict[str, str] = {}
    for name in ordered:
        longer = [other for other in full if other.endswith("." + name) and full[other] == other]
        full[name] = longer[0] if len(longer) == 1 else name
    return full
