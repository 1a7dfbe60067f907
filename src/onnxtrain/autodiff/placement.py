"""Helpers of rules that move elements: partly known sizes, and the adjoints of slicing and gathering.

The adjoint of taking rows out of a tensor adds them back at their positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import fits

Size = int | Value
"""The size of one axis: a number, or a one-element int64 value where only the graph knows it."""

LAST = np.iinfo(np.int64).max
"""An end of a slice that means "to the end"."""

FIRST = np.iinfo(np.int64).min
"""An end of a slice with a negative step that means "down to the first"."""

_SMALL_TABLE = 128
"""Rows up to which a matmul with one-hot rows is faster than ScatterElements (measured on ONNX Runtime's CPU)."""


def size_of(value: Value, axis: int) -> Size:
    """The size of an axis, as a number where it is known."""
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else value.op.dimension(value, axis)


def sizes_of(value: Value, axes: Sequence[int]) -> list[Size]:
    """The sizes of several axes."""
    return [size_of(value, axis) for axis in axes]


def as_value(op: Builder, size: Size) -> Value:
    """A size as a one-element int64 value."""
    return op.ints(size) if isinstance(size, int) else size


def add(left: Size, right: Size) -> Size:
    """The sum of two sizes; computed now where both are numbers."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if isinstance(left, int):
        left, right = right, left
    assert isinstance(left, Value)
    if isinstance(right, int):
        return left + left.op.ints(right) if right else left
    return left + right


def subtract(left: Size, right: Size) -> Size:
    """The difference of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left - right
    if isinstance(right, int):
        return add(left, -right)
    return as_value(right.op, left) - right


def multiply(left: Size, right: Size) -> Size:
    """The product of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    if isinstance(left, int):
        left, right = right, left
    assert isinstance(left, Value)
    if isinstance(right, int):
        return left if right == 1 else left * left.op.ints(right)
    return left * right


def from_start(position: Value, size: Size) -> Value:
    """A position counted from the start of an axis, from one of either sign."""
    op = position.op
    return op.Where(op.binary("Less", position, 0), op.Add(position, as_value(op, size)), position)


def divide(size: Size, number: int) -> Size:
    """The integer quotient of a size that is not negative."""
    return size // number if isinstance(size, int) else size / size.op.ints(number)


def product(sizes: Sequence[Size]) -> Size:
    """The product of several sizes."""
    result: Size = 1
    for size in sizes:
        result = multiply(result, size)
    return result


def product_between(value: Value, start: int, end: int | None) -> Size:
    """The number of elements over the axes start to end, for any rank."""
    op = value.op
    if start == 0 and end == 0:
        return 1
    if value.rank is not None:
        return product(sizes_of(value, range(value.rank)[start:end]))
    return op.ReduceProd(op.Shape(value, start=start, end=end), keepdims=1).with_shape((1,))


def bounded(op: Builder, size: Size, high: Size | None = None) -> Size:
    """Clamp a size to [0, high]."""
    size = max(size, 0) if isinstance(size, int) else op.Max(size, op.ints(0))
    if high is None:
        return size
    if isinstance(size, int) and isinstance(high, int):
        return min(size, high)
    return op.Min(as_value(op, size), as_value(op, high))


def joined(op: Builder, sizes: Sequence[Size]) -> Value:
    """Join sizes to one int64 vector: a constant where all are numbers."""
    parts: list[Value] = []
    numbers: list[int] = []
    for size in sizes:
        if isinstance(size, int):
            numbers.append(size)
            continue
        if numbers:
            parts.append(op.ints(*numbers))
            numbers = []
        parts.append(size)
    if numbers or not parts:
        parts.append(op.ints(*numbers))
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)


def shaped(value: Value, sizes: Sequence[Size]) -> Value:
    """Reshape to sizes, some of which may be known only in the graph."""
    op = value.op
    known = tuple(size if isinstance(size, int) else None for size in sizes)
    if value.shape == known and None not in known:
        return value
    return op.Reshape(value, joined(op, sizes), allowzero=1).with_shape(known)


def zeros(op: Builder, sizes: Sequence[Size], dtype: ir.DataType) -> Value:
    """Zeros of a type and of sizes, some of which may be known only in the graph."""
    fill = ir.tensor(np.zeros(1, dtype=dtype.numpy()))
    known = tuple(size if isinstance(size, int) else None for size in sizes)
    return op.ConstantOfShape(joined(op, sizes), value=fill).with_shape(known)


def identity_matrix(op: Builder, rows: Size, columns: Size, dtype: ir.DataType) -> Value:
    """Ones on the diagonal of a matrix: a constant where the sizes are known, and small."""
    if isinstance(rows, int) and isinstance(columns, int) and fits(rows, columns):
        return op.constant(np.eye(rows, columns), dtype)
    return op.EyeLike(zeros(op, [rows, columns], dtype), dtype=int(dtype))


def pad_to(block: Value, axes: Sequence[int], begins: Sequence[Size], sizes: Sequence[Size]) -> Value:
    """Pad a block with zeros: along each of ``axes`` it begins at ``begins`` and the result has ``sizes``."""
    op = block.op
    shifts: list[tuple[int, Size, Size]] = []
    for axis, begin, size in zip(axes, begins, sizes, strict=True):
        behind = subtract(subtract(size, begin), size_of(block, axis))
        if begin != 0 or behind != 0:
            shifts.append((axis, begin, behind))
    if not shifts:
        return block
    pads = joined(op, [shift[1] for shift in shifts] + [shift[2] for shift in shifts])
    return op.Pad(block, pads, None, op.ints(*(shift[0] for shift in shifts)))


def reversed_along(value: Value, axis: int) -> Value:
    """The elements of an axis in the opposite order."""
    op = value.op
    return op.Slice(value, op.ints(-1), op.ints(FIRST), op.ints(axis), op.ints(-1)).with_shape(value.shape)


def scatter_rows(rows: Value, indices: Value, count: Size) -> Value:
    """Add rows [p, m, q] into zeros [p, count, q]: table[:, indices[m], :] += rows[:, m, :]; indices of either sign.

    ScatterND with reduction would be shorter, but ONNX Runtime adds repeated indices from several threads at
    once and loses some of them (workarounds: races of ScatterND). For small tables a matmul with the one-hot matrix is
    faster.
    """
    op = rows.op
    if isinstance(count, int) and count <= _SMALL_TABLE:
        # For int64 and float32 everywhere (workarounds: types of OneHot).
        wide = op.cast(indices, ir.DataType.INT64)
        chosen = op.OneHot(wide, op.constant(count, np.int64), op.constant([0, 1], np.float32), axis=0)
        return op.MatMul(op.cast(chosen, rows.dtype), rows)
    sizes = sizes_of(rows, range(3))
    table = zeros(op, [sizes[0], count, sizes[2]], rows.dtype)
    column = op.Unsqueeze(indices, op.ints(1))
    return op.ScatterElements(table, op.Expand(column, op.shape_of(rows)), rows, axis=1, reduction="add")


def flat_scatter(x: Value, positions: Value, dy: Value) -> Value:
    """Add the elements of dy to zeros of the shape of x at positions in its flattened elements."""
    op = x.op
    start = zeros(op, [product_between(x, 0, None)], x.dtype)
    flat = op.ints(-1)
    added = op.ScatterElements(start, op.Reshape(positions, flat), op.Reshape(dy, flat), axis=0, reduction="add")
    return op.reshape_like(added, x)


def flat_positions(x: Value) -> Value:
    """The position of every element of x among its flattened elements, in the shape of x."""
    return x.op.reshape_like(count_to(x.op, product_between(x, 0, None)), x)


def count_to(op: Builder, size: Size) -> Value:
    """0, 1, ..., size - 1."""
    end = op.constant(size, np.int64) if isinstance(size, int) else op.Squeeze(size)
    return op.Range(op.constant(0, np.int64), end, op.constant(1, np.int64))


def as_number(op: Builder, size: Size, dtype: ir.DataType) -> Value:
    """A size as a 0-d value of a floating type."""
    return op.constant(size, dtype) if isinstance(size, int) else op.cast(op.Squeeze(size), dtype)
