"""Names of layers in the ONNX file, the exported program and the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.adapters.architectures import in_checkpoints
from onnxtrain.graph import patterns
from onnxtrain.parameters.exporters import NameOrigin, genai, origin_of
from onnxtrain.parameters.names import module_paths, node_names
from onnxtrain.parameters.readers import Functions


def layer_names(weight: ir.Value, node: ir.Node, functions: Functions | None = None) -> tuple[str, ...]:
    """Return the names of a layer; the first is the name of its adapter.

    Example:
        >>> weight, x = ir.Value(name="model.layers.0.attn.q_proj.MatMul.weight"), ir.Value(name="x")
        >>> layer_names(weight, ir.Node("", "MatMul", [x, weight], name="/model/layers.0/attn/q_proj/MatMul"))
        ('model.layers.0.self_attn.q_proj', 'model.layers.0.attn.q_proj')
    """
    name = weight.name or ""
    found = [] if origin_of(name) is NameOrigin.EXPORTER else [genai.layer_of_weight(name)]
    found += [genai.layer_of_weight(path) for path in module_paths(weight, functions)]
    found += [genai.layer_of_node(other) for other in node_names(weight, functions) if "/" not in other]
    found += [own] if (own := name_of_node(node)) else []
    found += [name] if not found else []
    return tuple(dict.fromkeys(other for one in found for other in (in_checkpoints(one), one) if other))


def name_of_node(node: ir.Node) -> str:
    """Return the name of a layer by its node, "" for a node without name.

    Example:
        >>> name_of_node(ir.Node("", "MatMul", [], name="/model/lm_head/MatMul"))
        'model.lm_head'
    """
    return genai.layer_of_node((node.name or "").strip("/").replace("/", "."))


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern matches one of a layer's names.

    Example:
        >>> [matches(pattern, ["a.b.q_proj"]) for pattern in ("*.{q,v}_proj", "q_proj", "proj", "a.*.k_proj")]
        [True, True, False, False]
    """
    found = tuple(names)
    ends = tuple(f".{one}" for one in patterns.alternatives(pattern))
    return patterns.matches(pattern, *found) or any(name.endswith(ends) for name in found)
