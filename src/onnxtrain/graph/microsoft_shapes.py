"""Types and shapes of Microsoft's operators in language models, which ONNX's inference does not know."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.inference import infer_outputs, integer
from onnxtrain.graph.value import Dimension, dimensions

_LIKE_INPUT = {
    "BiasGelu": (0,),
    "FastGelu": (0,),
    "QuickGelu": (0,),
    "RotaryEmbedding": (0,),
    "SimplifiedLayerNormalization": (0,),
    "SkipLayerNormalization": (0, 3),
    "SkipSimplifiedLayerNormalization": (0, 3),
}
"""The outputs that have type and shape of the first input."""

_OWN = frozenset({*_LIKE_INPUT, "GroupQueryAttention", "MatMulNBits"})


def infer_microsoft_types(node: ir.Node) -> bool:
    """Give a type to outputs without one, in the order of the graph, also behind such nodes in standard operators."""
    source = node.inputs[0] if node.inputs else None
    if source is None or source.type is None or not node.outputs or node.outputs[0].type is not None:
        return False
    if node.op_type in _OWN and node.domain in ("", MICROSOFT_DOMAIN):
        last = {"MatMulNBits": _width_of_product, "GroupQueryAttention": _width_of_attention}.get(node.op_type)
        shape = dimensions(source)
        if shape is not None and last is not None:
            shape = (*shape[:-1], last(node, shape))
        for index in _LIKE_INPUT.get(node.op_type, (0,)):
            if index < len(node.outputs) and node.outputs[index].type is None:
                node.outputs[index].type = source.type
                node.outputs[index].shape = None if shape is None else ir.Shape(shape)
    elif not node.domain:
        infer_outputs(node)
    return node.outputs[0].type is not None


def _width_of_product(node: ir.Node, shape: tuple[Dimension, ...]) -> Dimension:
    return integer(node, "N", 0) or None


def _width_of_attention(node: ir.Node, shape: tuple[Dimension, ...]) -> Dimension:
    """The width of the queries, which may hold keys and values, too."""
    width = shape[-1]
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return width
    heads, groups = integer(node, "num_heads", 0), integer(node, "kv_num_heads", 0)
    return heads * width // (heads + 2 * groups) if isinstance(width, int) and heads else None
