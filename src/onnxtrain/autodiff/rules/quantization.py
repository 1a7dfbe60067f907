"""Quantized values: the scale has a gradient, the integers have none.

The rules with ``straight_through`` replace zero gradients where one trains through rounding (quantization-aware
training).
Rounding is treated as the identity (Bengio, Léonard, Courville 2013). Quantization is treated as the division
that it rounds, within the range of the integers: outside of it the gradient is zero, as in PyTorch's fake_quantize,
and scales get the gradients of its learnable form. The gradient with respect to a quantized tensor is floating; other
operators pass it on as if they computed with floats (:func:`onnxtrain.autodiff.engine.seen_as_floating`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import count_to, size_of
from onnxtrain.autodiff.registry import Gradients, no_gradient, register_body, register_gradient, straight_through
from onnxtrain.autodiff.rules import conv, elementwise, matmul, shape
from onnxtrain.graph import Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.limits import fits


@register_gradient("DequantizeLinear", since=13)
def dequantize(node: Node, dy: Value) -> Gradients:
    """y = (x - zero_point) s: ds = sum dy (x - zero_point) over the elements that share the scale."""
    op, scale = node.op, node.input_required(1)
    attributes = node.attributes("axis", "block_size", "output_dtype")
    # With a scale of one the operator itself gives x - zero_point, for every layout of the scale.
    steps = op.DequantizeLinear(node.x, op.ones_like(scale), node.input(2), **attributes)
    steps.ir.dtype = dy.dtype
    products = op.cast(dy * steps.with_shape(node.y.shape), scale.dtype)
    return None, sum_like_scale(node, products), None


def along_input(node: Node, value: Value) -> Value:
    """A scale or zero point laid out so that it broadcasts along the node's first input."""
    op, block = node.op, int(node.attribute("block_size", 0))
    if not block and (value.rank == 0 or value.shape == (1,)):
        return value
    rank = node.rank()
    axis = int(node.attribute("axis", 1)) % rank
    if block:
        return op.Gather(value, _block_of_each(node, axis, block), axis=axis).with_shape(node.x.shape)
    return op.reshape(value, [*[1] * axis, -1, *[1] * (rank - 1 - axis)])


def _block_of_each(node: Node, axis: int, block: int) -> Value:
    """The block of every index along the axis."""
    op, shape = node.op, node.x.shape
    size = None if shape is None else shape[axis]
    if isinstance(size, int) and fits(size):
        return op.constant(np.arange(size) // block, np.int64)
    return count_to(op, size_of(node.x, axis)) / op.constant(block, np.int64)


def sum_like_scale(node: Node, products: Value) -> Value:
    """Sum over the elements that share a scale, into the shape of the scale (the node's second input)."""
    op, scale = node.op, node.input_required(1)
    if node.attribute("block_size", 0):
        return _sum_blocks(node, products)
    if scale.rank == 0 or scale.shape == (1,):
        return op.reshape_like(op.ReduceSum(products, keepdims=0), scale)
    rank = node.rank()
    axis = int(node.attribute("axis", 1)) % rank
    if scale.shape is not None and isinstance(scale.shape[0], int):
        others = op.ints(*(a for a in range(rank) if a != axis))
        return op.ReduceSum(products, others, keepdims=0, noop_with_empty_axes=1)
    # One scale or one per index of the axis: that is, as many as fit when it is broadcast along the axis.
    sizes = op.Concat(
        *(op.ints(1) for _ in range(axis)),
        op.Shape(op.reshape(scale, [-1])),
        *(op.ints(1) for _ in range(axis + 1, rank)),
        axis=0,
    )
    return op.reshape_like(op.reduce_to(products, op.reshape(scale, sizes)), scale)


def _sum_blocks(node: Node, products: Value) -> Value:
    """Sum runs of ``block_size`` elements along the axis; the last may be shorter."""
    op, scale, block = node.op, node.input_required(1), int(node.attribute("block_size"))
    rank = node.rank()
    axis = int(node.attribute("axis", 1)) % rank
    blocks = op.dimension(scale, axis)
    rest = blocks * block - op.dimension(node.x, axis)
    padded = op.Pad(products, op.Concat(op.ints(0), rest, axis=0), None, op.ints(axis))
    before = [op.dimension(node.x, a) for a in range(axis)]
    after = [op.dimension(node.x, a) for a in range(axis + 1, rank)]
    split = op.reshape(padded, op.Concat(*before, blocks, op.ints(block), *after, axis=0))
    return op.ReduceSum(split, op.ints(axis + 1), keepdims=0)


for operators, rule in (
    (("Reshape", "Flatten"), shape.reshape),
    (("Squeeze",), shape.squeeze),
    (("Unsqueeze",), shape.unsqueeze),
    (("Transpose",), shape.transpose),
):
    straight_through(*operators)(rule)


@straight_through("Ceil", "Floor", "Round", "Sign", "Identity")
def rounding(node: Node, dy: Value) -> Gradients:
    """y = round(x): dx = dy, as if y were x."""
    return dy


@straight_through("Cast", "CastLike")
def cast(node: Node, dy: Value) -> Gradients:
    """y = x in another type, perhaps an integer: dx = dy."""
    if node.x.dtype == ir.DataType.UNDEFINED or node.x.is_float:
        return elementwise.cast(node, dy)
    return None if node.x.dtype in (ir.DataType.BOOL, ir.DataType.STRING) else dy


@straight_through("DynamicQuantizeLinear")
def quantize_dynamically(node: Node, dy: Value | None, ds: Value | None, dz: Value | None) -> Gradients:
    """y = round(x / s) + z with s and z from the range of x, held constant: dx = dy / s."""
    return None if dy is None else _per_step(node.op.cast(dy, node.x.dtype), node.outputs[1])


@straight_through("MatMulInteger")
def matmul_of_integers(node: Node, dy: Value) -> Gradients:
    """y = (a - za) (b - zb): da and db as in MatMul."""
    a, b = (_shifted(node, index, dy.dtype, axis) for index, axis in ((0, -2), (1, -1)))
    da, db = matmul.matmul(node.with_values([a, b]), dy)  # type: ignore[misc]
    return [da, db, *[None] * (len(node.inputs) - 2)]


@straight_through("ConvInteger")
def convolution_of_integers(node: Node, dy: Value) -> Gradients:
    """y = (x - zx) * (w - zw): dx and dw as in Conv."""
    x, weight = (_shifted(node, index, dy.dtype, axis) for index, axis in ((0, 1), (1, 0)))
    y = node.op.cast(node.y, dy.dtype).with_shape(node.y.shape)
    dx, dw, _ = conv.convolution(node.with_values([x, weight], [y]), dy)  # type: ignore[misc]
    return [dx, dw, *[None] * (len(node.inputs) - 2)]


def _shifted(node: Node, index: int, dtype: ir.DataType, axis: int) -> Value:
    """An input minus its zero point (or one per index of an axis), as floats."""
    op, value, zero = node.op, node.input_required(index), node.input(index + 2)
    numbers = op.cast(value, dtype).with_shape(value.shape)
    known = None if zero is None else zero.constant()
    if zero is None or (known is not None and not known.any()):
        return numbers
    shift = op.cast(zero, dtype)
    if zero.rank == 1 and zero.shape != (1,):
        after = (node.rank(value) - 1 - axis) if axis >= 0 else -1 - axis
        shift = op.reshape(shift, [-1, *[1] * after])
    return (numbers - shift).with_shape(value.shape)


@straight_through("QuantizeLinear")
def quantize(node: Node, dy: Value) -> Gradients:
    """y = clip(round(x / s) + z): dx = dy / s, ds = -Σ dy x / s^2, both zero where y is clipped."""
    op, x, scale = node.op, node.x, node.input_required(1)
    if not x.is_float:
        return None, None, None
    # Half precision does not represent the range of 16-bit integers.
    dtype = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    steps = along_input(node, scale)
    quotient = op.cast(x, dtype) / op.cast(steps, dtype)
    quotient.with_shape(x.shape)
    inside = _unless_clipped(node, quotient)
    unclipped = op.Where(inside, _per_step(op.cast(dy, x.dtype), op.cast(steps, x.dtype)), op.scalar(0, x))
    dx = unclipped.with_shape(x.shape)
    products = op.cast(-(dx * op.cast(quotient, x.dtype)).with_shape(x.shape), scale.dtype)
    return dx, sum_like_scale(node, products), None


@straight_through("DequantizeLinear")
def dequantize_straight(node: Node, dy: Value) -> Gradients:
    """y = (x - z) s: dx = dy s, ds as in the ordinary rule."""
    op = node.op
    steps = op.cast(along_input(node, node.input_required(1)), dy.dtype)
    _, ds, *_ = dequantize(node, dy)  # type: ignore[misc]
    return (dy * steps).with_shape(node.x.shape), ds, None


def _per_step(dy: Value, steps: Value) -> Value:
    """dy / steps; where dy is a multiplication by the same steps, its other operand, exactly."""
    product = dy.ir.producer()
    if product is not None and product.op_type == "Mul" and product.inputs[1] is steps.ir:
        assert product.inputs[0] is not None
        return dy.op.wrap(product.inputs[0])
    return dy / steps


def _unless_clipped(node: Node, quotient: Value) -> Value:
    """True where round(x / s) + z is in the range of the output's type."""
    op, dtype = node.op, node.y.dtype
    rounded = quotient if dtype.is_floating_point() else op.Round(quotient)
    zero = node.input(2)
    known = None if zero is None else zero.constant()
    if zero is not None and (known is None or known.astype(float).any()):
        # Cast first: ONNX Runtime reshapes no elements below a byte.
        rounded = rounded + along_input(node, op.cast(zero, quotient.dtype))
    low, high = (op.scalar(float(end), quotient) for end in (dtype.min, dtype.max))
    return op.Equal(op.Clip(rounded, low, high), rounded)


# Operators on quantized tensors have bodies: dequantize, compute in floats, quantize. A gradient goes through them with
# the straight-through option; without it the nodes stay unchanged.


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
def quantized_matmul(node: Node) -> list[Value | None]:
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
