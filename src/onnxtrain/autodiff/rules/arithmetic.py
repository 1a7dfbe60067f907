"""Element-wise operators of several operands that broadcast: addition to powers, minima and Where."""

from __future__ import annotations

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules.elementwise import root_gradient
from onnxtrain.graph import Value


@register_gradient("Add", broadcasts=True)
def add(node: Node, dy: Value) -> Gradients:
    """y = a + b: da = dy, db = dy."""
    return dy, dy


@register_gradient("Sub", broadcasts=True)
def subtract(node: Node, dy: Value) -> Gradients:
    """y = a - b: da = dy, db = -dy."""
    return dy, -dy


@register_gradient("Mul", broadcasts=True)
def multiply(node: Node, dy: Value) -> Gradients:
    """y = a b: da = dy b, db = dy a."""
    a, b = node.input_required(0), node.input_required(1)
    return dy * b, dy * a


@register_gradient("Div", broadcasts=True)
def divide(node: Node, dy: Value) -> Gradients:
    """y = a / b: da = dy / b, db = -y dy / b."""
    b = node.input_required(1)
    da = dy / b
    return da, -(node.y * da)


@register_gradient("Mod", broadcasts=True)
def modulo(node: Node, dy: Value) -> Gradients:
    """y = a - b q, q = trunc(a / b) or floor(a / b): da = dy, db = -q dy = dy (y - a) / b."""
    a, b = node.input_required(0), node.input_required(1)
    return dy, dy * ((node.y - a) / b)


@register_gradient("Pow", broadcasts=True)
def power(node: Node, dy: Value) -> Gradients:
    """y = a^b: da = dy b a^(b - 1), db = dy y log a.

    As in PyTorch, da = 0 where b = 0 and db = 0 where a = 0 <= b; db is NaN where a < 0, since the real
    function has no derivative there.
    """
    op, a, b = node.op, node.input_required(0), node.input_required(1)
    constant = b.constant()
    if constant is not None and constant.size == 1:
        da = _power_of_constant(node, dy, float(constant.reshape(-1)[0]))
    else:
        exponent = op.cast(b, a.dtype)
        slope = exponent * op.Pow(a, exponent - 1)
        da = dy * op.Where(op.binary("Equal", exponent, 0), op.scalar(0, dy), slope)
    if not b.is_float:
        return da, None
    # log 1 = 0 instead of log 0: multiplied by y = 0 it gives zero instead of NaN.
    logarithm = op.Log(op.Where(op.binary("Equal", a, 0), op.scalar(1, a), a))
    return da, op.cast(dy * node.y * logarithm, b.dtype)


def _power_of_constant(node: Node, dy: Value, exponent: float) -> Value:
    """The gradient of the base, by multiplication instead of Pow where possible."""
    op, a, y = node.op, node.x, node.y
    if exponent == 0:
        return op.zeros_like(dy)
    if exponent == 1:
        return dy
    if exponent == 2:
        return dy * (a * 2)
    if exponent == 3:
        return dy * (a * a * 3)
    if exponent == 0.5:
        return root_gradient(node, dy * 0.5 / y)
    if exponent == -1:
        return -(dy * y * y)
    dx = dy * (op.Pow(a, op.scalar(exponent - 1, a)) * exponent)
    # PyTorch's older exporter writes the root of a distance as the power 1 / (2 + 1e-6).
    return root_gradient(node, dx) if 0 < exponent < 1 else dx


@register_gradient("Max", "Min", broadcasts=True)
def extremum(node: Node, dy: Value) -> Gradients:
    """y = max_k x_k: dx_k = dy / n where x_k = y, n the number of such k; else 0. Likewise for min.

    Operands that tie share equally, as in PyTorch's ``maximum`` and ``minimum``.
    """
    op = node.op
    if len(node.inputs) == 1:
        return dy
    operands = [node.input_required(k) for k in range(len(node.inputs))]
    chosen = [op.Equal(x, node.y).with_shape(node.y.shape) for x in operands]
    share = dy / op.sum_of([op.cast(mask, dy.dtype).with_shape(node.y.shape) for mask in chosen])
    # Where instead of Mul, since dy is infinite in sqrt(max(x, 0)) where x < 0, and the gradient there is zero.
    return [op.Where(mask, share, op.scalar(0, dy)) for mask in chosen]


@register_gradient("Sum", broadcasts=True)
def add_all(node: Node, dy: Value) -> Gradients:
    """y = sum_k x_k: dx_k = dy."""
    return [dy] * len(node.inputs)


@register_gradient("Mean", broadcasts=True)
def average(node: Node, dy: Value) -> Gradients:
    """y = 1/n sum_k x_k: dx_k = dy / n."""
    count = len(node.inputs)
    return [dy * (1 / count)] * count


@register_gradient("Where", broadcasts=True)
def where(node: Node, dy: Value) -> Gradients:
    """y = a where the condition holds, else b: da = dy where it holds, db = dy where it does not; else 0."""
    op, condition = node.op, node.x
    zero = op.scalar(0, dy)
    return None, op.Where(condition, dy, zero), op.Where(condition, zero, dy)
