"""Operators of ONNX Runtime's own domain that exporters and its optimizer write, in standard operators."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.registry import Node, describe, register_body
from onnxtrain.errors import GradientError
from onnxtrain.graph import Value

DOMAIN = "com.microsoft"


@register_body("FusedMatMul", domain=DOMAIN)
def fused_matmul(node: Node) -> list[Value | None]:
    """y = alpha A B, each transposed in its last two axes where the node says so."""
    a, b = node.x, node.input_required(1)
    for name in ("transBatchA", "transBatchB"):
        _require(node, not node.attribute(name, 0), f"{name}=1 is not covered; leave the batch axes as they are")
    a = node.op.transpose_last(a) if node.attribute("transA", 0) else a
    b = node.op.transpose_last(b) if node.attribute("transB", 0) else b
    return [(a @ b) * float(node.attribute("alpha", 1.0))]


@register_body("Gelu", domain=DOMAIN)
def gelu(node: Node) -> list[Value | None]:
    """y = x Phi(x)."""
    return [_gelu(node.x)]


@register_body("BiasGelu", domain=DOMAIN)
def bias_gelu(node: Node) -> list[Value | None]:
    """y = gelu(x + b)."""
    return [_gelu(node.x + node.input_required(1))]


@register_body("FastGelu", domain=DOMAIN)
def fast_gelu(node: Node) -> list[Value | None]:
    """y = gelu(x + b) by its approximation with tanh."""
    op, x, bias = node.op, node.x, node.input(1)
    x = x if bias is None else x + bias
    if op.opset >= 20:
        return [op.Gelu(x, approximate="tanh")]
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return [x * 0.5 * (op.Tanh(inner) + 1)]


def _gelu(x: Value) -> Value:
    op = x.op
    if op.opset >= 20:
        return op.Gelu(x)
    return x * 0.5 * (op.Erf(x * math.sqrt(0.5)) + 1)


@register_body("QuickGelu", domain=DOMAIN)
def quick_gelu(node: Node) -> list[Value | None]:
    """y = x sigmoid(alpha x)."""
    return [node.x * node.op.Sigmoid(node.x * float(node.attribute("alpha", 1.702)))]


@register_body("SkipLayerNormalization", domain=DOMAIN)
def skip_layer_normalization(node: Node) -> list[Value | None]:
    """y = LayerNormalization(x + skip + bias) gamma + beta; the sum is an output, too."""
    op, bias = node.op, node.input(4)
    total = node.x + node.input_required(1)
    total = total if bias is None else total + bias
    epsilon = node.attribute("epsilon", 1e-12)
    normal = op.several(
        "LayerNormalization",
        total,
        node.input_required(2),
        node.input(3),
        outputs=3,
        axis=-1,
        epsilon=epsilon,
    )
    return [normal[0].with_shape(total.shape), normal[1], normal[2], total]


@register_body("SimplifiedLayerNormalization", domain="")
@register_body("SimplifiedLayerNormalization", domain=DOMAIN)
def simplified_layer_normalization(node: Node) -> list[Value | None]:
    """y = gamma x / sqrt(mean(x²) + epsilon) over the axes from one on."""
    axis = node.attribute("axis", -1)
    y, deviation = _rms_normalized(node, node.x, node.input_required(1), axis, node.attribute("epsilon", 1e-5))
    return [y, deviation]


@register_body("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_simplified_layer_normalization(node: Node) -> list[Value | None]:
    """y = SimplifiedLayerNormalization(x + skip + bias) gamma; the sum is an output, too."""
    total, bias = node.x + node.input_required(1), node.input(3)
    total = total if bias is None else total + bias
    y, deviation = _rms_normalized(node, total, node.input_required(2), -1, node.attribute("epsilon", 1e-12))
    return [y, None, deviation, total]


def _rms_normalized(node: Node, x: Value, gamma: Value, axis: int, epsilon: float) -> tuple[Value, Value]:
    op = node.op
    axes = [axis] if axis == -1 else list(range(axis % node.rank(x), node.rank(x)))
    square = op.ReduceMean(x * x, op.ints(*axes), keepdims=1)
    deviation = op.Reciprocal(op.Sqrt(square + float(epsilon)))
    return x * deviation * gamma, deviation


@register_body("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalization(node: Node) -> list[Value | None]:
    """y = LayerNormalization(word[ids] + position + segment[segments]) gamma + beta; the sum is an output, too."""
    op, ids = node.op, node.x
    segments, mask, positions = node.input(1), node.input(7), node.input(8)
    total = op.Gather(node.input_required(2), ids)
    if positions is None:
        length = op.dimension(ids, 1)
        rows = op.Slice(node.input_required(3), op.ints(0), length, op.ints(0))
        total = total + rows
    else:
        total = total + op.Gather(node.input_required(3), positions)
    if segments is not None:
        total = total + op.Gather(node.input_required(4), segments)
    epsilon = node.attribute("epsilon", 1e-12)
    y = op.LayerNormalization(total, node.input_required(5), node.input_required(6), axis=-1, epsilon=epsilon)
    int32 = ir.DataType.INT32
    if mask is None:
        lengths = op.Mul(op.cast(op.ReduceMax(ids, op.ints(1), keepdims=0), int32), op.constant(0, np.int32))
    else:
        lengths = op.ReduceSum(op.cast(mask, int32), op.ints(1), keepdims=0)
    return [y, lengths, total]


def _require(node: Node, holds: bool, otherwise: str) -> None:
    if not holds:
        raise GradientError(f"{describe(node.ir)}: {otherwise}, or register a rule for this operator.")
