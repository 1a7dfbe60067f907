"""Addition to powers: operators of two and more operands that broadcast."""

from __future__ import annotations

from onnxtrain.autodiff.registry import Gradients, Node, register_gradient
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
