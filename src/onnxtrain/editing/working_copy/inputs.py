"""Inputs of a working copy: which are images, token ids or texts, and which have one value for all examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.graph.batch_axis import RECURRENT, RESHAPING, BatchAxes, BatchAxis
from onnxtrain.graph.clone import all_nodes, values_read
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.inference import DECLARED, integer, slice_bounds
from onnxtrain.graph.value import (
    COMMON,
    PIXELS,
    TABLE_ROWS,
    TIME_FIRST,
    Dimension,
    behind,
    constant_array,
    constant_ints,
    dimensions,
    is_float,
)
from onnxtrain.parameters.readers import REARRANGING, Reader, arrivals

_THROUGH: Final = REARRANGING | {"Resize", "Pad"}

_KEEPING_AXES: Final = {"Add", "Cast", "Div", "Identity", "Mul", "Pad", "Resize", "Sub"}

_LARGE: Final = 16.0
"""Least mean or deviation of images of 0 to 255; those of images of 0 to 1 or -1 to 1 are below 2."""

_STEPS: Final = 8
"""Nodes that are followed from an input."""


def refuse_texts(graph: ir.Graph) -> None:
    """Refuse a model with texts as inputs, and say where the part begins that can be trained."""
    texts = {value for value in graph.inputs if value.dtype == ir.DataType.STRING}
    if not texts:
        return
    names, ends = ", ".join(repr(value.name) for value in graph.inputs if value in texts), []
    for node in graph:
        if any(value in texts for value in values_read(node)):
            texts.update(value for value in node.outputs if value.dtype in (ir.DataType.STRING, None))  # a Tokenizer's
            ends += [value.name for value in node.outputs if value not in texts and value.uses()]
    raise ModelError(
        f"A training step cannot read texts ({names}). The part behind the nodes that encode them can be trained: "
        f"onnxtrain.cut(model, start={ends}); onnxtrain.predict(onnxtrain.cut(model, at={ends}), texts) returns the "
        "inputs that it takes for them."
    )


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


_KEEP_ELEMENTS: Final = ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")

_KEEP_ROWS: Final = ("Cast", "Identity", "DequantizeLinear")
"""Operators between an initializer and the table that Gather reads."""


def mark_token_inputs(model: ir.Model) -> None:
    """Record the rows of the embedding table at each integer input whose values are looked up in one.

    ONNX's Gather counts negative indices from the end of the table, so that a wrong token id would train another row.
    """
    for value in model.graph.inputs:
        sizes = [] if value.dtype not in (ir.DataType.INT32, ir.DataType.INT64) else list(_tables(value))
        if sizes:
            value.meta[TABLE_ROWS] = min(sizes)


def _tables(value: ir.Value) -> Iterator[int]:
    """Yield the rows of the tables [rows, width] that the elements of a value are looked up in."""
    for node, slot in value.uses():
        if not node.domain and node.op_type in _KEEP_ELEMENTS and slot == 0:
            yield from _tables(node.outputs[0])
        elif slot == 1 and (node.domain, node.op_type) in (("", "Gather"), (MICROSOFT_DOMAIN, "GatherBlockQuantized")):
            axis = node.attributes.get("axis", node.attributes.get("gather_axis"))
            table = _initializer(node.inputs[0])
            shape = None if table is None else dimensions(table)
            if (axis is None or axis.as_int() == 0) and shape and len(shape) == 2 and isinstance(shape[0], int):
                yield shape[0]


def _initializer(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer whose values a table has; ``None`` for integers, such as the sizes of a shape."""
    floating = value is not None and is_float(value)
    while value is not None and (node := value.producer()) is not None:
        if node.domain or node.op_type not in _KEEP_ROWS:
            return None
        value = node.inputs[0]
        floating = floating or node.op_type == "DequantizeLinear" or (value is not None and is_float(value))
    return value if floating and value is not None and value.is_initializer() else None


def mark_first_axes(graph: ir.Graph) -> None:
    """Record the inputs whose first axis is not the batch axis: time, or the first of a value for all examples."""
    _mark_time(graph)
    _mark_numbered(graph)
    _mark_common(graph)


def _mark_time(graph: ir.Graph) -> None:
    """Record the inputs whose first axis is the time of a recurrent node or of unrolled steps, and their batch axis."""
    layers = [node for node in all_nodes(graph) if node.op_type in RECURRENT]
    for value in graph.inputs:
        shape = dimensions(value)
        if not shape or value.name in graph.initializers:
            continue
        steps = shape[0] if isinstance(shape[0], int) else None
        if steps == 1 or not (layers or (len(shape) > 1 and (steps or 0) >= _FEWEST_STEPS)):
            continue
        time = BatchAxes({value: BatchAxis(0)}, shape[0]).follow(graph)
        node, kind = next((node for node in layers if _is_time(time, value, node)), None), ""
        at, axis = (None, None) if node is None else (node.inputs[0], 1 - integer(node, "layout", 0))
        if node is None and steps is not None and (node := _last_step(graph, time, steps)) is not None:
            at, kind = node.outputs[0], "unrolled steps up to the "
        if node is None or at is None:
            continue
        others = (BatchAxes({value: BatchAxis(own)}, shape[own]).follow(graph) for own in range(1, len(shape)))
        batch = [own for own, found in enumerate(others, 1) if at in found and axis in (None, found[at].axis)]
        words = f"the {kind}{node.op_type} {node.name or node.outputs[0].name!r}"
        value.meta[TIME_FIRST] = words, batch[0] if batch else None


def _is_time(axes: BatchAxes, value: ir.Value, node: ir.Node) -> bool:
    """Return whether an input's axis arrives at a recurrent node as its time, alone."""
    source = node.inputs[0]
    if source is None or axes.get(source) != BatchAxis(integer(node, "layout", 0)):
        return False
    return _size(axes, source) in _sizes(axes, value)


_FEWEST_STEPS: Final = 3
"""Fewest unrolled steps that are a recurrence: two elements may be a pair."""

_MULTIPLYING: Final = {"MatMul", "Gemm", *RECURRENT}


def _last_step(graph: ir.Graph, axes: BatchAxes, steps: int) -> ir.Node | None:
    """Return the node that adds the last element of an axis to a state of all others, in order.

    From element to element the state passes a matrix multiplication: a recurrence that an exporter has unrolled.
    """
    elements: dict[ir.Value, int] = {}
    states: dict[ir.Value, tuple[int, bool]] = {}  # its elements; whether it was multiplied after the last
    for node in graph:
        read = [each for each in (node.inputs[:1] if node.op_type in RECURRENT else node.inputs) if each is not None]
        picked = _picked(node, axes, steps)
        if picked:
            found = dict(zip(node.outputs, picked, strict=False))
            elements |= found
            states |= {value: (1, False) for value, index in found.items() if index == 0}
            continue
        of_elements = {elements[value] for value in read if value in elements and value not in states}
        count, multiplied = max((states[value] for value in read if value in states), default=(0, False))
        multiplies = node.op_type in _MULTIPLYING
        if count and of_elements == {count} and (multiplied or multiplies):
            if count + 1 == steps:
                return node
            states |= dict.fromkeys(node.outputs, (count + 1, multiplies))
        elif count and not of_elements:
            states |= dict.fromkeys(node.outputs, (count, multiplied or multiplies))
        elif not count and len(of_elements) == 1:
            elements |= dict.fromkeys(node.outputs, of_elements.pop())
    return None


def _picked(node: ir.Node, axes: BatchAxes, steps: int) -> list[int]:
    """Return which element of the axis each output of a node is; none for nodes that pick no single ones."""
    source = node.inputs[0] if node.inputs else None
    if source is None or source not in axes or node.domain or _size(axes, source) != steps:
        return []
    axis, rank = axes[source].axis, len(dimensions(source) or ())
    if node.op_type == "Slice":
        found = range(steps)[(slice_bounds(node, DECLARED, rank) or {}).get(axis, slice(0))]
        return [*found] if len(found) == 1 else []
    if integer(node, "axis", 0) % rank != axis:
        return []
    if node.op_type == "Gather":
        indices = constant_ints(node.inputs[1]) or ()
        return [index % steps for index in indices] if len(indices) == 1 else []
    return [*range(steps)] if node.op_type == "Split" and len(node.outputs) == steps else []


def _size(axes: BatchAxes, value: ir.Value) -> Dimension:
    """Return the size of the axis that was found for a value."""
    shape = dimensions(value)
    return None if shape is None else shape[axes[value].axis]


def _sizes(axes: BatchAxes, value: ir.Value) -> set[Dimension]:
    """Return the size of an input's axis, which inference gives a symbol behind the input where it has no name."""
    readers = [node for node, _ in value.uses() if _size(axes, value) is None and node.op_type not in RESHAPING]
    return {_size(axes, each) for each in (value, *(out for node in readers for out in node.outputs)) if each in axes}


_NUMBERS: Final = (
    "Add Cast Concat Expand Gather GatherND Identity Reshape Slice Split Squeeze Transpose Unsqueeze Where"
)
"""Operators behind which the integers of an input still number rows."""

_ROWS: Final = {"Gather": 0, "GatherElements": 0, "GatherND": 0, "Slice": 0, "ScatterElements": 2, "ScatterND": 2}
"""Operators that pick, cut or add up rows by integers, and the slot of the rows."""


def _mark_numbered(graph: ir.Graph) -> None:
    """Record the inputs whose rows an integer input numbers or bounds: nodes by edges or graphs, tokens by offsets."""
    integers, known = (ir.DataType.INT32, ir.DataType.INT64, None), _NUMBERS.split()
    numbers = {value for value in graph.inputs if value.dtype in integers}
    picked: list[tuple[ir.Value, int]] = []
    for node in all_nodes(graph) if numbers else ():
        picked += [rows for index in node.inputs[1:3] if index in numbers for rows in _rows(node, index)]
        if node.op_type in known and any(value in numbers for value in node.inputs):
            numbers.update(value for value in node.outputs if value.dtype in integers)
    for value in graph.inputs if picked else ():
        own = BatchAxes({value: BatchAxis(0)}, (dimensions(value) or (None,))[0]).follow(graph)
        found = [rows for rows, axis in picked if rows in own and own[rows].axis == axis]
        if value in found or any(_size(own, rows) in _sizes(own, value) - {None} for rows in found):
            value.meta[TIME_FIRST] = "", 0


def _rows(node: ir.Node, index: ir.Value | None) -> Iterator[tuple[ir.Value, int]]:
    """Yield the value whose rows a node picks, cuts or adds up by an index, and their axis."""
    rows = node.inputs[_ROWS[node.op_type]] if node.op_type in _ROWS else None
    given = constant_ints(node.inputs[3]) if node.op_type == "Slice" and len(node.inputs) > 3 else None
    axes = given or [integer(node, "axis", 0) + integer(node, "batch_dims", 0)]
    of_one_axis = len(axes) == 1 and (not node.op_type.endswith("ND") or (dimensions(index) or (0,))[-1] == 1)
    if rows is not None and rows is not index and dimensions(rows) and of_one_axis:
        yield rows, axes[0] % len(dimensions(rows) or ())


def _mark_common(graph: ir.Graph) -> None:
    """Record the inputs whose first axis has a fixed size and never becomes the batch axis, as a later one may."""
    others = [value for value in graph.inputs if TIME_FIRST not in value.meta]
    sizes = {value: shape[0] for value in others if (shape := dimensions(value))}
    fixed = {value: size for value, size in sizes.items() if isinstance(size, int)}
    batch = BatchAxes.of_inputs(graph, None)
    if not fixed or not batch:
        return
    batch.follow(graph)
    declared = {size for value, size in sizes.items() if value not in fixed} - {None}
    for value, size in fixed.items():
        for axis in [axis for axis, each in enumerate(dimensions(value) or ()) if not isinstance(each, int)]:
            if size != 1 and declared == {(dimensions(value) or ())[axis]}:  # the only first axis of others
                value.meta[TIME_FIRST] = "", axis
            own = BatchAxes({value: BatchAxis(axis)}, None).follow(graph)
            if any(found == batch.get(reached) for reached, found in own.items()):  # as in a state of layers
                value.meta[TIME_FIRST] = "", axis
        if size == 1 or TIME_FIRST in value.meta:
            continue
        own = BatchAxes({value: BatchAxis(0)}, size).follow(graph)
        is_followed = all(dimensions(reached) is not None for reached in own)
        if is_followed and not any(
            axis == batch.get(value, axis) for value, axis in own.items() if value.is_graph_output()
        ):
            value.meta[COMMON] = True
