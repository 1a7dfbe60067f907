"""Chains of elementwise operators, which a pass makes of the nodes of a step."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain.autodiff.fused import register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.graph import Value


@register_fused("Elementwise")
def elementwise(node: Node) -> Sequence[Value]:
    """y = the last step of a program over x0, x1, ...: ``Sigmoid x0;Mul x0 s0`` is x0 sigmoid(x0)."""
    op, x = node.op, node.x
    values = {f"x{place}": value for place, value in enumerate(node.inputs) if value is not None}
    for place, step in enumerate(node.attribute("program").split(";")):
        name, *operands = step.split()
        given = [values[operand] for operand in operands]
        result = op.cast(given[0], x.dtype) if name == "Cast" else op.several(name, *given, outputs=1)[0]
        values[f"s{place}"] = result.with_shape(x.shape)
    return [result]
