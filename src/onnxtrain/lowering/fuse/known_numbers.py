"""Numbers that a graph computes from shapes that are known, such as the root of a head's size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import constant_array, dimensions

_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {"Div": np.divide, "Mul": np.multiply, "Sqrt": np.sqrt}
_FLOATING = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

_DEEPEST = 12
"""Nodes between a number and the shape that it follows from."""


def known_number(value: ir.Value | None) -> float | None:
    """The number of a value with one element that is a constant, or follows from known sizes; ``None`` for others.

    Roots, products and quotients of floats are computed in the type of the graph.
    """
    array = _array(value, _DEEPEST)
    return None if array is None or array.size != 1 else float(array.reshape(()))


def _array(value: ir.Value | None, depth: int) -> np.ndarray | None:
    if value is None or depth == 0:
        return None
    known = constant_array(value)
    node = value.producer()
    if known is not None or node is None or node.domain:
        return known
    if node.op_type == "Shape":
        sizes = None if node.inputs[0] is None else dimensions(node.inputs[0])
        return None if sizes is None or node.attributes else np.array(sizes, object)
    given = [_array(each, depth - 1) for each in node.inputs]
    if not given or any(each is None for each in given):
        return None
    arrays = [each for each in given if each is not None]
    if node.op_type in ("Slice", "Gather"):
        return _taken(node, arrays)
    if any(item is None or isinstance(item, str) for item in arrays[0].flat):
        return None
    if node.op_type == "Cast" and value.dtype is not None and value.dtype in (*_FLOATING, ir.DataType.INT64):
        return arrays[0].astype(value.dtype.numpy())
    if node.op_type in _ARITHMETIC and value.dtype in _FLOATING:
        return np.asarray(_ARITHMETIC[node.op_type](*arrays))
    return None


def _taken(node: ir.Node, arrays: list[np.ndarray]) -> np.ndarray | None:
    """A part of a shape, or of a list."""
    items, *places = arrays
    if items.ndim != 1 or any(place.size != 1 for place in places):
        return None
    first, *others = (int(place.reshape(())) for place in places)
    if node.op_type == "Gather":
        return items[first : first + 1 or None] if -items.size <= first < items.size else None
    if not others or others[1:] not in ([], [0], [0, 1]):  # the end, the axis, the step
        return None
    return items[first : others[0]]
