"""Dropout, and the fused dropout whose mask is a function of a seed and a counter: a repeated step has the same mask.

The fused operator keeps element i where h >> 1 >= ratio 2^31, for the number h of :mod:`onnxtrain.graph.prng`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.prng import draw, upper_bits

OPERATOR = "CountedDropout"


@register_gradient("Dropout", since=12)
def dropout(node: Node, dy: Value, dmask: None = None) -> Gradients:
    """y = x mask / (1 - ratio) in training, else x: dx = dy mask / (1 - ratio), else dy.

    The training mode may be a value of the graph. The mask is an output of the forward node, added if the model lacks
    it.
    """
    op, ratio, training = node.op, node.input(1), node.input(2)
    constant = None if training is None else training.constant()
    if training is None or (constant is not None and not constant.any()):
        return dy
    mask = op.cast(node.output_required(1, ir.DataType.BOOL, node.x.shape), dy.dtype)
    share = 0.5 if ratio is None else _number(ratio)
    if share is not None:
        scale = op.scalar(0 if share >= 1 else 1 / (1 - share), dy)
    else:
        assert ratio is not None
        scale = op.Reciprocal(1 - op.cast(ratio, dy.dtype))
    if constant is None:
        scale = op.Where(training, scale, op.scalar(1, dy))
    return dy * (mask * scale)


def _number(value: Value) -> float | None:
    constant = value.constant()
    return None if constant is None else float(constant.reshape(-1)[0])


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
    """y = x mask / (1 - ratio): dx = dy mask / (1 - ratio), with the mask recomputed."""
    seed = int(node.attribute("seed"))
    (dx,) = emit(node.op, OPERATOR, dy, node.input_required(1), node.input_required(2), like=[node.x], seed=seed)
    return dx
