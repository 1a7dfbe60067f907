"""Attention and MultiHeadAttention of ONNX Runtime's own domain, in standard operators."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.registry import Node, describe, register_body
from onnxtrain.autodiff.rules.microsoft import DOMAIN
from onnxtrain.errors import GradientError
from onnxtrain.graph import Value


@register_body("Attention", domain=DOMAIN)
def attention(node: Node) -> list[Value | None]:
    """y = softmax(Q Kᵀ scale + mask) V per head, with [Q K V] = X W + b.

    Raises:
        GradientError: The node has a past, rotary embedding, or a mask of the begins and ends of sequences.
    """
    op, bias = node.op, node.input(2)
    _refuse(node, node.input(4) is not None, "a past")
    _refuse(node, bool(node.attribute("do_rotary", 0)), "rotary embedding")
    total = node.x @ node.input_required(1)
    total = total if bias is None else total + bias
    sizes = node.attribute("qkv_hidden_sizes")
    if sizes is None:
        q, k, v = op.several("Split", total, outputs=3, axis=-1, num_outputs=3)
    else:
        q, k, v = op.several("Split", total, op.ints(*sizes), outputs=3, axis=-1)
    heads = int(node.attribute("num_heads"))
    parts = [_heads(part, heads) for part in (q, k, v)]
    return [_attend(node, parts, node.input(3), node.input(5))]


@register_body("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(node: Node) -> list[Value | None]:
    """y = softmax(Q Kᵀ scale + mask) V per head.

    Raises:
        GradientError: The node has a past, or packs query, key and value in one tensor.
    """
    op, bias = node.op, node.input(3)
    q, k, v = node.x, node.input(1), node.input(2)
    _refuse(node, node.input(6) is not None, "a past")
    if k is None or v is None:
        raise _refusal(node, "query, key and value in one tensor")
    heads = int(node.attribute("num_heads"))
    if bias is not None:
        size = _last(node, q)
        biases = op.several("Split", bias, op.ints(size, size, _last(node, v)), outputs=3, axis=0)
        q, k, v = ((part + shift).with_shape(part.shape) for part, shift in zip((q, k, v), biases, strict=True))
    parts = [part if node.rank(part) == 4 else _heads(part, heads) for part in (q, k, v)]
    return [_attend(node, parts, node.input(4), node.input(5))]


def _last(node: Node, value: Value) -> int:
    size = None if value.shape is None else value.shape[-1]
    if not isinstance(size, int):
        raise GradientError(
            f"{describe(node.ir)}: the gradient needs the size of the last axis of {value.name!r}, which is "
            f"{size}; add its shape to the model's value_info."
        )
    return size


def _heads(value: Value, heads: int) -> Value:
    """[b, s, heads n] as [b, heads, s, n]."""
    op = value.op
    return op.Transpose(op.Reshape(value, op.ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def _attend(node: Node, parts: list[Value], mask: Value | None, bias: Value | None) -> Value:
    op = node.op
    q, k, v = parts
    scores = q @ op.Transpose(k, perm=[0, 1, 3, 2])
    scale = node.attribute("scale", 0.0)
    if scale:
        scores = scores * float(scale)
    else:
        width = op.Sqrt(op.cast(op.Reshape(op.dimension(q, 3), op.ints()), scores.dtype))
        known = None if q.shape is None else q.shape[3]
        scores = scores * (1 / math.sqrt(known)) if isinstance(known, int) else scores / width
    scores = scores if bias is None else scores + bias
    filtered = float(node.attribute("mask_filter_value", -10000.0))
    if mask is not None:
        scores = scores + (1 - op.cast(_mask(node, mask, k), scores.dtype)) * filtered
    if node.attribute("unidirectional", 0):
        ones = op.Slice(op.ones_like(scores), op.ints(0), op.ints(1), op.ints(0))
        lower = op.Trilu(ones, op.Reshape(op.Sub(op.dimension(k, 2), op.dimension(q, 2)), op.ints()), upper=0)
        scores = op.Where(op.cast(lower, ir.DataType.BOOL), scores, op.scalar(filtered, scores))
    joined = op.Transpose(op.Softmax(scores, axis=-1) @ v, perm=[0, 2, 1, 3])
    return op.Reshape(joined, op.ints(0, 0, -1))


def _mask(node: Node, mask: Value, k: Value) -> Value:
    """1 where a key takes part: from lengths [b], or a mask [b, k], [b, q, k]."""
    op, rank = node.op, node.rank(mask)
    if rank == 2:
        return op.Unsqueeze(mask, op.ints(1, 2))
    if rank == 3:
        return op.Unsqueeze(mask, op.ints(1))
    batch, given = node.x.shape, mask.shape
    if rank != 1 or batch is None or given is None or batch[0] != given[0]:
        raise _refusal(node, f"a mask of shape {mask.shape}")
    zero, one = op.constant(0, np.int64), op.constant(1, np.int64)
    places = op.Range(zero, op.Reshape(op.dimension(k, 2), op.ints()), one)
    lengths = op.Unsqueeze(op.cast(mask, zero.dtype), op.ints(1, 2, 3))
    return op.Less(places, lengths)


def _refuse(node: Node, condition: bool, what: str) -> None:
    if condition:
        raise _refusal(node, what)


def _refusal(node: Node, what: str) -> GradientError:
    return GradientError(
        f"{describe(node.ir)}: it has {what}, which its body in standard operators does not cover; export the model "
        "without ONNX Runtime's fusions, or register a rule for this operator."
    )
