"""Counter-based pseudo-random numbers: functions of a seed, a count and an index, the same in a repeated step.

Arithmetic is modulo 2^32. With the finalizer

    m(h) = h3,  h1 = (h ^ h >> 16) 0x7feb352d,  h2 = (h1 ^ h1 >> 15) 0x846ca68b,  h3 = h2 ^ h2 >> 16

the keys are k = m(m(m(low) ^ high) ^ count), with the seed's two halves, and k' = m(k ^ 0x85ebca6b). Element i gets
h = m(i 0x9e3779b1 + k), with k' joined (^) before the second multiplication and without the last step, which does not
reach the upper bits.

Source of m's constants: C. Wellons, "Prospecting for Hash Functions" (lowbias32), 2018.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.operands import Value

_FIRST, _SECOND, _STRIDE, _APART = 0x7FEB352D, 0x846CA68B, 0x9E3779B1, 0x85EBCA6B
_WORD = 1 << 32


def draw(op: Builder, seed: int, count: Value, like: Value) -> Value:
    """The numbers h, uint32 [elements of ``like``], in the order of the elements; ``count`` is an int64 scalar."""
    key, other = _keys(op, seed, op.reshape(count, []))
    size = op.cast(op.reshape(op.Size(like), []), ir.DataType.INT32)
    index = op.Range(op.constant(0, np.int32), size, op.constant(1, np.int32))
    h = _shifted(op, op.Add(op.Mul(index, _signed(op, _STRIDE)), key), 16)
    h = _shifted(op, op.Mul(h, _signed(op, _FIRST)), 15, other)
    return op.cast(op.Mul(h, _signed(op, _SECOND)), ir.DataType.UINT32)


def upper_bits(op: Builder, h: Value, count: int) -> Value:
    """The upper ``count`` bits of h (at most 31), as int32."""
    shifted = op.BitShift(h, op.constant(32 - count, np.uint32), direction="RIGHT")
    return op.cast(shifted, ir.DataType.INT32)


def _keys(op: Builder, seed: int, count: Value) -> tuple[Value, Value]:
    """The scalars k as int32, for sums, and k' as uint32, for exclusive ors."""
    start = mixed(mixed(seed % _WORD) ^ (seed // _WORD) % _WORD)
    # Only the lower 32 bits of a count are used: a training of 4 billion steps repeats its masks.
    low = op.cast(op.Mod(count, op.constant(_WORD, np.int64)), ir.DataType.UINT32)
    key = _mix(op, op.BitwiseXor(low, op.constant(start, np.uint32)))
    return op.cast(key, ir.DataType.INT32), _mix(op, op.BitwiseXor(key, op.constant(_APART, np.uint32)))


def _mix(op: Builder, h: Value) -> Value:
    """m(h) of a uint32 value."""
    h = op.Mul(_shifted(op, op.cast(h, ir.DataType.INT32), 16), _signed(op, _FIRST))
    h = op.Mul(_shifted(op, h, 15), _signed(op, _SECOND))
    return op.cast(_shifted(op, h, 16), ir.DataType.UINT32)


def _shifted(op: Builder, h: Value, bits: int, other: Value | None = None) -> Value:
    """h ^ h >> bits (^ other) of an int32 value; shifts and exclusive ors are computed in uint32."""
    word = op.cast(h, ir.DataType.UINT32)
    word = op.BitwiseXor(word, op.BitShift(word, op.constant(bits, np.uint32), direction="RIGHT"))
    if other is not None:
        word = op.BitwiseXor(word, other)
    return op.cast(word, ir.DataType.INT32)


def _signed(op: Builder, number: int) -> Value:
    """A 32-bit number as int32, which runtimes can multiply."""
    return op.constant(np.uint32(number).astype(np.int32))


def mixed(h: int) -> int:
    """m(h) of a Python integer."""
    h = (h ^ h >> 16) * _FIRST % _WORD
    h = (h ^ h >> 15) * _SECOND % _WORD
    return h ^ h >> 16
