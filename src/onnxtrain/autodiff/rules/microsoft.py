"""Operators of ONNX Runtime's own domain that exporters and its optimizer write, in standard operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.placement import as_number, count_to, size_of
from onnxtrain.autodiff.registry import Gradients, register_body, register_gradient
from onnxtrain.autodiff.rules.activation import activation
from onnxtrain.errors import GradientError
from onnxtrain.graph import Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN

DOMAIN = MICROSOFT_DOMAIN


def refuse(node: Node, condition: bool, what: str) -> None:
    """Raise an error for a feature that the body of an operator does not cover, where the condition holds."""
    if condition:
        raise GradientError(
            f"{describe(node.ir)}: it has {what}, which its body in standard operators does not cover; export the "
            "model without ONNX Runtime's fusions, or register a rule for this operator."
        )


@register_body("FusedMatMul", domain=DOMAIN)
def fused_matmul(node: Node) -> list[Value | None]:
    """y = alpha A B, each transposed in its last two axes where the node says so.

    With ``transBatchA`` (``transBatchB``) the rows come first in A (B), before the batch.
    """
    a, b = (_transposed(node, node.input_required(index), side) for index, side in enumerate("AB"))
    return [(a @ b) * float(node.attribute("alpha", 1.0))]


def _transposed(node: Node, value: Value, side: str) -> Value:
    if node.attribute(f"transBatch{side}", 0):
        rank = node.rank(value)
        order = [*range(1, rank - 1), 0, rank - 1]
        if node.attribute(f"trans{side}", 0):
            order[-2:] = order[-1], order[-2]
        return node.op.Transpose(value, perm=order)
    return node.op.transpose_last(value) if node.attribute(f"trans{side}", 0) else value


@register_body("FusedGemm", domain=DOMAIN)
def fused_gemm(node: Node) -> list[Value | None]:
    """y = activation(Gemm(A, B, C))."""
    attributes = node.attributes("alpha", "beta", "transA", "transB")
    y = node.op.Gemm(node.x, node.input_required(1), node.input(2), **attributes)
    parameters = node.attributes("activation_alpha", "activation_beta").values()
    return [_activated(node, y, [number for number in parameters if number is not None])]


@register_body("FusedConv", domain=DOMAIN)
def fused_conv(node: Node) -> list[Value | None]:
    """y = activation(Conv(x, w, b) + z)."""
    attributes = node.attributes("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y, z = node.op.Conv(node.x, node.input_required(1), node.input(2), **attributes), node.input(3)
    y = (y if z is None else y + z).with_shape(node.y.shape)
    return [_activated(node, y, node.attribute("activation_params", []))]


_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
}
"""Attributes of fused activations, in the order of their parameters."""


def _activated(node: Node, x: Value, numbers: Sequence[float]) -> Value:
    """Apply the activation that a node names, with its parameters."""
    op, name = node.op, node.attribute("activation", "")
    if not name:
        return x
    if name == "Clip":
        return op.Clip(x, *(op.scalar(bound, x) for bound in numbers))
    if name not in _ACTIVATIONS:
        raise GradientError(
            f"{describe(node.ir)}: its activation is {name!r}, which its body in standard operators does not cover; "
            "export the model without ONNX Runtime's fusions, or register a rule for this operator."
        ).about(describe(node.ir), got=name)
    return activation(name, x, **dict(zip(_ACTIVATIONS[name], numbers, strict=False)))


@register_gradient("Gelu", "BiasGelu", "FastGelu", domain=DOMAIN, broadcasts=True)
def gelu_gradients(node: Node, dy: Value) -> Gradients:
    """y = gelu(x + b): dx = dy gelu'(x + b), db = the same, summed to its shape; Gelu has no b."""
    bias = node.input(1)
    x = node.x if bias is None else node.x + bias
    approximate = "tanh" if node.operator == "FastGelu" else "none"
    (dx,) = emit(node.op, "GeluGradient", dy, x, like=[dy], approximate=approximate)
    return dx if bias is None else (dx, dx)


def in_single_precision(node: ir.Node) -> bool:
    """Return whether a node computes in float32: ONNX Runtime's CPU kernels know no other type."""
    return node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT


@register_fused("Gelu", "BiasGelu", "FastGelu", domain=DOMAIN, has_kernel=in_single_precision)
def gelu(node: Node) -> list[Value | None]:
    """y = (x + b) Phi(x + b), by its approximation with tanh for FastGelu; Gelu has no b."""
    op, bias, fast = node.op, node.input(1), node.operator == "FastGelu"
    x = node.x if bias is None else node.x + bias
    if op.opset >= 20:
        return [op.Gelu(x, approximate="tanh" if fast else None)]
    if not fast:
        return [x * 0.5 * (op.Erf(x * math.sqrt(0.5)) + 1)]
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return [x * 0.5 * (op.Tanh(inner) + 1)]


@register_body("QuickGelu", domain=DOMAIN)
def quick_gelu(node: Node) -> list[Value | None]:
    """y = x sigmoid(alpha x)."""
    return [node.x * node.op.Sigmoid(node.x * float(node.attribute("alpha", 1.702)))]


@register_body("SkipLayerNormalization", domain=DOMAIN)
def skip_layer_normalization(node: Node) -> list[Value | None]:
    """y = LayerNormalization(x + skip + bias) gamma + beta; the sum is an output, too."""
    op, bias = node.op, node.input(4)
    total = node.x + node.input_required(1)
    total = total if bias is None else total + bias
    epsilon = node.attribute("epsilon", 1e-12)
    normal = op.several(
        "LayerNormalization",
        total,
        node.input_required(2),
        node.input(3),
        outputs=3,
        axis=-1,
        epsilon=epsilon,
    )
    return [normal[0].with_shape(total.shape), normal[1], normal[2], total]


_RMS = "SimplifiedLayerNormalization"
"""ONNX Runtime's name of RMSNormalization; it has a kernel for it in ONNX's domain."""


@register_gradient(_RMS)
def simplified_layer_normalization_rule(node: Node, dy: Value, *others: Value | None) -> Gradients:
    """y = gamma x r, r = 1 / sqrt(mean(x²) + epsilon): dx as of RMSNormalization; dr adds -dr r³ x / n."""
    op, x, gamma, axis = node.op, node.x, node.input_required(1), node.attribute("axis", -1)
    axis = axis if axis < 0 else axis - node.rank()
    settings = {"axis": axis, "epsilon": node.attribute("epsilon", 1e-5)}
    dx, dgamma = emit(op, "RMSNormalizationGradient", dy, x, gamma, like=[x, gamma], **settings)
    if others and others[0] is not None and node.arrives(1):
        r = node.outputs[1]
        dx = dx - x * (others[0] * r * r * r / op.count(x, range(node.rank() + axis, node.rank())))
    return dx, dgamma


@register_fused(_RMS, domain="")
@register_body(_RMS, domain=DOMAIN)
def simplified_layer_normalization(node: Node) -> list[Value | None]:
    """y = gamma x / sqrt(mean(x²) + epsilon) over the axes from ``axis`` on."""
    axis = node.attribute("axis", -1)
    y, deviation = _rms_normalized(node, node.x, node.input_required(1), axis, node.attribute("epsilon", 1e-5))
    return [y, deviation]


@register_body("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_simplified_layer_normalization(node: Node) -> list[Value | None]:
    """y = SimplifiedLayerNormalization(x + skip + bias) gamma; the sum is an output, too."""
    op, total, bias = node.op, node.x + node.input_required(1), node.input(3)
    total, gamma = total if bias is None else total + bias, node.input_required(2)
    epsilon = node.attribute("epsilon", 1e-12)
    if node.has_output(2):
        y, deviation = _rms_normalized(node, total, gamma, -1, epsilon)
        return [y, None, deviation, total]
    y = op.several(_RMS, total, gamma, outputs=1, axis=-1, epsilon=float(epsilon), stash_type=1)[0]
    return [y.with_shape(total.shape), None, None, total]


def _rms_normalized(node: Node, x: Value, gamma: Value, axis: int, epsilon: float) -> tuple[Value, Value]:
    op = node.op
    axes = [axis] if axis == -1 else list(range(axis % node.rank(x), node.rank(x)))
    square = op.ReduceMean(x * x, op.ints(*axes), keepdims=1)
    deviation = op.Reciprocal(op.Sqrt(square + float(epsilon)))
    return x * deviation * gamma, deviation


@register_body("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalization(node: Node) -> list[Value | None]:
    """y = LayerNormalization(word[ids] + position + segment[segments]) gamma + beta; the sum is an output, too."""
    op, ids = node.op, node.x
    segments, mask, positions = node.input(1), node.input(7), node.input(8)
    words = node.input_required(2)
    total = op.Gather(words, ids)
    if ids.shape is not None and words.shape is not None:
        total.with_shape((*ids.shape, words.shape[-1]))
    if positions is None:
        length = op.dimension(ids, 1)
        rows = op.Slice(node.input_required(3), op.ints(0), length, op.ints(0))
        total = total + rows
    else:
        total = total + op.Gather(node.input_required(3), positions)
    if segments is not None:
        total = total + op.Gather(node.input_required(4), segments)
    epsilon = node.attribute("epsilon", 1e-12)
    y = op.LayerNormalization(total, node.input_required(5), node.input_required(6), axis=-1, epsilon=epsilon)
    int32 = ir.DataType.INT32
    if mask is None:
        lengths = op.Mul(op.cast(op.ReduceMax(ids, op.ints(1), keepdims=0), int32), op.constant(0, np.int32))
    else:
        lengths = op.ReduceSum(op.cast(mask, int32), op.ints(1), keepdims=0)
    return [y, lengths, total]


# Attention and MultiHeadAttention


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
