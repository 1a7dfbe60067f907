"""Operators of ONNX Runtime's own domain that exporters and its optimizer write, in standard operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.registry import Gradients, register_body, register_gradient
from onnxtrain.autodiff.rules.activation import activation
from onnxtrain.errors import GradientError
from onnxtrain.graph import Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN

DOMAIN = MICROSOFT_DOMAIN


def refuse(node: Node, condition: bool, what: str) -> None:
    """Raise an error for a feature that the body of an operator does not cover, where the condition holds."""
    if condition:
        raise GradientError(
            f"{describe(node.ir)}: it has {what}, which its body in standard operators does not cover; export the "
            "model without ONNX Runtime's fusions, or register a rule for this operator."
        )


@register_body("FusedMatMul", domain=DOMAIN)
def fused_matmul(node: Node) -> list[Value | None]:
    """y = alpha A B, each transposed in its last two axes where the node says so.

    With ``transBatchA`` (``transBatchB``) the rows come first in A (B), before the batch.
    """
    a, b = (_transposed(node, node.input_required(index), side) for index, side in enumerate("AB"))
    return [(a @ b) * float(node.attribute("alpha", 1.0))]


def _transposed(node: Node, value: Value, side: str) -> Value:
    if node.attribute(f"transBatch{side}", 0):
        rank = node.rank(value)
        order = [*range(1, rank - 1), 0, rank - 1]
        if node.attribute(f"trans{side}", 0):
            order[-2:] = order[-1], order[-2]
        return node.op.Transpose(value, perm=order)
    return node.op.transpose_last(value) if node.attribute(f"trans{side}", 0) else value


@register_body("FusedGemm", domain=DOMAIN)
def fused_gemm(node: Node) -> list[Value | None]:
    """y = activation(Gemm(A, B, C))."""
    attributes = node.attributes("alpha", "beta", "transA", "transB")
    y = node.op.Gemm(node.x, node.input_required(1), node.input(2), **attributes)
    parameters = node.attributes("activation_alpha", "activation_beta").values()
    return [_activated(node, y, [number for number in parameters if number is not None])]


@register_body("FusedConv", domain=DOMAIN)
def fused_conv(node: Node) -> list[Value | None]:
    """y = activation(Conv(x, w, b) + z)."""
    attributes = node.attributes("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y, z = node.op.Conv(node.x, node.input_required(1), node.input(2), **attributes), node.input(3)
    y = (y if z is None else y + z).with_shape(node.y.shape)
    return [_activated(node, y, node.attribute("activation_params", []))]


_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
}
"""Attributes of fused activations, in the order of their parameters."""


def _activated(node: Node, x: Value, numbers: Sequence[float]) -> Value:
    """Apply the activation that a node names, with its parameters."""
    op, name = node.op, node.attribute("activation", "")
    if not name:
        return x
    if name == "Clip":
        return op.Clip(x, *(op.scalar(bound, x) for bound in numbers))
    if name not in _ACTIVATIONS:
        raise GradientError(
            f"{describe(node.ir)}: its activation is {name!r}, which its body in standard operators does not cover; "
            "export the model without ONNX Runtime's fusions, or register a rule for this operator."
        ).about(describe(node.ir), got=name)
    return activation(name, x, **dict(zip(_ACTIVATIONS[name], numbers, strict=False)))


@register_gradient("Gelu", "BiasGelu", "FastGelu", domain=DOMAIN, broadcasts=True)
def gelu_gradients(node: Node, dy: Value) -> Gradients:
    """y = gelu(x + b): dx = dy gelu'(x + b), db = the same, summed to its shape; Gelu has no b."""
    bias = node.input(1)
    x = node.x if bias is None else node.x + bias
    approximate = "tanh" if node.operator == "FastGelu" else "none"
    (dx,) = emit(node.op, "GeluGradient", dy, x, like=[dy], approximate=approximate)
    return dx if bias is None else (dx, dx)


def in_single_precision(node: ir.Node) -> bool:
    """Return whether a node computes in float32: ONNX Runtime's CPU kernels know no other type."""
    return node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT


@register_fused("Gelu", "BiasGelu", "FastGelu", domain=DOMAIN, has_kernel=in_single_precision)
def gelu(node: Node) -> list[Value | None]:
    """y = (x + b) Phi(x + b), by its approximation with tanh for FastGelu; Gelu has no b."""
    op, bias, fast = node.op, node.input(1), node.operator == "FastGelu"
    x = node.x if bias is None else node.x + bias
    if op.opset >= 20:
        return [op.Gelu(x, approximate="tanh" if fast else None)]
    if not fast:
        return [x * 0.5 * (op.Erf(x * math.sqrt(0.5)) + 1)]
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return [x * 0.5 * (op.Tanh(inner) + 1)]


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


_RMS = "SimplifiedLayerNormalization"
"""ONNX Runtime's name of RMSNormalization; it has a kernel for it in ONNX's domain."""


@register_gradient(_RMS)
def simplified_layer_normalization_rule(node: Node, dy: Value, *others: Value | None) -> Gradients:
    """y = gamma x r, r = 1 / sqrt(mean(x²) + epsilon): dx as of RMSNormalization; dr adds -dr r³ x / n."""
    op, x, gamma, axis = node.op, node.x, node.input_required(1), node.attribute("axis", -1)
    axis = axis if axis < 0 else axis - node.rank()
    settings = {"axis": axis, "epsilon": node.attribute("epsilon", 1e-5)}
    dx, dgamma = emit(op, "RMSNormalizationGradient", dy, x, gamma, like=[x, gamma], **settings)
    if others and others[0] is not None and node.arrives(1):
        r = node.outputs[1]
        dx = dx - x * (others[0] * r * r * r / op.count(x, range(node.rank() + axis, node.rank())))
    return dx, dgamma


@register_fused(_RMS, domain="")
@register_body(_RMS, domain=DOMAIN)
def simplified_layer_normalization(node: Node) -> list[Value | None]:
    """y = gamma x / sqrt(mean(x²) + epsilon) over the axes from ``axis`` on."""
    axis = node.attribute("axis", -1)
    y, deviation = _rms_normalized(node, node.x, node.input_required(1), axis, node.attribute("epsilon", 1e-5))
    return [y, deviation]


@register_body("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_simplified_layer_normalization(node: Node) -> list[Value | None]:
    """y = SimplifiedLayerNormalization(x + skip + bias) gamma; the sum is an output, too."""
    op, total, bias = node.op, node.x + node.input_required(1), node.input(3)
    total, gamma = total if bias is None else total + bias, node.input_required(2)
    epsilon = node.attribute("epsilon", 1e-12)
    if node.has_output(2):
        y, deviation = _rms_normalized(node, total, gamma, -1, epsilon)
        return [y, None, deviation, total]
    y = op.several(_RMS, total, gamma, outputs=1, axis=-1, epsilon=float(epsilon), stash_type=1)[0]
    return [y.with_shape(total.shape), None, None, total]


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
    words = node.input_required(2)
    total = op.Gather(words, ids)
    if ids.shape is not None and words.shape is not None:
        total.with_shape((*ids.shape, words.shape[-1]))
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
