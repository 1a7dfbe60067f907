"""Element-wise functions of one tensor: powers, exponentials, trigonometry, casts, Clip; and chains of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value
from onnxtrain.graph.value import behind, constant_number, constant_tensor


@register_gradient("Identity")
def identity(node: Node, dy: Value) -> Gradients:
    """y = x: dx = dy."""
    return dy


@register_gradient("Cast", "CastLike")
def cast(node: Node, dy: Value) -> Gradients:
    """y = x in another element type: dx = dy in the type of x."""
    if node.x.dtype == ir.DataType.UNDEFINED:
        return node.op.CastLike(dy, node.x)
    return node.op.cast(dy, node.x.dtype)


@register_gradient("Neg")
def negative(node: Node, dy: Value) -> Gradients:
    """y = -x: dx = -dy."""
    return -dy


@register_gradient("Abs")
def absolute(node: Node, dy: Value) -> Gradients:
    """y = |x|: dx = dy sign(x); 0 at 0, as in PyTorch."""
    return dy * node.op.Sign(node.x)


@register_gradient("Reciprocal")
def reciprocal(node: Node, dy: Value) -> Gradients:
    """y = 1 / x: dx = -dy y^2."""
    return -(dy * node.y * node.y)


@register_gradient("Sqrt")
def square_root(node: Node, dy: Value) -> Gradients:
    """y = sqrt(x): dx = dy / (2 y); 0 at 0 where x is a sum of squares, as in PyTorch's norms and deviations."""
    return root_gradient(node, dy * 0.5 / node.y)


def root_gradient(node: Node, dx: Value) -> Value:
    """The gradient dx of a root; 0 at 0 where it is the root of a sum of squares.

    The root has an infinite gradient at 0, and the squares multiply it by 0, which gives NaN. PyTorch's ``std`` and
    ``cdist``, of which exporters write such sums, have the gradient 0 there, as ReduceL2 does here.
    """
    if not _is_sum_of_squares(node.x.ir):
        return dx
    zero = node.op.scalar(0, dx)
    return node.op.Where(node.op.Equal(node.y, node.op.scalar(0, node.y)), zero, dx)


_SAME: Final = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand"})

_STEPS: Final = 16
"""Nodes that are searched for what a factor depends on."""


def _is_sum_of_squares(value: ir.Value | None) -> bool:
    """Return whether a value is a sum or a mean of squares, or of other powers above one, perhaps scaled."""
    node = _producer(value)
    if node is None or node.op_type in ("ReduceSumSquare", "ReduceSum", "ReduceMean"):
        return node is not None and (node.op_type == "ReduceSumSquare" or _is_square(node.inputs[0]))
    if node.op_type == "Div":
        return _is_sum_of_squares(node.inputs[0])
    if node.op_type != "Mul":
        return False
    one, other = node.inputs
    return (_is_sum_of_squares(one) and _is_fixed(other)) or (_is_sum_of_squares(other) and _is_fixed(one))


def _is_fixed(value: ir.Value | None) -> bool:
    """Return whether a value depends on constants and sizes alone, such as the number of examples minus one."""
    waiting = [value]
    for _ in range(_STEPS):
        if not waiting:
            return True
        value = waiting.pop()
        if value is None or constant_tensor(value) is not None:
            continue
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type not in ("Shape", "Size"):
            waiting += node.inputs[:1] if node.op_type == "CastLike" else node.inputs
    return False


def _is_square(value: ir.Value | None) -> bool:
    node = _producer(value)
    if node is None:
        return False
    if node.op_type == "Mul":
        return node.inputs[0] is node.inputs[1]
    exponent = constant_number(node.inputs[1]) if node.op_type == "Pow" else None
    return exponent is not None and exponent > 1


def _producer(value: ir.Value | None) -> ir.Node | None:
    """Return the node of ONNX that computes the elements of a value."""
    source = behind(value, _SAME)
    node = None if source is None else source.producer()
    return None if node is None or node.domain else node


@register_gradient("Exp")
def exponential(node: Node, dy: Value) -> Gradients:
    """y = exp(x): dx = dy y."""
    return dy * node.y


@register_gradient("Log")
def logarithm(node: Node, dy: Value) -> Gradients:
    """y = log(x): dx = dy / x."""
    return dy / node.x


@register_gradient("Erf")
def error_function(node: Node, dy: Value) -> Gradients:
    """y = erf(x): dx = dy 2 / sqrt(pi) exp(-x^2)."""
    # With the constant in the exponent it is one node fewer.
    return dy * node.op.Exp(math.log(2 / math.sqrt(math.pi)) - node.x * node.x)


@register_gradient("Sin")
def sine(node: Node, dy: Value) -> Gradients:
    """y = sin(x): dx = dy cos(x)."""
    return dy * node.op.Cos(node.x)


@register_gradient("Cos")
def cosine(node: Node, dy: Value) -> Gradients:
    """y = cos(x): dx = -dy sin(x)."""
    return -(dy * node.op.Sin(node.x))


@register_gradient("Tan")
def tangent(node: Node, dy: Value) -> Gradients:
    """y = tan(x): dx = dy (1 + y^2)."""
    return dy * (node.y * node.y + 1)


@register_gradient("Asin")
def arcsine(node: Node, dy: Value) -> Gradients:
    """y = asin(x): dx = dy / sqrt(1 - x^2)."""
    return dy / node.op.Sqrt(1 - node.x * node.x)


@register_gradient("Acos")
def arccosine(node: Node, dy: Value) -> Gradients:
    """y = acos(x): dx = -dy / sqrt(1 - x^2)."""
    return -(dy / node.op.Sqrt(1 - node.x * node.x))


@register_gradient("Atan")
def arctangent(node: Node, dy: Value) -> Gradients:
    """y = atan(x): dx = dy / (1 + x^2)."""
    return dy / (node.x * node.x + 1)


@register_gradient("Sinh")
def hyperbolic_sine(node: Node, dy: Value) -> Gradients:
    """y = sinh(x): dx = dy cosh(x)."""
    return dy * node.op.Cosh(node.x)


@register_gradient("Cosh")
def hyperbolic_cosine(node: Node, dy: Value) -> Gradients:
    """y = cosh(x): dx = dy sinh(x)."""
    return dy * node.op.Sinh(node.x)


@register_gradient("Tanh")
def hyperbolic_tangent(node: Node, dy: Value) -> Gradients:
    """y = tanh(x): dx = dy (1 - y^2)."""
    return dy * (1 - node.y * node.y)


@register_gradient("Asinh")
def inverse_hyperbolic_sine(node: Node, dy: Value) -> Gradients:
    """y = asinh(x): dx = dy / sqrt(x^2 + 1)."""
    return dy / node.op.Sqrt(node.x * node.x + 1)


@register_gradient("Acosh")
def inverse_hyperbolic_cosine(node: Node, dy: Value) -> Gradients:
    """y = acosh(x): dx = dy / sqrt(x^2 - 1)."""
    return dy / node.op.Sqrt(node.x * node.x - 1)


@register_gradient("Atanh")
def inverse_hyperbolic_tangent(node: Node, dy: Value) -> Gradients:
    """y = atanh(x): dx = dy / (1 - x^2)."""
    return dy / (1 - node.x * node.x)


@register_gradient("Clip", since=11)
def clip(node: Node, dy: Value) -> Gradients:
    """y = min(max(x, l), h): dx = dy where l <= x <= h, dl = sum dy where x < l, dh = sum dy where x > h.

    As in PyTorch's ``clamp``, the gradient passes at the bounds, and where l > h all of it belongs to h.
    """
    op, x = node.op, node.x
    low, high = node.input(1), node.input(2)
    if low is None and high is None:
        return dy
    zero = op.scalar(0, dy)
    # A bound in front of another is not left out (workarounds: optional inputs of custom operators).
    bounds = (op.scalar(-math.inf, x) if low is None else low, high)
    (dx,) = emit(op, "ClipGradient", dy, x, *bounds, like=[x])
    d_low = d_high = None
    if low is not None:
        below = op.Less(x, low)
        if high is not None:
            below = op.And(below, op.LessOrEqual(low, high))
        d_low = _total(op.Where(below, dy, zero), low)
    if high is not None:
        above = op.Greater(x, high)
        if low is not None:
            above = op.Or(above, op.Greater(low, high))
        d_high = _total(op.Where(above, dy, zero), high)
    return dx, d_low, d_high


@register_fused("ClipGradient")
def clip_gradient(node: Node) -> Sequence[Value]:
    """From dy, x and optional bounds: dx = dy where l <= x <= h, else 0; and y = clip(x)."""
    op, dy, x = node.op, node.x, node.input_required(1)
    # The pass that merges nodes finds the forward Clip; x = y where x is within the bounds. Where instead of Mul, since
    # dy is infinite in sqrt(clip(x, 0)) where x < 0, and the gradient there is zero.
    y = op.Clip(x, node.input(2), node.input(3))
    return [op.Where(op.Equal(x, y), dy, op.scalar(0, dy)), y]


def _total(value: Value, bound: Value) -> Value:
    """The sum of all elements in the shape of a bound, which has one element."""
    op = value.op
    return op.reshape_like(op.ReduceSum(value, keepdims=0), bound)


@register_fused("Elementwise")
def elementwise(node: Node) -> Sequence[Value]:
    """y = the last step of a program over x0, x1, ...: ``Sigmoid x0;Mul x0 s0`` is x0 sigmoid(x0)."""
    op, x = node.op, node.x
    values = {f"x{place}": value for place, value in enumerate(node.inputs) if value is not None}
    for place, step in enumerate(node.attribute("program").split(";")):
        name, *operands = step.split()
        given = [values[operand] for operand in operands]
        if name == "Cast":
            result = op.cast(given[0], x.dtype)
        else:
            more: dict[str, Any] = {"fmod": 1} if name == "Mod" else {}
            result = op.Log(given[0] + 1) if name == "Log1p" else op.several(name, *given, outputs=1, **more)[0]
        values[f"s{place}"] = result.with_shape(x.shape)
    return [result]
