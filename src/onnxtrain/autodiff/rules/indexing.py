"""Operators that gather or scatter elements: Gather, Compress, TopK, ScatterElements with its reductions and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import (
    LAST,
    Size,
    add,
    as_value,
    count_to,
    flat_positions,
    flat_scatter,
    from_start,
    joined,
    known_sizes,
    pad_to,
    product,
    scatter_rows,
    shaped,
    size_of,
    sizes_of,
)
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.graph.value import Dimension


@register_gradient("Gather")
def gather(node: Node, dy: Value) -> Gradients:
    """y = x[..., indices, ...]: dx = zeros with dy added at the indices."""
    indices = node.input_required(1)
    axis = node.attribute("axis", 0)
    if indices.rank == 0:
        return _put_back_one(node, dy, indices, axis), None
    return _put_back_rows(node, dy, indices, axis), None


@register_gradient("ArrayFeatureExtractor", domain=MACHINE_LEARNING_DOMAIN)
def array_feature_extractor(node: Node, dy: Value) -> Gradients:
    """y = x[..., indices], [1, K] for x [F]: dx = zeros with dy added at the indices."""
    op = node.op
    indices = op.Reshape(node.input_required(1), op.ints(-1))
    return _put_back_rows(node, op.Reshape(dy, op.ints(-1)) if node.x.rank == 1 else dy, indices, -1), None


def _put_back_one(node: Node, dy: Value, index: Value, axis: int) -> Value:
    """The gradient of taking one slice: zeros with dy at its position."""
    op, x = node.op, node.x
    size, known = size_of(x, axis), index.constant()
    if known is not None:
        begin = int(known) if known >= 0 else add(size, int(known))
    else:
        begin = from_start(op.cast(op.Reshape(index, op.ints(1)), ir.DataType.INT64), size)
    block = op.Unsqueeze(dy, op.ints(axis))
    return pad_to(block, [axis], [begin], [size])


def _put_back_rows(node: Node, dy: Value, indices: Value, axis: int) -> Value:
    """The gradient of taking rows along an axis."""
    op, x = node.op, node.x
    wide = op.cast(indices, ir.DataType.INT64)
    return emit(op, "GatherGradient", dy, wide, op.shape_of(x), like=[x], axis=axis)[0]


@register_fused("GatherGradient")
def gather_gradient(node: Node) -> Sequence[Value]:
    """From dy, indices and the shape of the data: zeros of that shape with dy added at the indices along an axis.

    As [before, rows, after], rows are added to zeros. Another term of the gradient, if given and not of shape [0], is
    added to the result. If ``taken`` is given, of the shape of the indices, the rows of dy at these indices are added.
    """
    op, dy, indices, shape = node.op, node.x, node.input_required(1), node.input_required(2)
    axis, known, taken = node.attribute("axis"), node.y.shape, node.input(4)
    if taken is not None:
        dy = op.Gather(dy, taken, axis=axis)
    flat = indices if indices.rank == 1 else op.Reshape(indices, op.ints(-1))
    before = _product_of(shape, known, 0, axis)
    after = _product_of(shape, known, axis + 1, None) if axis != -1 else 1
    size = known[axis] if known is not None else None
    count = size if isinstance(size, int) else op.Gather(shape, op.ints(axis))
    rows = scatter_rows(shaped(dy, [before, size_of(flat, 0), after]), flat, count)
    result = op.reshape(rows, shape, known)
    other = _other_term(node)
    return [result if other is None else op.Add(other, result)]


def _other_term(node: Node) -> Value | None:
    """The term that is added to the sums, unless it is the placeholder of shape [0] before the rows that are taken."""
    other, taken = node.input(3), node.input(4)
    if other is None or other.static_shape == (0,):
        return None
    is_placeholder = taken is not None and other.rank == 1 and node.x.rank != 1  # of dy, which has the rank of the sums
    return None if is_placeholder else other


@register_gradient("GatherGradient", domain=ONNXTRAIN_DOMAIN)
def gather_gradient_gradient(node: Node, d: Value) -> Gradients:
    """y = zeros or another term with x added at the indices along an axis: dx = dy at the indices, dother = dy.

    Where rows of x are taken, dx is the sum of the rows of dy, taken at the indices, where they were taken.
    """
    op, axis, indices, taken = node.op, node.attribute("axis"), node.input_required(1), node.input(4)
    if taken is None:
        dx = op.Gather(d, indices, axis=axis).with_shape(node.x.shape)
    else:
        none = op.constant([], node.x.dtype)
        (dx,) = emit(op, "GatherGradient", d, taken, op.shape_of(node.x), none, indices, like=[node.x], axis=axis)
    return dx, None, None, None if _other_term(node) is None else d, None


def _product_of(shape: Value, known: tuple[Dimension, ...] | None, start: int, end: int | None) -> Size:
    """Return the number of elements of the axes start to end, a constant as far as sizes are known."""
    if start == 0 and end == 0:
        return 1
    sizes = () if known is None else known[start:end]
    if known is not None and all(isinstance(size, int) for size in sizes):
        return math.prod(size for size in sizes if isinstance(size, int))
    op = shape.op
    ends = op.ints(LAST if end is None else end)
    return op.ReduceProd(op.Slice(shape, op.ints(start), ends), keepdims=1).with_shape((1,))


@register_gradient("GatherElements")
def gather_elements(node: Node, dy: Value) -> Gradients:
    """y_i = x at index_i along an axis: dx = zeros with dy added at the indices."""
    op, axis = node.op, node.attribute("axis", 0)
    zeros = op.zeros_like(node.x)
    return op.ScatterElements(zeros, node.input_required(1), dy, axis=axis, reduction="add"), None


@register_gradient("GatherND")
def gather_nd(node: Node, dy: Value) -> Gradients:
    """y[b, i] = x[b, indices[b, i]] with tuples of indices: dx = zeros with dy added there."""
    op, x = node.op, node.x
    indices, batch = node.input_required(1), node.attribute("batch_dims", 0)
    length = None if indices.shape is None else indices.shape[-1]
    if not isinstance(length, int) or x.rank is None or batch + length == x.rank:
        return flat_scatter(x, op.GatherND(flat_positions(x), indices, batch_dims=batch), dy), None
    sizes = sizes_of(x, range(x.rank))  # of rows, as Gather takes them, and of one row
    rows, width = product(sizes[: batch + length]), product(sizes[batch + length :])
    numbers = op.Reshape(count_to(op, rows), joined(op, sizes[: batch + length]), allowzero=1)
    taken = op.Reshape(op.GatherND(numbers, indices, batch_dims=batch), op.ints(-1))
    flat = op.Reshape(dy, joined(op, [size_of(taken, 0), width]), allowzero=1)
    (added,) = emit(op, "GatherGradient", flat, taken, joined(op, [rows, width]), like=[None], axis=0)
    added.ir.dtype = x.dtype
    return op.reshape_like(added.with_shape(known_sizes([rows, width])), x), None


@register_gradient("Compress")
def compress(node: Node, dy: Value) -> Gradients:
    """y = slices along an axis, or elements, of x where the condition holds: dx = dy there, else 0."""
    op, x = node.op, node.x
    chosen = op.Reshape(op.NonZero(node.input_required(1)), op.ints(-1))
    axis = node.attribute("axis")
    if axis is not None:
        return _put_back_rows(node, dy, chosen, axis), None
    return flat_scatter(x, chosen, dy), None


@register_gradient("TopK")
def top_k(node: Node, dvalues: Value, dindices: None) -> Gradients:
    """values = x at indices along an axis: dx = zeros with dvalues at the indices."""
    op = node.op
    axis = node.attribute("axis", -1)
    return op.ScatterElements(op.zeros_like(node.x), node.outputs[1], dvalues, axis=axis), None


@register_gradient("Unique")
def unique(node: Node, dy: Value, *_positions: None) -> Gradients:
    """y = the first of each distinct element (or slice along an axis) of x: dx = zeros with dy at their positions."""
    x, axis = node.x, node.attribute("axis")
    first = node.output_required(1, ir.DataType.INT64, (None,))
    if axis is not None:
        return _put_back_rows(node, dy, first, axis)
    return flat_scatter(x, first, dy)


@register_gradient("OneHot")
def one_hot(node: Node, dy: Value) -> Gradients:
    """y = values[1] at the indices, values[0] elsewhere: dvalues = the sums of dy over each."""
    op, values = node.op, node.input_required(2)
    mask = op.OneHot(node.x, node.input_required(1), op.constant([0, 1], values.dtype), axis=node.attribute("axis"))
    one = op.ints(1)
    on = op.Reshape(op.ReduceSum(dy * mask, keepdims=0), one)
    off = op.Reshape(op.ReduceSum(dy * (1 - mask), keepdims=0), one)
    return None, None, op.Concat(off, on, axis=0)


@register_gradient("TensorScatter")
def tensor_scatter(node: Node, dy: Value) -> Gradients:
    """y = past with updates written from a position on: dpast = dy without them, dupdate = dy there."""
    op, past, update = node.op, node.x, node.input_required(1)
    begins, axis = node.input(2), node.attribute("axis", -2)
    mode = node.attribute("mode", "linear")
    dpast = op.TensorScatter(dy, op.zeros_like(update), begins, axis=axis, mode=mode)
    rank = node.rank(update)
    axis %= rank
    positions = op.Reshape(count_to(op, size_of(update, axis)), op.ints(*([-1] + [1] * (rank - 1 - axis))))
    if begins is not None:
        positions = op.Add(op.Reshape(begins, op.ints(*([-1] + [1] * (rank - 1)))), positions)
    if mode == "circular":
        positions = op.Mod(positions, as_value(op, size_of(past, axis)))
    positions = op.Expand(positions, op.shape_of(update))
    return dpast, op.GatherElements(dy, positions, axis=axis), None


Scatter = Callable[[Value, Value, str | None], Value]
"""(base, updates, reduction) -> base with the updates at the node's indices."""

Gather = Callable[[Value], Value]
"""Takes the elements at the node's indices, in the shape of the updates."""


@register_gradient("ScatterElements", "ScatterND")
def scatter(node: Node, dy: Value) -> Gradients:
    """y = x with updates at indices along an axis, or at tuples of them: alone or by sum, product, maximum, minimum."""
    op, indices, updates = node.op, node.input_required(1), node.input_required(2)
    along = {} if node.operator == "ScatterND" else {"axis": node.attribute("axis", 0)}
    there, back = getattr(op, node.operator), getattr(op, node.operator.replace("Scatter", "Gather"))

    def put(base: Value, updates: Value, reduction: str | None) -> Value:
        made: Value = there(base, indices, updates, **along, reduction=reduction)
        return made

    def take(value: Value) -> Value:
        made: Value = back(value, indices, **along)
        return made.with_shape(updates.shape)

    reduction = node.attribute("reduction", "none")
    if reduction == "none":
        return put(dy, op.zeros_like(updates), None), None, take(dy)
    if reduction == "add":
        return dy, None, take(dy)
    return (_multiplied if reduction == "mul" else _shared_by_equals)(node, dy, put, take)


def _multiplied(node: Node, dy: Value, scatter: Scatter, gather: Gather) -> Gradients:
    """The product of the other operands, exact where some are zero: zeros are counted, not divided by."""
    op, x, updates = node.op, node.x, node.input_required(2)
    x_zero, u_zero = op.binary("Equal", x, 0), op.binary("Equal", updates, 0)
    x_factor, u_factor = op.Where(x_zero, op.ones_like(x), x), op.Where(u_zero, op.ones_like(updates), updates)
    x_count, u_count = op.cast(x_zero, x.dtype), op.cast(u_zero, x.dtype)
    rest = dy * scatter(x_factor, u_factor, "mul")
    zeros = scatter(x_count, u_count, "add")
    dx = op.Where(op.Equal(zeros, x_count), rest / x_factor, op.scalar(0, x))
    du = op.Where(op.Equal(gather(zeros), u_count), gather(rest) / u_factor, op.scalar(0, x))
    return dx, None, du


def _shared_by_equals(node: Node, dy: Value, scatter: Scatter, gather: Gather) -> Gradients:
    op, x, updates = node.op, node.x, node.input_required(2)
    x_equal = op.cast(op.Equal(x, node.y), x.dtype)
    u_equal = op.cast(op.Equal(updates, gather(node.y)), x.dtype)
    share = dy / scatter(x_equal, u_equal, "add")
    return x_equal * share, None, u_equal * gather(share)
