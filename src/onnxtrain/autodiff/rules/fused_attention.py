"""Scaled dot-product attention as one operator of this project's domain, and its gradient.

Queries are [b, s, h, d], keys [b, t, h, d], values [b, t, h, e]; or all three are packed, [b, s, 3, h, d]. The forward
pass keeps the logarithm of each row's sum [b, h, s] for the gradient instead of the probabilities [b, h, s, t]. With
``compute`` = "bfloat16" the operands of all matmuls are rounded to bfloat16, if the processor has instructions for it;
softmax and scale are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, matmul_operands, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

ATTENTION, ATTENTION_GRADIENT = "Attention", "AttentionGradient"
PACKED, PACKED_GRADIENT = "PackedAttention", "PackedAttentionGradient"
"""The operators, of queries, keys and values apart and in one."""

_LAST = -1
_PACKED_AXIS = 2
_LOG_SUM = 1  # the output
_LOWEST = -3e38
_LOWEST_HALF = -6e4


class _Attention(NamedTuple):
    """A node's operands in standard operators: heads before rows, keys with rows last."""

    query: Value
    keys: Value
    values: Value
    scores: Value
    probability: Value
    scale: float


def _attention(node: Node, q: Value, k: Value, v: Value, bias: Value | None) -> _Attention:
    op, scale = node.op, float(node.attribute("scale"))
    query, values = _swapped(q), _swapped(v)
    keys = op.Transpose(k, perm=[0, 2, 3, 1])
    scores = _product(node, query, keys) * scale
    scores = scores if bias is None else scores + bias
    probability = op.Softmax(scores, axis=_LAST)
    if node.attribute("zero_empty_rows", 0):
        probability = op.Where(op.IsNaN(probability), op.scalar(0, probability), probability)
    return _Attention(query, keys, values, scores, probability, scale)


def _apart(given: Sequence[Value]) -> tuple[Value, Value, Value]:
    """q, k and v, given apart or packed."""
    if len(given) == 1:
        op = given[0].op
        given = [op.Gather(given[0], op.constant(part, np.int64), axis=_PACKED_AXIS) for part in range(3)]
    q, k, v = given
    return q, k, v


def _as_given(given: Sequence[Value], gradients: Sequence[Value]) -> list[Value]:
    """dq, dk and dv, apart or packed as q, k and v are given."""
    if len(given) > 1:
        return list(gradients)
    op = given[0].op
    return [op.Concat(*(op.Unsqueeze(each, op.ints(_PACKED_AXIS)) for each in gradients), axis=_PACKED_AXIS)]


def _product(node: Node, a: Value, b: Value) -> Value:
    """A matmul of the node."""
    a, b = matmul_operands(node, a, b)
    return a @ b


def _swapped(value: Value) -> Value:
    """[b, s, h, d] as [b, h, s, d], and back."""
    return value.op.Transpose(value, perm=[0, 2, 1, 3])


def _operands(node: Node, first: int = 0) -> tuple[list[Value], Value | None]:
    """q, k and v from the input at ``first`` on, or the one that packs them, and the bias behind all others."""
    gradient = 2 if node.operator in (ATTENTION_GRADIENT, PACKED_GRADIENT) else 0  # y and log_sum
    count = 1 if node.operator in (PACKED, PACKED_GRADIENT) else 3
    return [node.input_required(first + index) for index in range(count)], node.input(first + count + gradient)


@register_fused(ATTENTION, PACKED)
def attention(node: Node) -> Sequence[Value | None]:
    """From q, k and v, or these in one, and bias?: y = softmax(scale q kᵀ + bias) v [b, s, h, e] and log-sum [b, h, s].

    The log-sum is log Σ_t exp(score).
    """
    given, bias = _operands(node)
    parts = _attention(node, *_apart(given), bias)
    log_sum = _log_sum(parts.scores) if node.has_output(1) else None
    return [_swapped(_product(node, parts.probability, parts.values)), log_sum]


def _log_sum(scores: Value) -> Value:
    """log Σ exp(score) over the last axis; -inf for a row of -inf."""
    op, last = scores.op, scores.op.ints(_LAST)
    if op.opset >= 18:
        largest = op.ReduceMax(scores, last, keepdims=1)
    else:
        largest = op.ReduceMax(scores, axes=[_LAST], keepdims=1)
    lowest = _LOWEST_HALF if scores.dtype == ir.DataType.FLOAT16 else _LOWEST
    shift = op.Max(largest, op.scalar(lowest, largest))  # finite for a row of -inf, too
    total = op.Log(op.ReduceSum(op.Exp(scores - shift), last, keepdims=1)) + shift
    return op.Squeeze(total, last)


@register_gradient(ATTENTION, PACKED, domain=ONNXTRAIN_DOMAIN)
def attention_rule(node: Node, dy: Value, dlog_sum: Value | None = None) -> Gradients:
    """y = p v, p = softmax(z), z = scale q kᵀ + bias: dz = p (dy vᵀ - Σ_t p dy vᵀ), dv = pᵀ dy, dq = scale dz k.

    dk = scale dzᵀ q, dbias = dz summed to its shape. The kernel takes no gradient of the log-sum (its derivative is p):
    where there is one, the rule writes standard operators.
    """
    given, bias = _operands(node)
    q = given[0]
    if node.arrives(_LOG_SUM):
        parts = _attention(node, *_apart(given), bias)
        p = parts.probability
        (dscores,) = emit(node.op, "SoftmaxGradient", _dp(node, parts, dy), p, like=[p], axis=_LAST)
        if dlog_sum is not None:
            dscores = dscores + p * node.op.Unsqueeze(dlog_sum, node.op.ints(_LAST))
        dbias = None if bias is None else node.op.reduce_to(dscores, bias)
        return [*_as_given(given, _gradients(node, parts, dy, dscores)), dbias][: len(node.inputs)]
    shape = None if q.shape is None else (q.shape[0], q.shape[-2], q.shape[1])
    log_sum = node.output_required(1, q.dtype, shape)
    settings = {"scale": float(node.attribute("scale")), "zero_empty_rows": node.attribute("zero_empty_rows", 0)}
    like = [*given, *([bias] if node.wants(bias) else [])]
    operator = f"{node.operator}Gradient"
    found = emit(node.op, operator, dy, *given, node.y, log_sum, bias, like=like, **settings)
    return [*found, None][: len(node.inputs)]


@register_fused(ATTENTION_GRADIENT, PACKED_GRADIENT)
def attention_gradient(node: Node) -> Sequence[Value]:
    """From dy, q, k, v, y, log_sum and bias?: dq = scale dz k, dk = scale dzᵀ q, dv = pᵀ dy, dz = p (dp - Σ_t p dp).

    dp = dy vᵀ; dbias? is dz, summed to the shape of the bias; q, k and v may be in one, and so are their gradients. The
    kernel uses p = exp(z - log_sum) and Σ_t p dp = Σ_e dy y; the body computes both from q, k, v and bias alone, so
    that the second derivative is with respect to these.
    """
    op, (given, bias) = node.op, _operands(node, 1)
    parts = _attention(node, *_apart(given), bias)
    dp, p = _dp(node, parts, node.x), parts.probability
    dscores = p * (dp - op.ReduceSum(dp * p, op.ints(_LAST), keepdims=1))
    gradients = _as_given(given, _gradients(node, parts, node.x, dscores))
    wanted = bias is not None and node.has_output(len(gradients))
    return [*gradients, op.reduce_to(dscores, bias)] if bias is not None and wanted else gradients


def _dp(node: Node, parts: _Attention, dy: Value) -> Value:
    return _product(node, _swapped(dy), dy.op.Transpose(parts.values, perm=[0, 1, 3, 2]))


def _gradients(node: Node, parts: _Attention, dy: Value, dscores: Value) -> tuple[Value, Value, Value]:
    """dq, dk and dv."""
    op, scaled = dy.op, dscores * parts.scale
    dq = _product(node, scaled, op.Transpose(parts.keys, perm=[0, 1, 3, 2]))
    dk = _product(node, op.Transpose(scaled, perm=[0, 1, 3, 2]), parts.query)
    dv = _product(node, op.Transpose(parts.probability, perm=[0, 1, 3, 2]), _swapped(dy))
    return _swapped(dq), _swapped(dk), _swapped(dv)
