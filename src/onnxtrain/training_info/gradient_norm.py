"""The global norm of gradients, summed in an order that does not depend on how gradients are split over processes.

The squares of each row of a gradient [rows, columns] are summed in its own type, the sums of all rows in float64, and
the sums of all gradients in the order of the parameters. A process that has only some rows computes their sums with the
same operator, so that the norm has the same bits however many processes share the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir import Builder, Value

_LONGEST_ROW = 1 << 14
"""Elements of a row where the shape allows it: a row that two processes share is sent to both."""


def row_axes(shape: Sequence[int]) -> int:
    """Return the number of leading axes whose indices count the rows of a gradient."""
    axes = min(1, max(0, len(shape) - 1))
    while axes < len(shape) - 1 and math.prod(shape[axes:]) > _LONGEST_ROW:
        axes += 1
    return axes


def row_squares(op: Builder, gradient: Value, shape: Sequence[int]) -> Value:
    """Sum the squares of each row of a gradient [shape]; the result has the axes that count rows."""
    if not shape:
        return gradient * gradient
    axes = row_axes(shape)
    squares = op.ReduceSumSquare(gradient, op.ints(*range(axes, len(shape))), keepdims=0)
    return squares.with_shape(tuple(shape[:axes]))


def norm_of(op: Builder, squares: Sequence[Value]) -> Value:
    """Return the square root of the sum of the rows' squares of all gradients, in float64."""
    return op.Sqrt(op.sum_of([op.ReduceSum(op.cast(rows, ir.DataType.DOUBLE), keepdims=0) for rows in squares]))
