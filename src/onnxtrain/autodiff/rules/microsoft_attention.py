"""Attention and MultiHeadAttention of ONNX Runtime's own domain, in standard operators."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import as_number, count_to, size_of
from onnxtrain.autodiff.registry import register_body
from onnxtrain.autodiff.rules.microsoft import DOMAIN, refuse
from onnxtrain.graph import Value


class _Heads(NamedTuple):
    """Query [b, heads, s, n], keys [b, heads, t, n] and values [b, heads, t, m], the cached ones first."""

    query: Value
    keys: Value
    values: Value
    past: Value | None = None
    square: bool = True


@register_body("Attention", domain=DOMAIN)
def attention(node: Node) -> list[Value | None]:
    """y = softmax(Q Kᵀ scale + mask) V per head, with [Q K V] = X W + b; K and V follow the KV cache."""
    op, bias, past = node.op, node.input(2), node.input(4)
    refuse(node, bool(node.attribute("do_rotary", 0)), "rotary embedding inside")
    refuse(node, bool(node.attribute("past_present_share_buffer", 0)), "one buffer for past and present")
    total = node.x @ node.input_required(1)
    total = total if bias is None else total + bias
    sizes = node.attribute("qkv_hidden_sizes")
    if sizes is None:
        q, k, v = op.several("Split", total, outputs=3, axis=-1, num_outputs=3)
    else:
        q, k, v = op.several("Split", total, op.ints(*sizes), outputs=3, axis=-1)
    heads = int(node.attribute("num_heads"))
    q, k, v = (_heads(part, heads) for part in (q, k, v))
    if past is None:
        parts = _Heads(q, k, v)
    else:
        before = op.several("Split", past, outputs=2, axis=0, num_outputs=2)
        k, v = (op.Concat(op.Squeeze(old, op.ints(0)), new, axis=2) for old, new in zip(before, (k, v), strict=True))
        parts = _Heads(q, k, v, op.dimension(past, 3))
    y, _ = _attend(node, parts, node.input(3), node.input(5))
    present = op.Concat(*(op.Unsqueeze(part, op.ints(0)) for part in (parts.keys, parts.values)), axis=0)
    return [y, present]


@register_body("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(node: Node) -> list[Value | None]:
    """y = softmax(Q Kᵀ scale + mask) V per head; K and V follow the KV cache.

    Query, key and value are [b, s, heads n], or packed in one [b, s, heads, 3, n], or key and value in one
    [b, s, heads, 2, n]; key and value may also be in heads already, [b, heads, s, n].
    """
    op, bias, heads = node.op, node.input(3), int(node.attribute("num_heads"))
    refuse(node, node.input(8) is not None or node.input(9) is not None, "one buffer for past and present")
    q, k, v = _unpacked(node)
    divided = node.rank(k) == 4
    if bias is not None:
        last = op.dimension(q, 2)
        sizes = op.Concat(last, last, last if divided else op.dimension(v, 2), axis=0)
        shifts = op.several("Split", bias, sizes, outputs=3, axis=0)
        q = (q + shifts[0]).with_shape(q.shape)
        if not divided:
            k, v = (k + shifts[1]).with_shape(k.shape), (v + shifts[2]).with_shape(v.shape)
    square = not divided and q.shape is not None and k.shape is not None and _same(q.shape[1], k.shape[1])
    q, k, v = _heads(q, heads), k if divided else _heads(k, heads), v if divided else _heads(v, heads)
    before = node.input(6), node.input(7)
    if before[0] is None or before[1] is None:
        parts = _Heads(q, k, v, square=square)
    else:
        k, v = op.Concat(before[0], k, axis=2), op.Concat(before[1], v, axis=2)
        parts = _Heads(q, k, v, op.dimension(before[0], 2), square)
    y, scores = _attend(node, parts, node.input(4), node.input(5))
    return [y, parts.keys, parts.values, scores]


def _unpacked(node: Node) -> tuple[Value, Value, Value]:
    """Unpack query, key and value."""
    op, k, v = node.op, node.input(1), node.input(2)

    def apart(value: Value, count: int) -> list[Value]:
        parts = op.several("Split", value, outputs=count, axis=3, num_outputs=count)
        return [op.Reshape(part, op.ints(0, 0, -1)).with_shape((None, None, None)) for part in parts]

    if k is None:
        q, k, v = apart(node.x, 3)
        return q, k, v
    if v is None:
        k, v = apart(k, 2)
    return node.x, k, v


def _same(first: int | str | None, second: int | str | None) -> bool:
    return first is not None and first == second


def _heads(value: Value, heads: int) -> Value:
    """[b, s, heads n] as [b, heads, s, n]."""
    op = value.op
    return op.Transpose(op.Reshape(value, op.ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def _attend(node: Node, parts: _Heads, mask: Value | None, bias: Value | None) -> tuple[Value, Value]:
    """The output [b, s, heads m] and the scores before softmax."""
    op, q = node.op, parts.query
    scores = q @ op.Transpose(parts.keys, perm=[0, 1, 3, 2])
    width, scale = size_of(q, 3), float(node.attribute("scale", 0.0))
    if isinstance(width, int):
        scale = scale or 1 / math.sqrt(width)
    scores = scores * scale if scale else scores / op.Sqrt(as_number(op, width, scores.dtype))
    scores = scores if bias is None else scores + bias
    if mask is not None:
        filtered = op.scalar(float(node.attribute("mask_filter_value", -10000.0)), scores)
        scores = scores + op.Where(_visible(node, mask, parts), op.scalar(0, scores), filtered)
    if node.attribute("unidirectional", 0):
        lowest = op.scalar(np.finfo(scores.dtype.numpy()).min, scores)
        scores = op.Where(_earlier(parts, scores), scores, lowest)
    joined = op.Transpose(op.Softmax(scores, axis=-1) @ parts.values, perm=[0, 2, 1, 3])
    return op.Reshape(joined, op.ints(0, 0, -1)), scores


def _earlier(parts: _Heads, scores: Value) -> Value:
    """True for keys [1, 1, s, t] that are not later than a query.

    Where new keys and queries are not equal in number, ONNX Runtime lets the last query see all keys.
    """
    op = scores.op
    ones = op.Expand(op.constant([[[[1]]]], np.int64), op.Slice(op.Shape(scores), op.ints(2), op.ints(4)))
    offset = op.constant(0, np.int64) if parts.past is None else op.Reshape(parts.past, op.ints())
    lower = op.Trilu(ones, offset, upper=0)
    if not parts.square:
        upper = op.Slice(lower, op.ints(0), op.ints(-1), op.ints(2))
        lower = op.Concat(upper, op.Slice(ones, op.ints(0), op.ints(1), op.ints(2)), axis=2)
    return op.cast(lower, ir.DataType.BOOL)


def _visible(node: Node, mask: Value, parts: _Heads) -> Value:
    """True for keys that are not masked, for scores [b, heads, s, t]."""
    op, rank = node.op, node.rank(mask)
    zero = op.scalar(0, mask)
    if rank == 1:
        return _between(node, mask, parts)
    if rank < 4:
        return op.Greater(op.Unsqueeze(mask, op.ints(*range(1, 5 - rank))), zero)
    begin = op.ints(0) if parts.past is None else parts.past
    end = op.Add(begin, op.dimension(parts.query, 2))
    rows = op.Slice(mask, begin, end, op.ints(2))
    return op.Greater(op.Slice(rows, op.ints(0), op.dimension(parts.keys, 2), op.ints(3)), zero)


def _between(node: Node, mask: Value, parts: _Heads) -> Value:
    """True for keys before the end of their sequence, and not before its begin if that is given."""
    op, integer = node.op, ir.DataType.INT64
    positions = count_to(op, size_of(parts.keys, 2))
    batch, size = op.dimension(node.x, 0), op.dimension(mask, 0)
    single = mask.shape is not None and node.x.shape is not None and _same(mask.shape[0], node.x.shape[0])
    ends = mask if single else op.Slice(mask, op.ints(0), batch, op.ints(0))
    before = op.Less(positions, op.Unsqueeze(op.cast(ends, integer), op.ints(1, 2, 3)))
    if single:
        return before
    begins = op.Slice(op.Concat(mask, mask, axis=0), batch, op.Add(batch, batch), op.ints(0))
    given = op.Equal(size, op.Add(batch, batch))
    starts = op.Where(given, op.cast(begins, integer), op.constant(0, np.int64))
    return op.And(before, op.GreaterOrEqual(positions, op.Unsqueeze(starts, op.ints(1, 2, 3))))
