"""Compute linear layers, convolutions and attention in bfloat16 instructions, where the training asks for it."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.rules.fused_attention import ATTENTION, ATTENTION_GRADIENT, PACKED, PACKED_GRADIENT
from onnxtrain.autodiff.rules.matmul_nbits import GRADIENT, PRODUCT
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.value import dimensions

LEAST = 64
"""Least rows and columns of a weight that are worth the rounding: narrower ones, as in adapters, stay exact. Also the
least terms of the sums of a convolution."""

CONVOLUTIONS = ("Conv", "ConvInputGradient", "ConvWeightGradient")

LEAST_ROWS = 16
"""Least channels of the result of a convolution, or of its gradient by x, in bfloat16: a tile's rows."""

LEAST_OUTPUTS = 32
"""Least outputs of a convolution whose weight gradient is in bfloat16: a patch is arranged once for all of them."""

LONG_ROW = 28
"""Positions of a row of an image; shorter rows take longer to arrange: weight gradients need twice the outputs."""

TINY_ROW = 7
"""Positions of a row, below which convolutions of one kernel element, which read each element once, stay exact."""


def multiply_in_bfloat16(model: ir.Model, *, wanted: bool) -> None:
    """Let matmuls round their operands to bfloat16 and accumulate in float, forward and backward, in place.

    ``Linear``, ``LinearGradient``, ``LinearWeightGradient``, ``MatMulNBits``, ``MatMulNBitsGradient``, ``Conv``,
    ``ConvInputGradient``, ``ConvWeightGradient``, ``Attention``, ``PackedAttention`` and their gradients of the domain
    ``onnxtrain`` get the attribute ``compute``. Linear layers whose weights have fewer than 64 rows or columns,
    convolutions of several groups or few channels, and weights of unknown sizes stay in float32, and float64 nodes stay
    in float64. Everything else (softmax, norms, losses, updates) is never rounded.

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
    if node.op_type in (ATTENTION, ATTENTION_GRADIENT, PACKED, PACKED_GRADIENT):
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
    """Return whether a convolution is faster in bfloat16: of one group, with long sums, and many rows of a matmul.

    CPU time over that of float32, Intel Xeon with AMX, one thread (``benchmarks/convolutions.py`` has more layers):

        layer                               y     dx     dw
        8 x 64 x 56 x 56, 3 x 3, 64       0.29   0.41   0.46
        8 x 512 x 7 x 7, 3 x 3, 512       0.30   0.43   0.28
        8 x 64 x 56 x 56, 1 x 1, 256      0.61   0.73   0.69
        8 x 24 x 28 x 28, 3 x 3, 24       0.58   0.55   0.68, in float32
        32 x 64 x 7 x 7, 3 x 3, 64        0.57   0.49   0.65
        32 x 32 x 7 x 7, 3 x 3, 32        0.60   0.59   0.96, in float32
        8 x 24 x 56 x 56, 1 x 1, 144      1.10   0.89   0.76; y in float32
        8 x 96 x 28 x 28, 1 x 1, 24       0.81   1.19   0.85; dx and dw in float32
        32 x 64 x 4 x 4, 1 x 1, 64        1.17   1.26   1.32, all in float32
    """
    kernel, group = node.attributes["kernel_shape"].as_ints(), node.attributes["group"].as_int()
    of_weight = node.op_type == "ConvWeightGradient"
    images = [_sizes(value) for value in node.inputs[: 2 if of_weight else 1]]
    widths = [sizes[-1] for sizes in images if sizes and isinstance(sizes[-1], int)]
    if group != 1 or (math.prod(kernel) == 1 and min(widths, default=TINY_ROW) < TINY_ROW):
        return False
    if of_weight:
        outputs = images[0][1] if images[0] else None
        least = LEAST_OUTPUTS if min(widths, default=LONG_ROW) >= LONG_ROW else 2 * LEAST_OUTPUTS
        return isinstance(outputs, int) and outputs >= least
    rows, channels = (_sizes(node.inputs[1]) or (None, None))[:2]
    if node.op_type == "ConvInputGradient":
        rows, channels = channels, rows
    if not isinstance(rows, int) or not isinstance(channels, int):
        return False
    return rows >= LEAST_ROWS and channels * math.prod(kernel) >= LEAST


def _sizes(value: ir.Value | None) -> tuple[object, ...]:
    return () if value is None else dimensions(value) or ()
