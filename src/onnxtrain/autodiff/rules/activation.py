"""Activations and softmax: the derivative follows from y where possible, so that x need not be kept.

At a kink the gradient is PyTorch's: relu'(0) = 0, and x = 0 belongs to the negative branch of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value


def activation(name: str, x: Value, **parameters: Any) -> Value:
    """Emit an activation with parameters, by the name that a recurrent or fused operator gives it.

    A parameter of 0 is never written as an attribute (workarounds: attributes of zero).
    """
    op, zero = x.op, any(number == 0 for number in parameters.values())
    if name == "HardSigmoid" and zero:
        defaults = {"alpha": 0.2, "beta": 0.5}
        given = {key: number for key, number in parameters.items() if number is not None}
        alpha, beta = (defaults | given).values()
        return op.Clip(x * alpha + beta, op.scalar(0, x), op.scalar(1, x)).with_shape(x.shape)
    if name in ("Elu", "LeakyRelu", "ThresholdedRelu") and zero:
        return op.Relu(x)
    return op.several(name, x, outputs=1, **parameters)[0].with_shape(x.shape)


def _slope(value: Value, negative: float = 0.0) -> Value:
    """1 where a value is positive, ``negative`` elsewhere, in operators on which all runtimes agree."""
    op = value.op
    positive = op.binary("Greater", value, 0)
    if not 0 <= negative <= 1:
        return op.Where(positive, op.scalar(1, value), op.scalar(negative, value))
    slope = op.cast(positive, value.dtype)  # with Max two thirds of the time of Where on ONNX Runtime
    return slope if negative == 0 else op.Max(slope, op.scalar(negative, value)).with_shape(value.shape)


@register_gradient("Relu")
def relu(node: Node, dy: Value) -> Gradients:
    """y = max(x, 0): dx = dy where y > 0, else 0."""
    return emit(node.op, "ReluGradient", dy, node.y, like=[dy])


@register_fused("ReluGradient")
def relu_gradient(node: Node) -> Sequence[Value]:
    """From dy and y ≥ 0: dx = 0 where y ≤ 0, else dy."""
    return [where_positive(node.x, node.input_required(1))]


def where_positive(dy: Value, y: Value) -> Value:
    """0 where y ≤ 0, else dy: chosen, not multiplied, since dy is infinite in sqrt(relu(x)) where x < 0."""
    op = dy.op
    return op.Where(op.binary("LessOrEqual", y, 0), op.scalar(0, dy), dy).with_shape(dy.shape)


@register_gradient("LeakyRelu")
def leaky_relu(node: Node, dy: Value) -> Gradients:
    """y = x where x > 0, else alpha x: dx = dy where x > 0, else alpha dy."""
    alpha = node.attribute("alpha", 0.01)
    return dy * _slope(node.y if alpha >= 0 else node.x, alpha)  # then y has the sign of x


@register_gradient("PRelu", since=9, broadcasts=True)
def prelu(node: Node, dy: Value) -> Gradients:
    """y = x where x > 0, else a x: dx = dy where x > 0, else a dy; da = dy min(x, 0), summed to a's shape."""
    op, x, slope = node.op, node.x, node.input_required(1)
    dx = op.Where(op.binary("Greater", x, 0), dy, dy * slope)
    return dx, dy * op.Min(x, op.scalar(0, x))


@register_gradient("Elu")
def elu(node: Node, dy: Value) -> Gradients:
    """y = x where x > 0, else a (exp(x) - 1): dx = dy where x > 0, else dy (y + a)."""
    op, y = node.op, node.y
    alpha: float = node.attribute("alpha", 1.0)
    if alpha == 1:
        return dy * (op.Min(y, op.scalar(0, y)) + 1)
    sign = y if alpha > 0 else node.x
    return dy * op.Where(op.binary("Greater", sign, 0), op.scalar(1, y), y + alpha)


@register_gradient("Selu")
def selu(node: Node, dy: Value) -> Gradients:
    """y = g x where x > 0, else g a (exp(x) - 1): dx = g dy where x > 0, else dy (y + g a)."""
    op, x, y = node.op, node.x, node.y
    alpha: float = node.attribute("alpha", 1.6732632423543772)
    gamma: float = node.attribute("gamma", 1.0507009873554805)
    sign = y if alpha > 0 and gamma > 0 else x
    return dy * op.Where(op.binary("Greater", sign, 0), op.scalar(gamma, y), y + alpha * gamma)


@register_gradient("Celu")
def celu(node: Node, dy: Value) -> Gradients:
    """y = x where x > 0, else a (exp(x / a) - 1): dx = dy (1 + min(y, 0) / a), for a of either sign."""
    op, y = node.op, node.y
    alpha: float = node.attribute("alpha", 1.0)
    return dy * (op.Min(y, op.scalar(0, y)) * (1 / alpha) + 1)


@register_gradient("Sigmoid")
def sigmoid(node: Node, dy: Value) -> Gradients:
    """y = 1 / (1 + exp(-x)): dx = dy y (1 - y)."""
    return dy * (node.y * (1 - node.y))


@register_gradient("HardSigmoid")
def hard_sigmoid(node: Node, dy: Value) -> Gradients:
    """y = min(max(a x + b, 0), 1): dx = a dy where 0 < y < 1, else 0."""
    op, y = node.op, node.y
    alpha: float = node.attribute("alpha", 0.2)
    return op.Where(op.binary("Greater", y * (1 - y), 0), dy * alpha, op.scalar(0, dy))


@register_gradient("HardSwish")
def hard_swish(node: Node, dy: Value) -> Gradients:
    """y = x min(max(x / 6 + 1/2, 0), 1): dx = dy (x / 3 + 1/2) where |x| < 3; beyond, dy above and 0 below."""
    return _hard_swish_slope(dy, node.x)


def _hard_swish_slope(dy: Value, x: Value) -> Value:
    op = x.op
    beyond = op.Where(op.binary("Less", x, 0), op.scalar(0, dy), dy)  # chosen, as of Relu
    return op.Where(op.binary("Less", op.Abs(x), 3), dy * (x * (1 / 3) + 0.5), beyond)


@register_gradient("Softplus")
def softplus(node: Node, dy: Value) -> Gradients:
    """y = log(1 + exp(x)): dx = dy sigmoid(x)."""
    return dy * node.op.Sigmoid(node.x)


@register_gradient("Softsign")
def softsign(node: Node, dy: Value) -> Gradients:
    """y = x / (1 + |x|): dx = dy / (1 + |x|)^2."""
    root = node.op.Abs(node.x) + 1
    return dy / (root * root)


@register_gradient("ThresholdedRelu")
def thresholded_relu(node: Node, dy: Value) -> Gradients:
    """y = x where x > alpha, else 0: dx = dy where x > alpha, else 0."""
    op = node.op
    above = op.binary("Greater", node.x, node.attribute("alpha", 1.0))
    return op.Where(above, dy, op.scalar(0, dy))


@register_gradient("Shrink")
def shrink(node: Node, dy: Value) -> Gradients:
    """y = x - bias sign(x) where |x| > lambda, else 0: dx = dy where |x| > lambda, else 0."""
    op = node.op
    outside = op.binary("Greater", op.Abs(node.x), node.attribute("lambd", 0.5))
    return op.Where(outside, dy, op.scalar(0, dy))


@register_gradient("Swish")
def swish(node: Node, dy: Value) -> Gradients:
    """y = x s, s = sigmoid(u), u = a x: dx = dy s (1 + u (1 - s))."""
    alpha: float = node.attribute("alpha", 1.0)
    u = node.x * alpha
    s = node.op.Sigmoid(u)
    return dy * (s * (u * (1 - s) + 1))


@register_gradient("Mish")
def mish(node: Node, dy: Value) -> Gradients:
    """y = x t, t = tanh(log(1 + e^x)): dx = dy (t + x s (1 - t^2)), s = sigmoid(x).

    t = s (1 + q) / (1 + q^2) with q = 1 - s, which is far cheaper than a logarithm.
    """
    s = node.op.Sigmoid(node.x)
    q = 1 - s
    t = s * (q + 1) / (q * q + 1)
    return dy * (t + node.x * s * (1 - t * t))


@register_gradient("Gelu")
def gelu(node: Node, dy: Value) -> Gradients:
    """y = x P(x), P the normal distribution function: dx = dy (P(x) + x p(x)), p its density.

    With approximate="tanh", P(x) = sigmoid(v), v = 2 sqrt(2 / pi) (x + 0.044715 x^3), and
    dx = dy (P + y (1 - P) v').
    """
    approximate = node.attribute("approximate", "none")
    return emit(node.op, "GeluGradient", dy, node.x, like=[dy], approximate=approximate)


@register_fused("GeluGradient")
def gelu_gradient(node: Node) -> Sequence[Value]:
    """From dy and x: dx = dy (P(x) + x p(x)), exact or approximated by tanh or sigmoid; and y = x P(x).

    From dy, x and a factor f, of a gated unit y f: dx with dy f for dy; y f; and df = dy y.
    """
    factor = node.input(2)
    if factor is None:
        return _gelu_gradient(node, node.x)
    dx, y = _gelu_gradient(node, node.x * factor)
    return [dx, y * factor, node.x * y]


def _gelu_gradient(node: Node, dy: Value) -> list[Value]:
    op, x = node.op, node.input_required(1)
    if node.attribute("approximate") == "sigmoid":
        alpha = float(node.attribute("alpha", 1.0))
        probability = op.Sigmoid(x if alpha == 1 else x * alpha)
        y = x * probability
        return [dy * (probability + y * (1 - probability) * alpha), y]
    if node.attribute("approximate") == "tanh":
        factor = 2 * math.sqrt(2 / math.pi)
        square = x * x
        probability = op.Sigmoid(x * (square * (0.044715 * factor) + factor))
        inner = square * (3 * 0.044715 * factor) + factor
        y = x * probability
        return [dy * (probability + y * (1 - probability) * inner), y]
    # In s = x / sqrt(2): 2 dx = dy (1 + erf(s) + 2 / sqrt(pi) s exp(-s^2)), the factor in the exponent.
    s = x * math.sqrt(0.5)
    density = s * op.Exp(math.log(2 / math.sqrt(math.pi)) - s * s)
    twice = op.Erf(s) + 1
    return [dy * 0.5 * (twice + density), x * 0.5 * twice]


@register_gradient("Softmax", since=13)
def softmax(node: Node, dy: Value) -> Gradients:
    """y_i = exp(x_i) / sum_j exp(x_j): dx_i = y_i (dy_i - sum_j dy_j y_j).

    :mod:`onnxtrain.autodiff.masked_softmax` corrects it for models that replace the NaN of masked rows.
    """
    return emit(node.op, "SoftmaxGradient", dy, node.y, like=[node.y], axis=node.attribute("axis", -1))


@register_fused("SoftmaxGradient")
def softmax_gradient(node: Node) -> Sequence[Value]:
    """From dy and y: dx_i = y_i (dy_i - sum_j dy_j y_j)."""
    op, dy, y = node.op, node.x, node.input_required(1)
    return [y * (dy - op.ReduceSum(dy * y, op.ints(node.attribute("axis")), keepdims=1))]


@register_gradient("LogSoftmax", since=13)
def log_softmax(node: Node, dy: Value) -> Gradients:
    """y_i = x_i - log sum_j exp(x_j): dx_i = dy_i - exp(y_i) sum_j dy_j."""
    return emit(node.op, "LogSoftmaxGradient", dy, node.y, like=[node.y], axis=node.attribute("axis", -1))


@register_fused("LogSoftmaxGradient")
def log_softmax_gradient(node: Node) -> Sequence[Value]:
    """From dy and y: dx_i = dy_i - exp(y_i) sum_j dy_j."""
    op, dy, y = node.op, node.x, node.input_required(1)
    return [dy - op.Exp(y) * op.ReduceSum(dy, op.ints(node.attribute("axis")), keepdims=1)]


def _clipped(node: Node, x: Value) -> Value:
    op = x.op
    low, high = (op.scalar(node.attribute(name), x) for name in ("low", "high"))
    return op.Clip(x, low, high).with_shape(x.shape)


def _clip_slope(node: Node, dy: Value, x: Value) -> Value:
    return x.op.Where(x.op.Equal(x, _clipped(node, x)), dy, x.op.scalar(0, dy))


FUSED_ACTIVATIONS: Mapping[str, tuple[Callable[[Node, Value], Value], Callable[[Node, Value, Value], Value]]] = {
    "Clip": (_clipped, _clip_slope),
    "HardSwish": (
        lambda node, x: x.op.HardSwish(x).with_shape(x.shape),
        lambda node, dy, x: _hard_swish_slope(dy, x),
    ),
    "Relu": (lambda node, x: x.op.Relu(x), lambda node, dy, x: where_positive(dy, x)),
}
"""Activations inside other operators of this project: the result of each and its gradient from dy, by its input.

The attributes ``low`` and ``high`` of the node are the bounds of a Clip.
"""
