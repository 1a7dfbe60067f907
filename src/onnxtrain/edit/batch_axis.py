"""Along which axis the outputs of a node have their examples, given those of its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.ir.value import constant_tensor


class Place(NamedTuple):
    """The batch axis of a value.

    Attributes:
        axis: Along which axis.
        before: How many elements this axis has for each step of the examples' own axis before it, where a Reshape has
            joined the two: 5 behind [5, batch] as [5 batch].
    """

    axis: int
    before: int = 1


Axes = Mapping[ir.Value, Place]
"""The batch axis of every value that has one."""


def output_axes(node: ir.Node, axes: Axes, size: int) -> list[Place | None]:
    """Return the batch axis of each output; None for an output without one.

    Args:
        node: A node of which an input has examples; shapes are inferred for the fixed batch size.
        axes: The axes of the values before.
        size: The batch size that the model has.
    """
    found = [_place(node, index, axes, size) for index in range(len(node.outputs))]
    return [
        place if place is not None and (value.shape is None or 0 <= place.axis < len(value.shape)) else None
        for place, value in zip(found, node.outputs, strict=True)
    ]


def _place(node: ir.Node, index: int, axes: Axes, size: int) -> Place | None:
    source = next(value for value in node.inputs if value is not None and value in axes)
    if node.op_type in ("Reshape", "Flatten"):
        return _reshaped(_dims(source), _dims(node.outputs[0]), axes[source], size)
    axis = _axis(node, index, source, axes)
    return None if axis is None else Place(axis, axes[source].before)


def _axis(node: ir.Node, index: int, source: ir.Value, axes: Axes) -> int | None:
    axis, rank = axes[source].axis, _rank(source)
    own = _rank(node.outputs[index])
    operator = node.op_type
    if operator in ("Shape", "Size"):
        return None
    if operator in ("LSTM", "GRU", "RNN"):
        layout = node.attributes["layout"].as_int() if "layout" in node.attributes else 0
        return 0 if layout else (2 if index == 0 else 1)
    if operator == "Transpose":
        order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(rank))[::-1]
        return order.index(axis)
    if operator == "Gather":
        return _gathered(node, axes)
    if operator in ("Squeeze", "Unsqueeze") or operator.startswith(("Reduce", "Arg")):
        return _moved(node, axis, rank, own)
    if own == rank or own == 0:
        return axis
    return axis + own - rank  # broadcasting aligns the last axes


def _reshaped(before: Sequence[int | None], after: Sequence[int | None], source: Place, size: int) -> Place | None:
    """Return the batch axis behind a Reshape: the axes before it have as many elements as before."""
    if None in before[: source.axis]:
        return None
    outer = math.prod(before[: source.axis]) * source.before  # type: ignore[arg-type]
    if outer == 1:
        return Place(0)
    passed = 1
    for axis, dim in enumerate(after):
        if dim is None:
            return None
        if passed == outer and (dim == size or dim > 1):
            return Place(axis)
        following = after[axis + 1] if axis + 1 < len(after) else None
        if passed < outer <= passed * dim and (passed * dim > outer or (size == 1 and following != 1)):
            return Place(axis, outer // passed)  # joined with what stands before it
        passed *= dim
    return None


def _gathered(node: ir.Node, axes: Axes) -> int | None:
    data, indices = node.inputs[0], node.inputs[1]
    assert data is not None
    assert indices is not None
    place = (node.attributes["axis"].as_int() if "axis" in node.attributes else 0) % max(_rank(data), 1)
    if indices in axes:
        return place + axes[indices].axis
    axis = axes[data].axis
    if axis == place:
        return None
    return axis if axis < place else axis + _rank(indices) - 1


def _moved(node: ir.Node, axis: int, rank: int, own: int) -> int | None:
    """Return an axis behind operators that add or remove axes: Squeeze, Unsqueeze, reductions."""
    given = node.attributes.get("axes") or node.attributes.get("axis")
    listed: list[int] | None = None
    if given is not None:
        listed = [given.as_int()] if given.type == ir.AttributeType.INT else list(given.as_ints())
    elif node.op_type.startswith("Arg"):
        listed = [0]
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        tensor = constant_tensor(node.inputs[1])
        listed = None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]
    if node.op_type == "Unsqueeze":
        new = sorted(place % (rank + len(listed)) for place in listed) if listed is not None else []
        for place in new:
            axis += place <= axis
        return axis
    if listed is None:  # all axes, or those of size 1
        return axis if own == rank else None
    gone = {place % rank for place in listed}
    if own == rank:
        return None if axis in gone else axis
    return None if axis in gone else axis - sum(place < axis for place in gone)


def _dims(value: ir.Value) -> list[int | None]:
    return [] if value.shape is None else [axis if isinstance(axis, int) else None for axis in value.shape]


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)
