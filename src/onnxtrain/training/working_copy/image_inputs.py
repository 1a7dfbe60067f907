"""Find the inputs of a working copy that are images: how many channels they have, and which the model scales itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import PIXELS, behind, constant_array, dimensions, is_float
from onnxtrain.parameters.readers import REARRANGING, Reader, arrivals

_THROUGH: Final = REARRANGING | {"Resize", "Pad"}

_KEEPING_AXES: Final = {"Add", "Cast", "Div", "Identity", "Mul", "Pad", "Resize", "Sub"}

_LARGE: Final = 16.0
"""Least mean or deviation of images of 0 to 255; those of images of 0 to 1 or -1 to 1 are below 2."""

_STEPS: Final = 8
"""Nodes that are followed from an input."""


def mark_image_inputs(model: ir.Model) -> None:
    """Declare the channels of floating images, and record where the model divides them by 255 or a similar number.

    Exporters declare channels as a symbol, too; the weights of the convolution that reads them tell their number.
    """
    for value in model.graph.inputs:
        shape = dimensions(value)
        if not is_float(value) or shape is None or len(shape) not in (3, 4):
            continue
        if any(_scales_bytes(value, _STEPS)):
            value.meta[PIXELS] = True
        for axis, channels in _channels(value, tuple(range(len(shape))), _STEPS):
            if not isinstance(shape[axis], int):
                value.shape = ir.Shape([*shape[:axis], channels, *shape[axis + 1 :]])
                break


def _channels(value: ir.Value, axes: tuple[int, ...], steps: int) -> Iterator[tuple[int, int]]:
    """Yield the axis of the channels and their number, for each convolution that reads a value or what is behind it."""
    for node, index in value.uses():
        shapes = [dimensions(each) for each in node.inputs if each is not None]
        widens = any(len(shape) > len(axes) for shape in shapes if shape is not None)
        if node.domain or widens or (index and node.op_type not in ("Add", "Mul")):
            continue
        if node.op_type == "Conv":
            weights = dimensions(node.inputs[1]) if node.inputs[1] is not None else None
            if weights is not None and len(weights) == len(axes) and isinstance(weights[1], int):
                yield axes[1], weights[1] * node.attributes.get_int("group", 1)
        elif steps and node.op_type == "Transpose":
            order = node.attributes.get_ints("perm", range(len(axes))[::-1])
            yield from _channels(node.outputs[0], tuple(axes[axis] for axis in order), steps - 1)
        elif steps and node.op_type in _KEEPING_AXES:
            yield from _channels(node.outputs[0], axes, steps - 1)


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
