"""Resize: a linear map along each axis, whose transpose carries the gradient back.

The same Resize, applied to the rows of an identity matrix, gives the matrix of an axis. So every mode follows the
runtime's own arithmetic, sizes may be known in the graph only, and where they are constant ONNX Runtime computes the
matrices once, when it loads the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.placement import (
    LAST,
    Size,
    joined,
    known_sizes,
    product_between,
    shaped,
    size_of,
    zeros,
)
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.errors import GradientError
from onnxtrain.graph import Value
from onnxtrain.graph.limits import check_table

_ATTRIBUTES = (
    "antialias",
    "coordinate_transformation_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "mode",
    "nearest_mode",
)
"""Attributes that determine the matrix of an axis; an extrapolation value is added to the output."""


RESIZE = "ResizeByMatrices"
"""The operator of the domain ``onnxtrain`` that resizes the last two axes, forward and in the gradient."""


class _Axis(NamedTuple):
    """One resized axis: its number in x and its position among all scales or sizes."""

    axis: int
    position: int
    all: int


@register_gradient("Resize", since=18)
def resize(node: Node, dy: Value) -> Gradients:
    """y = M_1 ⊗ M_2 ⊗ ... x, a matrix per resized axis: dx = M_1ᵀ ⊗ M_2ᵀ ⊗ ... dy."""
    axes = _resized_axes(node)
    factors = _replications(node, axes)
    if factors is not None:
        op = node.op
        mean = op.AveragePool(dy, kernel_shape=factors, strides=factors)
        return mean * float(np.prod(factors))
    matrices = resize_matrices(node)
    if matrices is not None:
        (dx,) = emit(node.op, RESIZE, dy, *matrices, like=[node.x], transposed=1)
        return dx
    for axis in reversed(axes):
        dy = _times_transposed(dy, _matrix(node, axis), axis.axis, size_of(node.x, axis.axis))
    return dy


@register_fused(RESIZE)
def resize_by_matrices(node: Node) -> Sequence[Value]:
    """From x and a matrix per axis, mostly zero: y = rowsᵀ x columns; with ``transposed`` y = rows x columnsᵀ."""
    op, rows, columns = node.op, node.input_required(1), node.input_required(2)
    if node.attribute("transposed", 0):
        return [rows @ (node.x @ op.Transpose(columns, perm=[1, 0]))]
    return [op.Transpose(rows, perm=[1, 0]) @ (node.x @ columns)]


def resizes_last_axes(node: Node) -> bool:
    """Return whether exactly the last two axes are resized."""
    rank = node.x.rank
    return rank is not None and rank > 1 and sorted(axis.axis for axis in _resized_axes(node)) == [rank - 2, rank - 1]


def resize_matrices(node: Node) -> tuple[Value, Value] | None:
    """Return the matrices [size of x, size of y] of the last two axes, where exactly these are resized; or ``None``."""
    if not resizes_last_axes(node):
        return None
    first, second = sorted(_resized_axes(node), key=lambda axis: axis.axis)
    return _matrix(node, first), _matrix(node, second)


def _resized_axes(node: Node) -> list[_Axis]:
    scales, sizes = node.input(2), node.input(3)
    given = node.attribute("axes")
    if given is None:
        given = list(range(_number_of_scales(node)))
    rank = node.x.rank
    axes = [axis % rank if rank is not None else axis for axis in given]
    if any(axis < 0 for axis in axes):
        node.rank()
    count = len(axes)
    crops = node.attribute("coordinate_transformation_mode") == "tf_crop_and_resize"
    factors = None if scales is None else scales.constant()
    found = []
    for position, axis in enumerate(axes):
        kept = factors is not None and factors.size and factors[position] == 1
        if sizes is not None and _stretches(node):
            kept = _same_size(node, sizes, axis, position)
        if crops or not kept:
            found.append(_Axis(axis, position, count))
    return found


def _number_of_scales(node: Node) -> int:
    for value in (node.input(2), node.input(3)):
        if value is not None and value.shape is not None and isinstance(value.shape[0], int) and value.shape[0]:
            return value.shape[0]
    return node.rank()


def _same_size(node: Node, sizes: Value, axis: int, position: int) -> bool:
    before, after = node.x.shape, node.y.shape
    known = sizes.constant()
    if before is None:
        return False
    if known is not None:
        return bool(before[axis] == known[position])
    return after is not None and before[axis] is not None and before[axis] == after[axis]


def _replications(node: Node, axes: Sequence[_Axis]) -> list[int] | None:
    """Per spatial axis how often each element is repeated, where Resize does nothing else; or ``None``."""
    transformation = node.attribute("coordinate_transformation_mode", "half_pixel")
    rounding = node.attribute("nearest_mode", "round_prefer_floor")
    repeats = (transformation == "asymmetric" and rounding == "floor") or (
        transformation in ("half_pixel", "half_pixel_symmetric") and rounding.startswith("round")
    )
    rank = node.x.rank
    if node.attribute("mode", "nearest") != "nearest" or not repeats or rank is None or not 3 <= rank <= 5:
        return None
    factors = [1] * rank
    for axis in axes:
        factor = _integer_factor(node, axis)
        if factor is None:
            return None
        factors[axis.axis] = factor
    return factors[2:] if axes and factors[:2] == [1, 1] else None


def _integer_factor(node: Node, axis: _Axis) -> int | None:
    scales = node.input(2)
    known = None if scales is None else scales.constant()
    if known is not None and known.size:
        scale = float(known[axis.position])
    elif not _stretches(node):
        scale = _common_scale(node).value
    else:
        before = None if node.x.shape is None else node.x.shape[axis.axis]
        after = None if node.y.shape is None else node.y.shape[axis.axis]
        if not isinstance(before, int) or not isinstance(after, int) or not before:
            return None
        scale = after / before
    return int(scale) if scale >= 1 and scale == int(scale) else None


def _matrix(node: Node, axis: _Axis) -> Value:
    """Mᵀ [size of x, size of y] of one axis."""
    op, size = node.op, size_of(node.x, axis.axis)
    identity = op.EyeLike(zeros(op, [size, size], node.x.dtype), dtype=int(node.x.dtype))
    roi = _region(node, axis)
    scales: Value | None = None
    sizes: Value | None = None
    if node.input(3) is not None and _stretches(node):
        sizes = _both_sizes(node, axis, size)
    elif node.input(3) is not None:
        scale = _common_scale(node)
        if scale.rounds_up(node, axis):
            return _rounded_matrix(node, axis, scale)
        scales = op.constant([1, scale.value], np.float32)
    else:
        scale_of_axis = op.cast(_item(node.input_required(2), axis.position), ir.DataType.FLOAT)
        scales = op.Concat(op.constant([1], np.float32), scale_of_axis, axis=0)
    rows = op.Resize(identity, roi, scales, sizes, **node.attributes(*_ATTRIBUTES))
    return rows.with_shape(known_sizes([size, size_of(node.y, axis.axis)]))


def _both_sizes(node: Node, axis: _Axis, size: Size) -> Value:
    op, sizes = node.op, node.input_required(3)
    known = sizes.constant()
    both = joined(op, [size, _item(sizes, axis.position) if known is None else int(known[axis.position])])
    # Their number has to be plain (workarounds: sizes of Resize).
    return both if node.x.rank is not None and known is not None else op.Reshape(both, op.ints(2))


def _item(vector: Value, at: int) -> Value:
    """One element of a vector, as a vector; of a known one a constant."""
    op, known = vector.op, vector.constant()
    return op.Slice(vector, op.ints(at), op.ints(at + 1)) if known is None else op.constant(known[at : at + 1])


def _region(node: Node, axis: _Axis) -> Value | None:
    """Return the region of interest of an axis: all rows of the identity matrix, the node's region of its columns."""
    roi = node.input(1)
    if roi is None or node.attribute("coordinate_transformation_mode") != "tf_crop_and_resize":
        return None
    op = node.op
    ends = [_item(roi, at) for at in (axis.position, axis.position + axis.all)]
    zero, one = op.constant([0], roi.dtype), op.constant([1], roi.dtype)
    return op.Concat(zero, ends[0], one, ends[1], axis=0)


def _stretches(node: Node) -> bool:
    """Return whether each axis gets the given size, without regard to the aspect ratio."""
    return bool(node.attribute("keep_aspect_ratio_policy", "stretch") == "stretch")


class _Scale(NamedTuple):
    """The scale that all axes share where sizes keep the aspect ratio: a fraction of the axis that determines it."""

    after: int
    before: int

    @property
    def value(self) -> float:
        """The scale in float32, in which Resize computes it."""
        return float(np.float32(self.after) / np.float32(self.before))

    def rounds_up(self, node: Node, axis: _Axis) -> bool:
        """Return whether an axis rounds up to one element more, which a Resize by scales cuts off."""
        assert node.x.static_shape is not None
        exact = np.float32(node.x.static_shape[axis.axis]) * np.float32(self.value)
        return bool(np.floor(exact) != np.floor(exact + np.float32(0.5)))


def _common_scale(node: Node) -> _Scale:
    """The least or largest of the scales that the sizes imply."""
    policy = node.attribute("keep_aspect_ratio_policy")
    sizes, shape = node.input_required(3).constant(), node.x.static_shape
    if sizes is None or shape is None:
        raise GradientError(
            f"{describe(node.ir)}: with keep_aspect_ratio_policy={policy!r} the gradient needs constant sizes "
            f"and a static shape of {node.x.name!r}, which is {node.x.shape}; fix the input's shape or use "
            "scales."
        ).about(node.x.name, got=node.x.shape)
    axes = node.attribute("axes") or range(len(shape))
    scales = [_Scale(int(size), shape[axis]) for axis, size in zip(axes, sizes, strict=True)]
    return (min if policy == "not_larger" else max)(scales, key=lambda scale: scale.value)


def _rounded_matrix(node: Node, axis: _Axis, scale: _Scale) -> Value:
    """Mᵀ of an axis whose size is rounded up, which takes a Resize by sizes with the axis that determines the scale."""
    op, sizes, shape = node.op, node.input_required(3).constant(), node.x.static_shape
    assert sizes is not None
    assert shape is not None
    size, shared = shape[axis.axis], math.gcd(scale.after, scale.before)
    after, before = scale.after // shared, scale.before // shared
    check_table(size, size, before)
    rows = op.constant(np.repeat(np.eye(size)[None, :, :, None], before, axis=3), node.x.dtype)
    roi = _region(node, axis)
    if roi is not None:
        begin, end = op.constant([0], roi.dtype), op.constant([1], roi.dtype)
        roi = op.Concat(_item(roi, 1), begin, _item(roi, 3), end, axis=0)
    made = op.Resize(
        rows,
        roi,
        None,
        op.ints(int(sizes[axis.position]), after),
        axes=[2, 3],
        **node.attributes("keep_aspect_ratio_policy", *_ATTRIBUTES),
    )
    first = op.Slice(made, op.ints(0), op.ints(1), op.ints(3))
    return op.Reshape(first, op.ints(size, -1)).with_shape((size, None))


def _times_transposed(dy: Value, matrix: Value, axis: int, size: Size) -> Value:
    """Contract one axis of dy with the columns of a matrix Mᵀ [size of x, size of y]."""
    op, shape = dy.op, dy.shape
    if shape is not None and axis == len(shape) - 1 and len(shape) > 1:
        return dy @ op.Transpose(matrix, perm=[1, 0])
    if shape is not None and axis == len(shape) - 2:
        return matrix @ dy
    before = product_between(dy, 0, axis)
    after = product_between(dy, axis + 1, None)
    moved = matrix @ shaped(dy, [before, size_of(dy, axis), after])
    if dy.rank is not None:
        sizes = [size_of(dy, a) for a in range(dy.rank)]
        sizes[axis] = size
        return shaped(moved, sizes)
    whole = op.Shape(dy)
    ends = op.Slice(whole, op.ints(0), op.ints(axis)), op.Slice(whole, op.ints(axis + 1), op.ints(LAST))
    return op.Reshape(moved, op.Concat(ends[0], joined(op, [size]), ends[1], axis=0), allowzero=1)
