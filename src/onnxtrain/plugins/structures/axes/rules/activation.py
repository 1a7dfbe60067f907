"""Activations, and Softmax, which mixes an axis."""

from __future__ import annotations

from onnxtrain.plugins.structures.axes.broadcasting import broadcast, first_zero, same_shape
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of


@axes_of(
    *("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "HardSwish", "Softsign", "ThresholdedRelu", "Swish", "Mish", "Gelu")
)
def activation(node: Node) -> list[Axis]:
    """y = f(x) with f(0) = 0."""
    return same_shape(node, keeps_zero=True)


@axes_of("Sigmoid", "HardSigmoid", "Softplus", "Shrink")
def other(node: Node) -> list[Axis]:
    """y = f(x)."""
    return same_shape(node, keeps_zero=False)


@axes_of("PRelu")
def prelu(node: Node) -> list[Axis]:
    """y = x or slope x."""
    return broadcast(node, (0, 1), first_zero)


@axes_of("Softmax", "LogSoftmax", "Hardmax")
def softmax(node: Node) -> list[Axis]:
    """y = x normalized over an axis; before opset 13 over all axes from it on."""
    axis = node.attribute("axis", -1 if node.opset >= 13 else 1)
    mixed = [axis] if node.opset >= 13 else range(axis % max(node.rank(), 1), node.rank())
    return same_shape(node, keeps_zero=False, mixed=mixed, reason="normalizes over it")
