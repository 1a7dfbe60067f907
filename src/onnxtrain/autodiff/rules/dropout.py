"""Dropout whose mask follows from a seed and a counter: a step that is taken again draws the same mask.

The mask is a function of (seed, count, index), by integer arithmetic modulo 2^32. With the finalizer

    m(h) = h3,  h1 = (h ^ h >> 16) 0x7feb352d,  h2 = (h1 ^ h1 >> 15) 0x846ca68b,  h3 = h2 ^ h2 >> 16

the keys are k = m(m(m(low) ^ high) ^ count), with the seed's two halves, and k' = m(k ^ 0x85ebca6b). Element i is kept
where h >> 1 >= ratio 2^31, for h = m(i 0x9e3779b1 + k) with k' joined (^) before the second product and without the
last step, which the bits that decide do not see.

Source of m's constants: C. Wellons, "Prospecting for Hash Functions" (lowbias32), 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

OPERATOR = "CountedDropout"

_FIRST, _SECOND, _STRIDE, _APART = 0x7FEB352D, 0x846CA68B, 0x9E3779B1, 0x85EBCA6B
_WORD = 1 << 32


@register_fused(OPERATOR)
def counted_dropout(node: Node) -> Sequence[Value]:
    """From x, ratio and count: y = x / (1 - ratio) where the element is kept, else 0."""
    op, x, ratio = node.op, node.x, node.input_required(1)
    key, other = _keys(op, int(node.attribute("seed")), op.reshape(node.input_required(2), []))
    size = op.cast(op.reshape(op.Size(x), []), ir.DataType.INT32)
    index = op.Range(op.constant(0, np.int32), size, op.constant(1, np.int32))
    h = _shifted(op, op.Add(op.Mul(index, _signed(op, _STRIDE)), key), 16)
    h = _shifted(op, op.Mul(h, _signed(op, _FIRST)), 15, other)
    h = op.cast(op.Mul(h, _signed(op, _SECOND)), ir.DataType.UINT32)
    share = op.cast(op.reshape(ratio, []), ir.DataType.DOUBLE)
    limit = op.cast(op.Floor(share * 2147483648.0), ir.DataType.INT32)
    drawn = op.cast(op.BitShift(h, op.constant(1, np.uint32), direction="RIGHT"), ir.DataType.INT32)
    kept = op.reshape_like(op.GreaterOrEqual(drawn, limit), x)
    scale = op.cast(op.Div(op.constant(1.0, np.float64), 1.0 - share), x.dtype)
    return [op.Where(kept, x * scale, op.scalar(0, x)).with_shape(x.shape)]


@register_gradient(OPERATOR, domain=ONNXTRAIN_DOMAIN)
def counted_dropout_rule(node: Node, dy: Value) -> Gradients:
    """y = x mask / (1 - ratio): dx = dy mask / (1 - ratio), with the mask drawn again instead of kept."""
    seed = int(node.attribute("seed"))
    (dx,) = emit(node.op, OPERATOR, dy, node.input_required(1), node.input_required(2), like=[node.x], seed=seed)
    return dx


def _keys(op: Builder, seed: int, count: Value) -> tuple[Value, Value]:
    """k as int32, for sums, and k' as uint32, for exclusive ors: scalars."""
    start = mixed(mixed(seed % _WORD) ^ (seed // _WORD) % _WORD)
    # What lies above 32 bits of a count is left out: a training of 4 billion steps repeats its masks.
    low = op.cast(op.Mod(count, op.constant(_WORD, np.int64)), ir.DataType.UINT32)
    key = _mix(op, op.BitwiseXor(low, op.constant(start, np.uint32)))
    return op.cast(key, ir.DataType.INT32), _mix(op, op.BitwiseXor(key, op.constant(_APART, np.uint32)))


def _mix(op: Builder, h: Value) -> Value:
    """m of a uint32 value."""
    h = op.Mul(_shifted(op, op.cast(h, ir.DataType.INT32), 16), _signed(op, _FIRST))
    h = op.Mul(_shifted(op, h, 15), _signed(op, _SECOND))
    return op.cast(_shifted(op, h, 16), ir.DataType.UINT32)


def _shifted(op: Builder, h: Value, places: int, other: Value | None = None) -> Value:
    """h ^ h >> places, perhaps ^ other, of an int32 value: shifts and exclusive ors are those of uint32."""
    word = op.cast(h, ir.DataType.UINT32)
    word = op.BitwiseXor(word, op.BitShift(word, op.constant(places, np.uint32), direction="RIGHT"))
    if other is not None:
        word = op.BitwiseXor(word, other)
    return op.cast(word, ir.DataType.INT32)


def _signed(op: Builder, number: int) -> Value:
    """A 32-bit number as int32, for which runtimes have products."""
    return op.constant(np.uint32(number).astype(np.int32))


def mixed(h: int) -> int:
    """m of a number."""
    h = (h ^ h >> 16) * _FIRST % _WORD
    h = (h ^ h >> 15) * _SECOND % _WORD
    return h ^ h >> 16
