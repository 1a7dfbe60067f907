"""Products with weights of a few bits, as a working copy of a model computes them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir.clone import all_nodes
from onnxtrain.ir.domains import MICROSOFT_DOMAIN


def set_accuracy(model: ir.Model, level: int | None) -> None:
    """Let the MatMulNBits nodes of a working copy compute at an accuracy level, in place; ``None`` changes nothing.

    Models are mostly written with level 4: activations are rounded to 8 bits. The gradient is that of the product
    without rounding, and a loss that rounds is a noisy one.
    """
    if level is None:
        return
    for node in [*all_nodes(model.graph), *(node for function in model.functions.values() for node in function)]:
        if node.op_type == "MatMulNBits" and node.domain == MICROSOFT_DOMAIN:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)
