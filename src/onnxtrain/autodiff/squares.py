"""Recognize norms and deviations that a graph computes as the root of a sum of squares.

The root has an infinite gradient at 0, and the squares multiply it by 0, which gives NaN. PyTorch's ``std`` and
``cdist``, of which exporters write such sums, have the gradient 0 there, as ReduceL2 does here.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from onnxtrain.graph.value import behind, constant_number, constant_tensor

_SAME: Final = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand"})

_STEPS: Final = 16
"""Nodes that are searched for what a factor depends on."""


def is_sum_of_squares(value: ir.Value | None) -> bool:
    """Return whether a value is a sum or a mean of squares, or of other powers above one, perhaps scaled."""
    node = _producer(value)
    if node is None or node.op_type in ("ReduceSumSquare", "ReduceSum", "ReduceMean"):
        return node is not None and (node.op_type == "ReduceSumSquare" or _is_square(node.inputs[0]))
    if node.op_type == "Div":
        return is_sum_of_squares(node.inputs[0])
    if node.op_type != "Mul":
        return False
    one, other = node.inputs
    return (is_sum_of_squares(one) and _is_fixed(other)) or (is_sum_of_squares(other) and _is_fixed(one))


def _is_fixed(value: ir.Value | None) -> bool:
    """Return whether a value depends on constants and sizes alone, such as the number of examples minus one."""
    waiting = [value]
    for _ in range(_STEPS):
        if not waiting:
            return True
        value = waiting.pop()
        if value is None or constant_tensor(value) is not None:
            continue
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type not in ("Shape", "Size"):
            waiting += node.inputs[:1] if node.op_type == "CastLike" else node.inputs
    return False


def _is_square(value: ir.Value | None) -> bool:
    node = _producer(value)
    if node is None:
        return False
    if node.op_type == "Mul":
        return node.inputs[0] is node.inputs[1]
    exponent = constant_number(node.inputs[1]) if node.op_type == "Pow" else None
    return exponent is not None and exponent > 1


def _producer(value: ir.Value | None) -> ir.Node | None:
    """Return the node of ONNX that computes the elements of a value."""
    source = behind(value, _SAME)
    node = None if source is None else source.producer()
    return None if node is None or node.domain else node
