"""Compute linear layers, convolutions and attention with the CPU's bfloat16 instructions, where the training asks for it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.rules.fused_attention import ATTENTION, ATTENTION_GRADIENT
from onnxtrain.autodiff.rules.matmul_nbits import GRADIENT, PRODUCT
from onnxtrain.ir.clone import all_nodes
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.ir.value import dimensions

LEAST = 64
"""Least rows and columns of a weight that are worth the rounding: narrower ones, as in adapters, stay exact."""


def multiply_in_bfloat16(model: ir.Model, *, wanted: bool) -> None:
    """Let matmuls round their operands to bfloat16 and accumulate in float, forward and backward, in place.

    ``Linear``, ``LinearGradient``, ``LinearWeightGradient``, ``MatMulNBits``, ``MatMulNBitsGradient``, ``Conv``,
    ``ConvInputGradient``, ``ConvWeightGradient``, ``Attention`` and ``AttentionGradient`` of the domain ``onnxtrain``
    get the attribute ``compute``. Linear layers whose weights have fewer than 64 rows or columns, convolutions of
    several groups or few channels, and weights of unknown sizes stay in float32, and float64 nodes stay in float64.
    Everything else (softmax, norms, losses, updates) is never rounded.

    Requires: types, and the shapes of weights. Ensures: a sorted graph.

    Args:
        model: The model.
        wanted: True if the configuration enables it.
    """
    if not wanted:
        return
    for node in all_nodes(model.graph):
        if node.domain == ONNXTRAIN_DOMAIN and _is_worth_it(node):
            node.attributes["compute"] = ir.AttrString("compute", "bfloat16")


def _is_worth_it(node: ir.Node) -> bool:
    """Return whether a node in float is attention, or a layer whose weight is large enough."""
    x = node.inputs[0]
    is_float = x is not None and x.dtype == ir.DataType.FLOAT
    if node.op_type in (ATTENTION, ATTENTION_GRADIENT):
        return is_float
    if node.op_type in CONVOLUTIONS:
        return is_float and _is_large_enough(node)
    if node.op_type in (PRODUCT, GRADIENT):
        sizes: list[object] = [node.attributes[name].as_int() for name in ("K", "N")]
    elif node.op_type in ("Linear", "LinearGradient"):
        sizes = list(_sizes(node.inputs[1]))
    elif node.op_type == "LinearWeightGradient":
        sizes = [size for value in node.inputs[:2] for size in _sizes(value)[-1:]]
    else:
        return False
    return is_float and len(sizes) == 2 and all(isinstance(size, int) and size >= LEAST for size in sizes)


def _sizes(value: ir.Value | None) -> tuple[object, ...]:
    return () if value is None else dimensions(value) or ()
