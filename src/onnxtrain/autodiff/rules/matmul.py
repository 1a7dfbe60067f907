"""Matrix multiplications and determinants: MatMul, Gemm, Det."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import LAST, count_to, size_of, subtract
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value


@register_gradient("MatMul")
def matmul(node: Node, dy: Value) -> Gradients:
    """y = a b: da = dy bᵀ, db = aᵀ dy, summed over batch axes that broadcast (as numpy.matmul)."""
    a, b = node.input_required(0), node.input_required(1)
    if b.rank == 2:
        return _times_matrix(node.op, a, b, dy)
    if a.rank is None or b.rank is None:
        return _of_unknown_rank(node.op, a, b, dy)
    if a.rank == 1 or b.rank == 1:
        return _with_vector(node.op, a, b, dy)
    op = node.op
    return op.reduce_to(dy @ op.transpose_last(b), a), op.reduce_to(op.transpose_last(a) @ dy, b)


def _times_matrix(op: Builder, a: Value, b: Value, dy: Value) -> Gradients:
    """A matrix on the right: the batch axes of a [..., k] are more rows, so each gradient is one Gemm."""
    rows_dy, rows_a = rows(op, dy), rows(op, a)
    da = op.Gemm(rows_dy, b, transB=1)
    db = op.Gemm(rows_a, rows_dy, transA=1)
    return op.reshape_like(da.with_shape(rows_a.shape), a), db


def rows(op: Builder, x: Value) -> Value:
    """Flatten all axes but the last: [rows, columns]."""
    if x.rank == 2:
        return x
    static = x.static_shape
    if static is not None:
        return op.reshape(x, (int(np.prod(static[:-1])), static[-1]))
    columns = None if x.shape is None else x.shape[-1]
    return op.Flatten(x, axis=-1).with_shape((None, columns))


def _with_vector(op: Builder, a: Value, b: Value, dy: Value) -> Gradients:
    """A vector on one side or on both."""
    last = op.ints(-1)
    if a.rank == 1 and b.rank == 1:
        return dy * b, dy * a
    if b.rank == 1:  # [..., m, k] [k]: an outer product and a sum over all rows
        da = op.Unsqueeze(dy, last) * b
        return da, op.MatMul(op.Reshape(dy, last), rows(op, a)).with_shape(b.shape)
    # [k] [..., k, n]
    row = op.Unsqueeze(dy, op.ints(-2))
    products = op.MatMul(b, op.Unsqueeze(dy, last))
    assert b.rank is not None
    da = op.ReduceSum(products, op.ints(*range(b.rank - 2), b.rank - 1), keepdims=0)
    return da.with_shape(a.shape), op.Unsqueeze(a, last) * row


def _of_unknown_rank(op: Builder, a: Value, b: Value, dy: Value) -> Gradients:
    """The gradients for unknown ranks: the graph turns vectors into matrices, which have batch axes."""
    shape_a, shape_b, shape_dy, one = op.Shape(a), op.Shape(b), op.Shape(dy), op.ints(1)
    rank_a, rank_b = op.Shape(shape_a), op.Shape(shape_b)
    two = op.ints(2)
    full_a = op.Slice(op.Concat(one, shape_a, axis=0), op.Neg(op.Max(rank_a, two)), op.ints(LAST))
    full_b = op.Slice(op.Concat(shape_b, one, axis=0), op.ints(0), op.Max(rank_b, two))
    kept = op.Min(rank_a, two) + op.Min(rank_b, two) - 2  # how many of the axes rows and columns y has
    batch = op.Slice(shape_dy, op.ints(0), op.Shape(shape_dy) - kept)
    rows = op.Slice(full_a, op.ints(-2), op.ints(-1))
    columns = op.Slice(full_b, op.ints(-1), op.ints(LAST))
    matrices_a, matrices_b = op.reshape(a, full_a), op.reshape(b, full_b)
    matrices_dy = op.reshape(dy, op.Concat(batch, rows, columns, axis=0))
    da = op.reduce_to(op.MatMul(matrices_dy, op.transpose_last(matrices_b)), matrices_a)
    db = op.reduce_to(op.MatMul(op.transpose_last(matrices_a), matrices_dy), matrices_b)
    return op.reshape(da, shape_a), op.reshape(db, shape_b)


@register_gradient("Gemm")
def gemm(node: Node, dy: Value) -> Gradients:
    """y = alpha a b + beta c: da = alpha dy bᵀ, db = alpha aᵀ dy (each with its transposition), dc = beta dy."""
    op, alpha, beta = node.op, node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    a, b, c = node.input_required(0), node.input_required(1), node.input(2)
    turned_a, turned_b = bool(node.attribute("transA", 0)), bool(node.attribute("transB", 0))

    def product(left: Value, right: Value, turn_left: bool, turn_right: bool) -> Value:
        return op.Gemm(
            left,
            right,
            alpha=None if alpha == 1.0 else alpha,
            transA=int(turn_left) or None,
            transB=int(turn_right) or None,
        )

    da = product(b, dy, turned_b, True) if turned_a else product(dy, b, False, not turned_b)
    db = product(dy, a, True, turned_a) if turned_b else product(a, dy, not turned_a, False)
    return da, db, None if c is None else op.reduce_to(dy * beta, c)


@register_gradient("Det")
def determinant(node: Node, dy: Value) -> Gradients:
    """y = det x: dx = dy cof(x) [..., n, n], where cof(x)ᵢⱼ = (-1)ⁱ⁺ʲ det(x without row i and column j)."""
    return emit(node.op, "DetGradient", dy, node.x, like=[node.x])


@register_fused("DetGradient")
def determinant_gradient(node: Node) -> Sequence[Value]:
    """Cofactors rather than y x⁻ᵀ: ONNX has no inverse, and a singular x has a gradient, too."""
    op, dy, x = node.op, node.x, node.input_required(1)
    size = None if x.shape is None else x.shape[-1]
    n = op.dimension(x, -1)
    if size == 1:
        return [op.reshape_like(dy, x)]
    numbers = count_to(op, size_of(x, -1))
    rows = op.Unsqueeze(numbers, op.ints(1))
    others = op.Unsqueeze(count_to(op, subtract(size_of(x, -1), 1)), op.ints(0))
    without = others + op.cast(op.GreaterOrEqual(others, rows), others.dtype)  # [n, n - 1]: all but i
    flat = op.reshape(x, op.Concat(op.ints(-1), n, n, axis=0))
    minors = op.Gather(op.Gather(flat, without, axis=1), without, axis=3)  # [batch, n, n - 1, n, n - 1]
    cofactors = op.Det(op.Transpose(minors, perm=[0, 1, 3, 2, 4]))
    odd = op.Mod(rows + op.Unsqueeze(numbers, op.ints(0)), op.ints(2))
    signed = cofactors * op.cast(1 - 2 * odd, x.dtype)
    return [op.reshape_like(signed * op.reshape(dy, (-1, 1, 1)), x)]
