"""Bodies of operators on quantized tensors: dequantize, compute in floats, quantize.

A gradient goes through them with the straight-through option; without it the nodes stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import no_gradient, register_body, straight_through
from onnxtrain.autodiff.rules.quantization import dequantize_straight, quantize
from onnxtrain.graph import Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN

no_gradient(
    "QuantizeLinear",
    domain=MICROSOFT_DOMAIN,
    reason="the output is constant between steps: the derivative is zero wherever it exists",
)
# These keep their nodes: they take types that ONNX's own have at newer opsets only.
straight_through("QuantizeLinear", domain=MICROSOFT_DOMAIN)(quantize)
straight_through("DequantizeLinear", domain=MICROSOFT_DOMAIN)(dequantize_straight)


def _dequantized(node: Node, index: int, axis: int = 0) -> Value:
    """Dequantize the input at an index, which scale and zero point follow: one, or one per index of an axis."""
    value, scale = node.input_required(index), node.input_required(index + 1)
    many = scale.rank == 1 and scale.shape != (1,)
    number = axis if axis >= 0 or not many else axis + node.rank(value)
    made = node.op.DequantizeLinear(value, scale, node.input(index + 2), axis=number if many else None)
    return made.with_shape(value.shape)


def _quantized(node: Node, y: Value, index: int) -> Value:
    """Quantize with the scale at an index and the zero point after it; without one, to the type of the first input."""
    scale, zero = node.input_required(index), node.input(index + 1)
    if zero is None:
        zero = node.op.constant(0, node.x.dtype)
    result = node.op.QuantizeLinear(y, scale, zero)
    result.ir.dtype = zero.dtype
    return result.with_shape(y.shape)


@register_body("QuantizeLinear", domain=MICROSOFT_DOMAIN)
def quantized(node: Node) -> list[Value | None]:
    """y = clip(round(x / s) + z)."""
    op, zero = node.op, node.input(2)
    y = op.QuantizeLinear(node.x, node.input_required(1), zero, axis=node.attribute("axis"))
    y.ir.dtype = ir.DataType.UINT8 if zero is None else zero.dtype
    return [y.with_shape(node.x.shape)]


@register_body("DequantizeLinear", domain=MICROSOFT_DOMAIN)
def dequantized(node: Node) -> list[Value | None]:
    """y = (x - z) s."""
    y = node.op.DequantizeLinear(node.x, node.input_required(1), node.input(2), axis=node.attribute("axis"))
    return [y.with_shape(node.x.shape)]


@register_body("QLinearMatMul", domain="")
def matmul(node: Node) -> list[Value | None]:
    """y = a b, quantized: rows of a and columns of b may have scales of their own."""
    a, b = _dequantized(node, 0, -2), _dequantized(node, 3, -1)
    return [_quantized(node, a @ b, 6)]


_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


@register_body("QLinearConv", domain="")
def convolution(node: Node) -> list[Value | None]:
    """y = x * w + b, quantized: filters may have scales of their own; b is in units of both scales' product."""
    op, bias = node.op, node.input(8)
    scale, of_weight = node.input_required(1), node.input_required(4)
    if bias is not None:
        bias = op.cast(bias, scale.dtype).with_shape(bias.shape) * (scale * of_weight)
    y = op.Conv(_dequantized(node, 0), _dequantized(node, 3, 0), bias, **node.attributes(*_CONV))
    return [_quantized(node, y.with_shape(node.y.shape), 6)]


def _register_binary(operator: str, function: Callable[[Value, Value], Value]) -> None:
    @register_body(operator, domain=MICROSOFT_DOMAIN)
    def body(node: Node) -> list[Value | None]:
        return [_quantized(node, function(_dequantized(node, 0), _dequantized(node, 3)), 6)]


_register_binary("QLinearAdd", lambda a, b: a + b)
_register_binary("QLinearMul", lambda a, b: a * b)


def _register_unary(operator: str, function: Callable[[Node, Value], Value]) -> None:
    @register_body(operator, domain=MICROSOFT_DOMAIN)
    def body(node: Node) -> list[Value | None]:
        return [_quantized(node, function(node, _dequantized(node, 0)).with_shape(node.y.shape), 3)]


_register_unary("QLinearSigmoid", lambda node, x: node.op.Sigmoid(x))
_register_unary("QLinearLeakyRelu", lambda node, x: node.op.LeakyRelu(x, alpha=node.attribute("alpha", 0.01)))
_register_unary("QLinearSoftmax", lambda node, x: node.op.Softmax(x, axis=node.attribute("axis", -1)))


def _channels(node: Node, x: Value, function: Callable[[Value], Value]) -> Value:
    """Apply a function of images with channels first to images that may have them last."""
    if not node.attribute("channels_last", 0):
        return function(x)
    rank = node.rank(x)
    first = function(node.op.Transpose(x, perm=[0, rank - 1, *range(1, rank - 1)]))
    return node.op.Transpose(first, perm=[0, *range(2, rank), 1])


_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_register_unary(
    "QLinearAveragePool",
    lambda node, x: _channels(node, x, lambda image: node.op.AveragePool(image, **node.attributes(*_POOL))),
)
_register_unary("QLinearGlobalAveragePool", lambda node, x: _channels(node, x, node.op.GlobalAveragePool))


@register_body("QLinearConcat", domain=MICROSOFT_DOMAIN)
def concatenation(node: Node) -> list[Value | None]:
    """y = the inputs side by side, quantized again; output scale and zero point come first."""
    parts = [_dequantized(node, index) for index in range(2, len(node.inputs), 3)]
    y = node.op.Concat(*parts, axis=node.attribute("axis"))
    return [_quantized(node, y, 0)]


@register_body("QLinearWhere", domain=MICROSOFT_DOMAIN)
def choice(node: Node) -> list[Value | None]:
    """y = x where a condition holds, else y, quantized again."""
    chosen = node.op.Where(node.x, _dequantized(node, 1), _dequantized(node, 4))
    return [_quantized(node, chosen, 7)]


@register_body("QGemm", domain=MICROSOFT_DOMAIN)
def gemm(node: Node) -> list[Value | None]:
    """y = alpha a b + c, quantized where there is a scale; c is in units of the product of scales."""
    op, bias = node.op, node.input(6)
    b = _dequantized(node, 3, 0 if node.attribute("transB", 0) else 1)
    alpha = float(node.attribute("alpha", 1.0))
    if bias is not None:
        scales = node.input_required(1) * node.input_required(4)
        bias = op.cast(bias, scales.dtype).with_shape(bias.shape) * (scales * alpha)
    y = op.Gemm(_dequantized(node, 0), b, bias, alpha=alpha, **node.attributes("transA", "transB"))
    return [y if node.input(7) is None else _quantized(node, y.with_shape(node.y.shape), 7)]


@register_body("MatMulIntegerToFloat", domain=MICROSOFT_DOMAIN)
def matmul_to_float(node: Node) -> list[Value | None]:
    """y = (a - za) (b - zb) sa sb + bias."""
    scales = node.input_required(2) * node.input_required(3)
    return [_scaled(node, node.x, node.input(4), node.input_required(1), node.input(5), scales, node.input(6))]


@register_body("DynamicQuantizeMatMul", domain=MICROSOFT_DOMAIN)
def dynamic_matmul(node: Node) -> list[Value | None]:
    """y = (a - za) (b - zb) sa sb + bias, with a quantized by its own range."""
    a, scale, zero = _quantized_dynamically(node)
    scales = scale * node.input_required(2)
    return [_scaled(node, a, zero, node.input_required(1), node.input(3), scales, node.input(4))]


def _quantized_dynamically(node: Node) -> tuple[Value, Value, Value]:
    y, scale, zero = node.op.several("DynamicQuantizeLinear", node.x, outputs=3)
    y.ir.dtype = zero.ir.dtype = ir.DataType.UINT8
    scale.ir.dtype = node.x.dtype
    return y.with_shape(node.x.shape), scale.with_shape(()), zero.with_shape(())


def _scaled(
    node: Node, a: Value, zero_a: Value | None, b: Value, zero_b: Value | None, scales: Value, bias: Value | None
) -> Value:
    product = node.op.MatMulInteger(a, b, zero_a, zero_b)
    product.ir.dtype = ir.DataType.INT32
    y = node.op.cast(product.with_shape(node.y.shape), scales.dtype) * scales
    return (y if bias is None else y + bias).with_shape(node.y.shape)
