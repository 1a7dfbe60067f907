"""ONNX Runtime's fused operators: activations and products have rules, fused attention stops the search."""

from __future__ import annotations

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.plugins.structures.axes.broadcasting import all_zero, broadcast, same_shape
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule

_FUSED = "it joins several layers in one operator; export the model without ONNX Runtime's fusions"


@axes_of("Gelu", "QuickGelu", domain=MICROSOFT_DOMAIN)
def gelu(node: Node) -> list[Axis]:
    """y = x times a sigmoid or a normal distribution of x."""
    return same_shape(node, keeps_zero=True)


@axes_of("BiasGelu", "FastGelu", domain=MICROSOFT_DOMAIN)
def bias_gelu(node: Node) -> list[Axis]:
    """y = the same of x + bias."""
    return broadcast(node, (0, 1), all_zero)


no_rule(
    *("Attention", "MultiHeadAttention", "GroupQueryAttention", "FusedMatMul", "FusedGemm", "FusedConv"),
    domain=MICROSOFT_DOMAIN,
    reason=_FUSED,
)
no_rule(
    *("MatMulNBits", "GatherBlockQuantized"),
    domain=MICROSOFT_DOMAIN,
    reason="its weights are packed in low-bit blocks; remove structures before the model is quantized",
)
no_rule("MatMulNBits", domain="onnxtrain", reason="it is a part of training graphs, not of model files")
no_rule(
    *("QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearAveragePool"),
    *("QLinearGlobalAveragePool", "QLinearConcat", "QLinearWhere", "QGemm", "MatMulIntegerToFloat"),
    "DynamicQuantizeMatMul",
    domain=MICROSOFT_DOMAIN,
    reason="it has quantized inputs; write the model with QuantizeLinear and DequantizeLinear",
)
