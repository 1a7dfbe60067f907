"""Accuracy of linear layers with low-bit weights (MatMulNBits) in a working copy."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir.clone import all_nodes
from onnxtrain.ir.domains import MICROSOFT_DOMAIN


def set_accuracy(model: ir.Model, level: int | None) -> None:
    """Set the accuracy level of MatMulNBits nodes in a working copy, in place; ``None`` changes nothing.

    Most models have level 4, which rounds activations to 8 bits and so makes the loss noisy. Gradients are computed
    without rounding.
    """
    if level is None:
        return
    for node in [*all_nodes(model.graph), *(node for function in model.functions.values() for node in function)]:
        if node.op_type == "MatMulNBits" and node.domain == MICROSOFT_DOMAIN:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)
