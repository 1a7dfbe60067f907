"""Quantization: scales and zero points per channel are shortened with the weights."""

from __future__ import annotations

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.plugins.structures.axes.broadcasting import same_shape
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule


@axes_of("QuantizeLinear", "DequantizeLinear")
@axes_of("QuantizeLinear", "DequantizeLinear", domain=MICROSOFT_DOMAIN)
def quantize(node: Node) -> list[Axis]:
    """y = round(x / scale) + zero point, or back; masked entries are at the zero point."""
    found = same_shape(node, keeps_zero=True)
    value = node.ir.inputs[0]
    if node.operator == "DequantizeLinear" and value is not None and value.is_initializer():
        found = [axis.with_zero(axis.labels is not None) for axis in found]
    place = node.attribute("axis", 1) % max(node.rank(), 1)
    for index in (1, 2):
        if not node.has(index) or node.rank(index) == 0 or node.shape(index) == (1,):
            continue
        node.keep_values(index)
        if node.rank(index) == 1 and not node.attribute("block_size", 0):
            zero = found[place].zero
            found[place] = node.join(found[place], node.axis(index, 0)).with_zero(zero)
        else:
            for axis in range(node.rank()):
                found[axis] = node.fix(found[axis], f"{node.describe()} has scales per block")
    return found


@axes_of("DynamicQuantizeLinear")
def dynamic_quantize(node: Node) -> list[list[Axis]]:
    """y, scale, zero point = x quantized within its range, which always includes zero."""
    found = same_shape(node, keeps_zero=True)
    for axis in found:
        if axis.labels is not None and not axis.zero:
            node.fix(axis, f"{node.describe()} measures its range, and masked entries are not zero")
    return [found, [], []]


no_rule(
    "QLinearConv",
    "QLinearMatMul",
    reason="it has quantized weights of its own; write the model with QuantizeLinear and DequantizeLinear",
)
