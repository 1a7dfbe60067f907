"""Rules that stand in for zero gradients where one trains through rounding (quantization-aware training).

Rounding is taken for the identity (Bengio, Léonard, Courville 2013). Quantization is taken for the division that
it rounds, up to the ends of the integers' range: beyond them the gradient is zero, as in PyTorch's fake_quantize,
and scales get the gradients of its learnable form. The gradient with respect to a quantized tensor is floating; it
passes through operators that only move elements.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, Node, straight_through
from onnxtrain.autodiff.rules import quantization, shape
from onnxtrain.graph import Value

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


@straight_through("QuantizeLinear")
def quantize(node: Node, dy: Value) -> Gradients:
    """y = clip(round(x / s) + z): dx = dy / s, ds = -Σ dy x / s^2, both zero where y is clipped."""
    op, x, scale = node.op, node.x, node.input_required(1)
    if not x.is_float:
        return None, None, None
    # Half precision holds neither the ends of 16-bit integers nor, exactly, what lies near them.
    dtype = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    steps = quantization.along_input(node, scale)
    quotient = op.cast(x, dtype) / op.cast(steps, dtype)
    quotient.with_shape(x.shape)
    inside = _unless_clipped(node, quotient)
    unclipped = op.Where(inside, _per_step(op.cast(dy, x.dtype), op.cast(steps, x.dtype)), op.scalar(0, x))
    dx = unclipped.with_shape(x.shape)
    products = op.cast(-(dx * op.cast(quotient, x.dtype)).with_shape(x.shape), scale.dtype)
    return dx, quantization.sum_like_scale(node, products), None


@straight_through("DequantizeLinear")
def dequantize(node: Node, dy: Value) -> Gradients:
    """y = (x - z) s: dx = dy s, ds as it is without passing through."""
    op = node.op
    steps = op.cast(quantization.along_input(node, node.input_required(1)), dy.dtype)
    _, ds, *_ = quantization.dequantize(node, dy)  # type: ignore[misc]
    return (dy * steps).with_shape(node.x.shape), ds, None


def _per_step(dy: Value, steps: Value) -> Value:
    """dy / steps; where dy is a product with the same steps, the other factor, exactly."""
    product = dy.ir.producer()
    if product is not None and product.op_type == "Mul" and product.inputs[1] is steps.ir:
        assert product.inputs[0] is not None
        return dy.op.wrap(product.inputs[0])
    return dy / steps


def _unless_clipped(node: Node, quotient: Value) -> Value:
    """Where round(x / s) + z lies in the range of the output's type."""
    op, dtype = node.op, node.y.dtype
    rounded = quotient if dtype.is_floating_point() else op.Round(quotient)
    zero = node.input(2)
    known = None if zero is None else zero.constant()
    if zero is not None and (known is None or known.astype(float).any()):
        rounded = rounded + op.cast(quantization.along_input(node, zero), quotient.dtype)
    low, high = (op.scalar(float(end), quotient) for end in (dtype.min, dtype.max))
    return op.Equal(op.Clip(rounded, low, high), rounded)
