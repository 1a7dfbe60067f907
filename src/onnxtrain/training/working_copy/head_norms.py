"""Move the normalization of queries and keys out of GroupQueryAttention, which computes it on GPUs only."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.value import dimensions

_QUERY_NORM = 14
"""The input slot of the weight [n] for queries; the one for keys follows."""


def separate_head_norms(model: ir.Model) -> None:
    """Move the normalization of queries and keys out of GroupQueryAttention, into nodes before it."""
    graph = model.graph
    for node in list(graph):
        if node.op_type != "GroupQueryAttention" or node.domain != MICROSOFT_DOMAIN or len(node.inputs) <= _QUERY_NORM:
            continue
        query, *weights = node.inputs[0], *node.inputs[_QUERY_NORM : _QUERY_NORM + 2]
        sizes = [dimensions(weight) if weight is not None else None for weight in weights]
        size = (sizes[0] or (None,))[0]
        if query is None or not isinstance(size, int) or len(weights) != 2 or None in weights:
            continue  # the operator's gradient raises the error
        op = Builder(graph, graph.opset_imports[""], before=node)
        settings = {name: attribute.value for name, attribute in node.attributes.items()}
        heads = [int(settings["num_heads"]), *[int(settings["kv_num_heads"])] * 2]
        parts = [op.wrap(value) for value in node.inputs[:3] if value is not None]
        if len(parts) < 3:
            counts = op.ints(*(count * size for count in heads))
            parts = list(op.several("Split", parts[0], counts, outputs=3, axis=2))
            for part, count in zip(parts, heads, strict=True):
                part.ir.dtype = op.wrap(query).dtype
                part.with_shape((*(dimensions(query) or (None, None))[:2], count * size))
        shared = settings.get("qk_norm_epsilon", 1e-6)
        for slot, own in enumerate(("q_norm_epsilon", "k_norm_epsilon")):
            weight = weights[slot]
            assert weight is not None
            part = _normalized(op, parts[slot], op.wrap(weight), heads[slot], size, float(settings.get(own, shared)))
            node.replace_input_with(slot, part.ir)
            node.replace_input_with(_QUERY_NORM + slot, None)
            node.attributes.pop(own, None)
        node.attributes.pop("qk_norm_epsilon", None)
        node.replace_input_with(2, parts[2].ir)


def _normalized(op: Builder, x: Value, weight: Value, heads: int, size: int, epsilon: float) -> Value:
    """y = weight x / sqrt(mean x² + epsilon) per head of x [b, s, heads n]."""
    shape = x.shape or (None, None, None)
    divided = op.Reshape(x, op.ints(0, 0, heads, size)).with_shape((*shape[:2], heads, size))
    norm = op.several(
        "SimplifiedLayerNormalization", divided, weight, outputs=1, axis=-1, epsilon=epsilon, stash_type=1
    )
    norm[0].ir.dtype = x.dtype
    return op.Reshape(norm[0].with_shape(divided.shape), op.ints(0, 0, heads * size)).with_shape(x.shape)
