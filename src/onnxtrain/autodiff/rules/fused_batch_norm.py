"""Batch normalization in training mode with the activation behind it as one operator of this project's domain.

The node keeps its input and the statistics of the batch only: its gradient computes the normalized values again, and
from them the slope of the activation and, where others read it, the activation itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules.activation import FUSED_ACTIVATIONS
from onnxtrain.autodiff.rules.normalization import column, flat_images, image_like, standardize
from onnxtrain.graph import Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

OPERATOR = "BatchNormalization"
"""Its name in the domain ``onnxtrain``."""

ACTIVATION = "activation"
"""The attribute for the activation: one of ``FUSED_ACTIVATIONS``, or absent."""

_EPSILON, _MOMENTUM = float(np.float32(1e-5)), float(np.float32(0.9))  # attributes are of single precision


def normalizes_batches(node: ir.Node) -> bool:
    """Return whether a node is BatchNormalization in training mode that the kernel can compute."""
    if node.op_identifier() != ("", "BatchNormalization", ""):
        return False
    types = {None if value is None else value.dtype for value in node.inputs}
    x = node.inputs[0]
    if x is not None and x.shape is not None and len(x.shape) < 2:
        return False  # one channel, of which the kernel does not know
    trains = node.attributes.get_int("training_mode", 0) == 1
    return trains and len(types) == 1 and types <= set(KERNEL_TYPES)


def settings_of(node: Node) -> dict[str, object]:
    """The attributes that the node and its gradient share."""
    found: dict[str, object] = {"epsilon": node.attribute("epsilon", _EPSILON)}
    for name in (ACTIVATION, "low", "high"):
        if (given := node.attribute(name, None)) is not None:
            found[name] = given
    return found


@register_fused(OPERATOR)
def fused_batch_normalization(node: Node) -> Sequence[Value]:
    """From x, scale, bias, mean, variance and an addend?: f(n + addend), running statistics, those of the batch.

    The statistics of the batch are [2, channels]: each is the sum of two numbers, of which the second is zero here.
    """
    op, addend = node.op, node.input(5)
    scale, bias, old_mean, old_variance = (node.input_required(index) for index in range(1, 5))
    x = flat_images(node.x) if node.x.rank is None else node.x
    rank = x.rank or 3
    over = op.ints(0, *range(2, rank))
    centred, inverse = standardize(x, over, node.attribute("epsilon", _EPSILON))
    y = image_like(centred * inverse * column(op, scale, rank) + column(op, bias, rank), node.x)
    y = y if addend is None else y + addend
    name = node.attribute(ACTIVATION, "")
    own = [op.ReduceMean(value, over, keepdims=0).with_shape(scale.shape) for value in (x, centred * centred)]
    momentum: float = node.attribute("momentum", _MOMENTUM)
    running = [old * momentum + new * (1 - momentum) for old, new in zip((old_mean, old_variance), own, strict=True)]
    kept = [op.Concat(*(op.Unsqueeze(part, op.ints(0)) for part in (new, op.zeros_like(new))), axis=0) for new in own]
    return [FUSED_ACTIVATIONS[name][0](node, y) if name else y, *running, *kept]


@register_gradient(OPERATOR, domain=ONNXTRAIN_DOMAIN)
def fused_batch_normalization_rule(node: Node, dy: Value, *_statistics: Value | None) -> Gradients:
    """y = f(scale x̂ + bias): dy becomes dy f', and then as for BatchNormalization; an addend's gradient is dy f'.

    With an addend, whose activation is Relu, f' follows from y.
    """
    op, x, scale, bias, addend = node.op, node.x, node.input_required(1), node.input_required(2), node.input(5)
    settings = settings_of(node)
    if addend is not None and ACTIVATION in settings:
        (dy,) = emit(op, "ReluGradient", dy, node.y, like=[dy])
        settings.pop(ACTIVATION)
    inputs = (dy, x, scale, node.outputs[3], node.outputs[4], bias)
    dx, dscale, dbias = emit(op, f"{OPERATOR}Gradient", *inputs, like=[x, scale, scale], training_mode=1, **settings)
    return [dx, dscale, dbias, None, None, dy][: len(node.inputs)]
