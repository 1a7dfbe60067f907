"""GroupQueryAttention of ONNX Runtime: causal attention in which several heads of queries share keys and values.

The queries of a group become rows of one head, side by side: keys and values are not repeated, and the matmuls sum the
gradients of keys and values over the heads of a group.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import LAST, as_number, count_to, size_of
from onnxtrain.autodiff.registry import register_body
from onnxtrain.autodiff.rules.microsoft import DOMAIN, refuse
from onnxtrain.autodiff.rules.rotary import rotated_at
from onnxtrain.graph import Value
from onnxtrain.graph.value import Dimension

_KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _LAST_POSITIONS, _COSINES, _SINES, _POSITIONS, _BIAS, _SINK = (
    *range(1, 6),
    *range(7, 12),
)
_QUERY_NORM, _KEY_NORM, _QUERY_LENGTHS = range(14, 17)


class _Sizes(NamedTuple):
    """The number of heads of a node, and the lengths of its sequences."""

    heads: int
    groups: int
    begins: Value | None
    lengths: Value

    @property
    def shared(self) -> int:
        """Number of query heads that share keys and values."""
        return self.heads // self.groups


@register_body("GroupQueryAttention", domain=DOMAIN)
def group_query_attention(node: Node) -> list[Value | None]:
    """y = softmax(cap(scale Q Kᵀ) + mask) V per head; a query sees keys up to its own position, within a window.

    Query, key and value are [b, s, heads n], or packed in the query, [b, s, (heads + 2 kv_heads) n]. With
    ``do_rotary`` they are rotated by their positions. A KV cache [b, kv_heads, p, n] precedes them, with
    seqlens_k + 1 - s valid rows for each sequence.
    """
    op = node.op
    refuse(
        node, node.input(12) is not None or bool(node.attribute("kv_cache_bit_width", 0)), "quantized keys and values"
    )
    refuse(node, node.has_output(3), "its scores as an output")
    refuse(
        node,
        node.input(_QUERY_NORM) is not None or node.input(_KEY_NORM) is not None,
        "normalized queries and keys (build the model with fuse_qk_norm_gqa=false)",
    )
    refuse(node, node.input(_QUERY_LENGTHS) is not None, "lengths of padded queries (query_seqlens)")
    known = None if node.x.shape is None else (node.x.shape[0], 1)
    lengths = op.cast(op.reshape(node.input_required(_LAST_POSITIONS), [-1, 1], known), ir.DataType.INT64) + 1
    heads, groups = int(node.attribute("num_heads")), int(node.attribute("kv_num_heads"))
    q, k, v = _split(node, heads, groups)
    past = node.input(_PAST_KEY), node.input(_PAST_VALUE)
    refuse(
        node,
        past[0] is not None and bool(node.attribute("sliding_window_cache", 0)),
        "a KV cache as long as its window (sliding_window_cache)",
    )
    begins = None
    if past[0] is not None and not (past[0].shape is not None and past[0].shape[2] == 0):
        begins = op.Max(lengths - op.dimension(q, 1), op.constant(0, np.int64))
    sizes = _Sizes(heads, groups, begins, lengths)
    if node.attribute("do_rotary", 0):
        positions = _query_positions(node, q, sizes)
        q, k = (_rotated(node, part, count, positions) for part, count in ((q, heads), (k, groups)))
    q, k, v = (_in_heads(part, count) for part, count in ((q, heads), (k, groups), (v, groups)))
    k, v = (op.Transpose(part, perm=[0, 2, 1, 3]) for part in (k, v))
    if begins is not None and past[0] is not None and past[1] is not None:
        k, v = op.Concat(past[0], k, axis=2), op.Concat(past[1], v, axis=2)
    mask = _mask(node, q, past[0], sizes)
    return [_attended(node, q, k, v, mask, sizes), k, v]


def _split(node: Node, heads: int, groups: int) -> tuple[Value, Value, Value]:
    """Query, keys and values as [b, s, heads n]."""
    op, x = node.op, node.x
    key, value = node.input(_KEY), node.input(_VALUE)
    if key is not None and value is not None:
        return x, key, value
    if x.shape is not None and isinstance(x.shape[2], int):
        size = x.shape[2] // (heads + 2 * groups)
        q, k, v = op.several(
            "Split", x, op.ints(*(size * count for count in (heads, groups, groups))), outputs=3, axis=2
        )
        return q, k, v
    parts = op.several("Split", _in_heads(x, heads + 2 * groups), op.ints(heads, groups, groups), outputs=3, axis=2)
    q, k, v = (op.Reshape(part, op.ints(0, 0, -1)).with_shape((None, None, None)) for part in parts)
    return q, k, v


def _in_heads(value: Value, heads: int) -> Value:
    """[b, s, heads n] as [b, s, heads, n]."""
    shape = value.shape or (None,) * 3
    last = shape[2] // heads if isinstance(shape[2], int) else None
    return value.op.Reshape(value, value.op.ints(0, 0, heads, -1)).with_shape((shape[0], shape[1], heads, last))


def _query_positions(node: Node, q: Value, sizes: _Sizes) -> Value:
    """The position of each query in its sequence, [b, s], or of the first one, [1], where the others follow from it."""
    op, given = node.op, node.input(_POSITIONS)
    if given is not None:
        return given
    return op.ints(0) if sizes.begins is None else op.Add(_counted(q), sizes.begins)


def _counted(q: Value) -> Value:
    """The numbers of the queries [b, s, heads n], from 0 on: [s]."""
    return count_to(q.op, size_of(q, 1)).with_shape(None if q.shape is None else q.shape[1:2])


def _rotated(node: Node, part: Value, heads: int, positions: Value) -> Value:
    """Rotate vectors [b, s, heads n] by the angles of their positions."""
    op, caches = node.op, (node.input_required(_COSINES), node.input_required(_SINES))
    interleaved = bool(node.attribute("rotary_interleaved", 0))
    half, width = (None if value.shape is None else value.shape[-1] for value in (caches[0], part))
    if not isinstance(half, int):
        every = op.Unsqueeze(_counted(part), op.ints(0)) if node.rank(positions) == 1 else positions
        turned = rotated_at(_in_heads(part, heads), every, caches, 2, interleaved)
        return op.Reshape(turned, op.ints(0, 0, -1)).with_shape(part.shape)
    settings = {
        "interleaved": int(interleaved),
        "num_heads": heads,
        "rotary_embedding_dim": 0 if width == 2 * half * heads else 2 * half,
    }
    y = op.several("RotaryEmbedding", part, positions, *caches, outputs=1, domain=DOMAIN, **settings)[0]
    y.ir.dtype = part.dtype
    return y.with_shape(part.shape)


def _mask(node: Node, q: Value, past: Value | None, sizes: _Sizes) -> Value:
    """True for keys that a query sees, [b or 1, 1, s, t]: up to its own position, no further back than the window."""
    op, window = node.op, int(node.attribute("local_window_size", -1))
    queries = _counted(q)
    rows = op.Unsqueeze(queries, op.ints(0, 1, 3))
    new = op.Unsqueeze(queries, op.ints(0, 1, 2))
    columns = new
    if sizes.begins is not None and past is not None:  # counted from the first query: cached keys lie before 0
        begins = op.Unsqueeze(sizes.begins, op.ints(2, 3))
        old = op.Unsqueeze(count_to(op, size_of(past, 2)), op.ints(0, 1, 2))
        never = op.constant(np.iinfo(np.int32).max, np.int64)
        before = op.Where(op.Less(old, begins), op.Sub(old, begins), never)
        columns = op.Concat(before, op.Add(new, op.Sub(begins, begins)), axis=3)
    causal = bool(node.attribute("causal", 1))
    seen = op.LessOrEqual(columns if causal else op.Sub(columns, columns), rows)  # without: 0 <= row
    if window >= 0:
        return op.And(seen, op.Less(op.Sub(rows, columns), op.constant(window, np.int64)))
    # Only queries behind the end of their sequence would see keys behind it; with a window they may see no others.
    ends = sizes.lengths if sizes.begins is None else op.Sub(sizes.lengths, sizes.begins)
    return op.And(seen, op.Less(columns, op.Unsqueeze(ends, op.ints(2, 3))))


def _attended(node: Node, q: Value, k: Value, v: Value, mask: Value, sizes: _Sizes) -> Value:
    """The output [b, s, heads n] for queries [b, s, heads, n], keys and values [b, kv_heads, t, n]."""
    op, cap, width = node.op, float(node.attribute("softcap", 0.0)), size_of(q, 3)
    scale = float(node.attribute("scale", 0.0))
    if isinstance(width, int):
        scale = scale or 1 / math.sqrt(width)
    elif not scale:
        q, scale = (q / op.Sqrt(as_number(op, width, q.dtype))).with_shape(q.shape), 1.0
    bias = _bias(node, mask, sizes)
    rows = _grouped(q, sizes)
    if cap == 0 and not node.attribute("smooth_softmax", 0) and node.input(_SINK) is None:
        keys, values = (_rows_first(part, sizes) for part in (k, v))
        (y,) = emit(op, "Attention", rows, keys, values, bias, like=[rows], scale=scale, zero_empty_rows=0)
    else:
        y = _capped(node, rows, k, v, bias, scale, sizes)
    return _ungrouped(node, y, sizes)


def _rows_first(value: Value, sizes: _Sizes) -> Value:
    """[b, h, t, n] as [b, t, h, n]."""
    shape = value.shape or (None,) * 4
    return value.op.Transpose(value, perm=[0, 2, 1, 3]).with_shape((shape[0], shape[2], sizes.groups, shape[3]))


def _capped(node: Node, rows: Value, k: Value, v: Value, bias: Value, scale: float, sizes: _Sizes) -> Value:
    """Attention with capped scores, or with a sink term in the softmax."""
    op, cap = node.op, float(node.attribute("softcap", 0.0))
    scores = (op.Transpose(rows, perm=[0, 2, 1, 3]) @ op.Transpose(k, perm=[0, 1, 3, 2])) * scale
    if cap:
        scores = op.Tanh(scores / cap) * cap
    scores = scores + bias
    sink = node.input(_SINK)
    if sink is None and not node.attribute("smooth_softmax", 0):
        probability = op.Softmax(scores, axis=-1)
    else:
        first = op.Expand(op.scalar(0, scores), op.Concat(op.Shape(scores, end=3), op.ints(1), axis=0))
        first.with_shape((None, None, None, 1))
        if sink is not None:  # [heads] as [1, kv_heads, s heads of a group, 1]
            by_group = op.reshape(sink, (1, sizes.groups, 1, sizes.shared))
            length = op.Div(op.dimension(rows, 1), op.ints(sizes.shared))
            tiled = op.Tile(by_group, op.Concat(op.ints(1, 1), length, op.ints(1), axis=0))
            first = first + op.Reshape(tiled, op.ints(1, sizes.groups, -1, 1))
        with_none = op.Softmax(op.Concat(first, scores, axis=3), axis=-1)
        probability = op.Slice(with_none, op.ints(1), op.ints(LAST), op.ints(3))
    return op.Transpose(probability @ v, perm=[0, 2, 1, 3])


def _grouped(q: Value, sizes: _Sizes) -> Value:
    """Reshape [b, s, heads, n] to [b, s * shared, kv_heads, n]: one row per query and query head of a group."""
    if sizes.shared == 1:
        return q
    op, shape = q.op, q.shape or (None,) * 4
    divided = op.Reshape(q, op.ints(0, 0, sizes.groups, sizes.shared, -1))
    divided.with_shape((*shape[:2], sizes.groups, sizes.shared, shape[3]))
    target = op.Concat(op.ints(0, -1, sizes.groups), op.dimension(q, 3), axis=0)
    rows = op.Reshape(op.Transpose(divided, perm=[0, 1, 3, 2, 4]), target)
    return rows.with_shape((shape[0], _multiple(shape[1], sizes.shared), sizes.groups, shape[3]))


def _multiple(size: Dimension, count: int) -> Dimension:
    """A size times ``count``; for a symbolic size, a new symbol."""
    return size * count if isinstance(size, int) else None if size is None else f"{count} times {size}"


def _ungrouped(node: Node, y: Value, sizes: _Sizes) -> Value:
    """[b, s heads of a group, kv_heads, n] as [b, s, heads n]."""
    op, shape, size = node.op, node.x.shape or (None,) * 3, y.shape[-1] if y.shape else None
    target = op.ints(0, 0, -1)
    if sizes.shared > 1:
        apart = op.Concat(op.ints(0, -1, sizes.shared, sizes.groups), op.dimension(y, 3), axis=0)
        divided = op.Reshape(y, apart).with_shape((*shape[:2], sizes.shared, sizes.groups, size))
        y = op.Transpose(divided, perm=[0, 1, 3, 2, 4])
        target = op.Concat(op.dimension(node.x, 0), op.dimension(node.x, 1), op.ints(-1), axis=0)
    return op.Reshape(y, target).with_shape((*shape[:2], size * sizes.heads if isinstance(size, int) else None))


def _bias(node: Node, mask: Value, sizes: _Sizes) -> Value:
    """The bias that is added to the scores, [b or 1, 1 or kv_heads, s heads of a group, t]."""
    op, given, x = node.op, node.input(_BIAS), node.x
    bias = op.Where(mask, op.scalar(0, x), op.scalar(-np.inf, x))
    if given is None:
        return _repeated(bias, sizes)
    if given.shape is not None and given.shape[1] == 1:
        return _repeated(bias + given, sizes)
    if given.shape is None or given.shape[1] != sizes.heads:
        refuse(node, True, "an attention bias whose number of heads is not known")
    total = bias + given
    if sizes.shared == 1:
        return total
    divided = op.Reshape(total, op.Concat(op.ints(0, sizes.groups, sizes.shared), op.Shape(total, start=2), axis=0))
    by_row = op.Transpose(divided, perm=[0, 1, 3, 2, 4])
    return op.Reshape(by_row, op.Concat(op.ints(0, 0, -1), op.Shape(total, start=3), axis=0))


def _repeated(bias: Value, sizes: _Sizes) -> Value:
    """Repeat every row of [b, 1, s, t] for each head of a group."""
    if sizes.shared == 1:
        return bias
    op, shape = bias.op, bias.shape or (None,) * 4
    wide = op.Expand(op.Unsqueeze(bias, op.ints(3)), op.ints(1, 1, 1, sizes.shared, 1))
    wide.with_shape((*shape[:3], sizes.shared, shape[3]))
    rows = op.Reshape(wide, op.Concat(op.ints(0, 0, -1), op.dimension(bias, 3), axis=0))
    return rows.with_shape((*shape[:2], _multiple(shape[2], sizes.shared), shape[3]))
