"""Compute linear layers, convolutions and attention in bfloat16 instructions, where the training asks for it."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.rules.fused_attention import ATTENTION, ATTENTION_GRADIENT
from onnxtrain.autodiff.rules.matmul_nbits import GRADIENT, PRODUCT
from onnxtrain.ir.clone import all_nodes
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.ir.value import dimensions

LEAST = 64
"""Least rows and columns of a weight that are worth the rounding: narrower ones, as in adapters, stay exact."""

CONVOLUTIONS = ("Conv", "ConvInputGradient", "ConvWeightGradient")

FEW_ROWS = 16
"""Least channels of the result of a convolution, or of its gradient by x, in bfloat16: half of a tile's rows."""

LEAST_OUTPUTS = 32
"""Least outputs of a convolution whose weight gradient is in bfloat16: each patch is arranged for all of them."""

SHORT_ROWS = 16
"""Rows of an image that are shorter than this take longer to arrange, and need twice as many outputs."""


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
        return is_float and _gains(node)
    if node.op_type in (PRODUCT, GRADIENT):
        sizes: list[object] = [node.attributes[name].as_int() for name in ("K", "N")]
    elif node.op_type in ("Linear", "LinearGradient"):
        sizes = list(_sizes(node.inputs[1]))
    elif node.op_type == "LinearWeightGradient":
        sizes = [size for value in node.inputs[:2] for size in _sizes(value)[-1:]]
    else:
        return False
    return is_float and len(sizes) == 2 and all(isinstance(size, int) and size >= LEAST for size in sizes)


def _gains(node: ir.Node) -> bool:
    """Return whether a convolution is faster in bfloat16: of one group, with long sums and enough rows of a matmul.

    ``benchmarks/convolutions.py`` measures layers of ResNets. CPU time over that of float32 on an Intel Xeon with AMX:

        layer                                       y     dx    dw
        8 x 64 x 56 x 56, 3 x 3, 64                TABLE
    """
    kernel, group = node.attributes["kernel_shape"].as_ints(), node.attributes["group"].as_int()
    if group != 1:
        return False
    if node.op_type == "ConvWeightGradient":
        (_, outputs, *_, width), (_, inputs, *_) = (_sizes(value) or (None,) * 3 for value in node.inputs[:2])
        is_short = isinstance(width, int) and width < SHORT_ROWS
        rows, least = outputs, LEAST_OUTPUTS * (2 if is_short else 1)
        terms = LEAST
    else:
        outputs, inputs = _sizes(node.inputs[1])[:2] or (None, None)
        forward = node.op_type == "Conv"
        rows, least = (outputs if forward else inputs), FEW_ROWS
        channels = inputs if forward else outputs
        terms = channels * math.prod(kernel) if isinstance(channels, int) else 0
    return isinstance(rows, int) and rows >= least and terms >= LEAST


def _sizes(value: ir.Value | None) -> tuple[object, ...]:
    return () if value is None else dimensions(value) or ()
