"""Find the inputs of a working copy that are images of 0 to 255, which the model scales itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.value import PIXELS, behind, constant_array, dimensions, is_float
from onnxtrain.weights.readers import REARRANGING, Reader, arrivals

_THROUGH: Final = REARRANGING | {"Resize", "Pad"}

_LARGE: Final = 16.0
"""Least mean or deviation of images of 0 to 255; those of images of 0 to 1 or -1 to 1 are below 2."""

_STEPS: Final = 8
"""Nodes that are followed from an input."""


def mark_image_inputs(model: ir.Model) -> None:
    """Record at each input of floating images that the model divides them by 255 itself, or by a similar number.

    Args:
        model: A working copy.
    """
    for value in model.graph.inputs:
        shape = dimensions(value)
        if is_float(value) and shape is not None and len(shape) in (3, 4) and any(_scales_bytes(value, _STEPS)):
            value.meta[PIXELS] = True


def _scales_bytes(value: ir.Value, steps: int) -> Iterator[bool]:
    """Yield whether the nodes that normalize a value take images of 0 to 255, for each such node that tells."""
    for reader in arrivals(value, through=_THROUGH):
        found = _takes_bytes(reader)
        if found is not None:
            yield found
        elif steps and _other_operand(reader) is not None:
            yield from _scales_bytes(reader[0].outputs[0], steps - 1)


def _takes_bytes(reader: Reader) -> bool | None:
    """Return whether a node normalizes images of 0 to 255; ``None`` where it leaves this open."""
    node, index = reader
    if node.op_type == "BatchNormalization" and not node.domain and index == 0:
        mean = _magnitude(node.inputs[3])
        return None if mean is None else mean >= _LARGE
    operand = _other_operand(reader)
    if operand is None or not operand:
        return None
    if node.op_type in ("Add", "Sub"):
        return True if operand >= _LARGE else None
    if node.op_type == "Div" and index == 1:
        return None
    divisor = operand if node.op_type == "Div" else 1 / operand
    if divisor >= _LARGE:
        return True
    return False if divisor <= 1 / _LARGE else None


def _other_operand(reader: Reader) -> float | None:
    """Return the largest magnitude of the constant that an arithmetic node joins with its other input."""
    node, index = reader
    if node.domain or node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    return _magnitude(node.inputs[1 - index])


def _magnitude(value: ir.Value | None) -> float | None:
    """Return the largest magnitude of a constant; ``None`` for other values."""
    array = constant_array(behind(value, REARRANGING))
    return float(np.abs(array).max()) if array is not None and array.size else None
