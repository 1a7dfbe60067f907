"""Dropout whose mask follows from a seed and a counter: a step that is taken again draws the same mask.

Element i is kept where h >> 1 >= ratio 2^31, for the h that :mod:`onnxtrain.ir.prng` draws for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.ir import Value
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.ir.prng import draw, upper_bits

OPERATOR = "CountedDropout"


@register_fused(OPERATOR)
def counted_dropout(node: Node) -> Sequence[Value]:
    """From x, ratio and count: y = x / (1 - ratio) where the element is kept, else 0."""
    op, x, ratio = node.op, node.x, node.input_required(1)
    h = draw(op, int(node.attribute("seed")), node.input_required(2), x)
    share = op.cast(op.reshape(ratio, []), ir.DataType.DOUBLE)
    limit = op.cast(op.Floor(share * 2147483648.0), ir.DataType.INT32)
    kept = op.reshape_like(op.GreaterOrEqual(upper_bits(op, h, 31), limit), x)
    scale = op.cast(op.Div(op.constant(1.0, np.float64), 1.0 - share), x.dtype)
    return [op.Where(kept, x * scale, op.scalar(0, x)).with_shape(x.shape)]


@register_gradient(OPERATOR, domain=ONNXTRAIN_DOMAIN)
def counted_dropout_rule(node: Node, dy: Value) -> Gradients:
    """y = x mask / (1 - ratio): dx = dy mask / (1 - ratio), with the mask drawn again instead of kept."""
    seed = int(node.attribute("seed"))
    (dx,) = emit(node.op, OPERATOR, dy, node.input_required(1), node.input_required(2), like=[node.x], seed=seed)
    return dx
