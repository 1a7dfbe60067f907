"""Low-bit optimizer states: bfloat16 or 8 bits, decoded before and encoded after the update.

A bfloat16 state is one tensor, which ``Cast`` widens and ``RoundStochastic`` rounds
(:mod:`onnxtrain.lowering.optimizer_bodies` has its formula). An 8-bit state is two tensors, ``{state}`` (uint8, of the
parameter's shape) and ``{state}_scale`` (float, one scale for each block of :data:`BLOCK` elements), which
``DecodeBlockwise`` reads and ``EncodeBlockwise`` writes.

An 8-bit code is a floating-point value relative to the scale s of its block, a power of two. With the exponent e, at
most ``top``, and three bits f of fraction::

    value = s 2^(e - top) (1 + f/8)    for e > 0
    value = s 2^(1 - top) f/8          for e = 0

Codes of signed states have a sign and four exponent bits (top = 15). Codes of sums of squares, which are never
negative, have five (top = 31). The smallest positive values are 2^-17 s and 2^-33 s. The update divides a signed state
by the root of a sum of squares: relative to s and to its root, the smallest divisor, 2^-16.5, is larger than the
smallest dividend, 2^-17.

s is the smallest power of two, at least 2^-126, for which no magnitude in the block exceeds 15/8 s. Encoding rounds a
value stochastically to its lower or upper neighbor, so that the expected value is exact; for e > 0 the neighbors differ
by at most 1/8 of the value. A positive sum of squares never becomes zero. If a block holds NaN or infinity, the whole
block becomes NaN. Since scales are powers of two, decoding and encoding again under another scale does not change a
value as long as e > 0: values do not drift.

Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, for blocks, for unsigned codes of
sums of squares, and for leaving small tensors in float. Its codes differ, and it rounds to nearest.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

OPERATOR = "RoundStochastic"
"""Operator of the domain ``onnxtrain``: rounds floats to bfloat16; see :mod:`onnxtrain.lowering.optimizer_bodies`."""

ENCODE = "EncodeBlockwise"
"""Operator of the domain ``onnxtrain``: encodes floats as 8-bit codes and scales."""

DECODE = "DecodeBlockwise"
"""Operator of the domain ``onnxtrain``: decodes 8-bit codes and scales to floats."""

BFLOAT16 = ir.DataType.BFLOAT16.numpy()

BLOCK = 256
"""Number of elements of an 8-bit state that share a scale."""

LEAST_BLOCKWISE = 4096
"""Least number of elements of a tensor with 8-bit states: smaller ones, such as biases, would save nothing."""


def is_signed(role: str) -> bool:
    """Return whether a state of this letter may be negative; H, an average or sum of squares, may not."""
    return role != "H"


class Rounding(NamedTuple):
    """Low-bit representation of the optimizer states of float32 parameters."""

    kind: str
    seed: int = 0

    def first_values(self, name: str, first: np.ndarray) -> dict[str, np.ndarray]:
        """Return the tensors of a state with the first value ``first``, by name."""
        if first.dtype != np.float32:
            return {name: first}
        if self.kind == "bfloat16":
            return {name: _repeated(first.flat[0] if first.size else 0.0, first.shape, BFLOAT16)}
        if first.size < LEAST_BLOCKWISE or np.any(first.flat[:1]):
            return {name: first}
        codes = _repeated(0, first.shape, np.dtype(np.uint8))
        return {name: codes, f"{name}_scale": np.zeros(-(-first.size // BLOCK), np.float32)}

    def rounded(self, op: Builder, kept: tuple[Value, ...], role: str, new: Value, count: Value) -> tuple[Value, ...]:
        """Emit the rounding of a state's new value, with random numbers of its own; return the tensors to keep."""
        state = kept[0]
        seed = zlib.crc32(state.name.encode(), self.seed % (1 << 32))
        if state.dtype == ir.DataType.BFLOAT16:
            results = op.several(OPERATOR, new, count, outputs=1, domain=ONNXTRAIN_DOMAIN, seed=seed)
        elif len(kept) == 2:
            results = op.several(
                ENCODE, new, count, outputs=2, domain=ONNXTRAIN_DOMAIN, seed=seed, signed=int(is_signed(role))
            )
        else:
            return (new,)
        for result, old in zip(results, kept, strict=True):
            result.ir.type = old.ir.type
            result.with_shape(old.shape)
        return tuple(results)


def widened(op: Builder, kept: tuple[Value, ...], role: str) -> Value:
    """Emit the decoding of a state for the update."""
    state = kept[0]
    if state.dtype == ir.DataType.BFLOAT16:
        return op.cast(state, ir.DataType.FLOAT).with_shape(state.shape)
    if len(kept) == 1:
        return state
    (wide,) = op.several(DECODE, *kept, outputs=1, domain=ONNXTRAIN_DOMAIN, signed=int(is_signed(role)))
    wide.ir.dtype = ir.DataType.FLOAT
    return wide.with_shape(state.shape)


def _repeated(number: float, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    return np.broadcast_to(np.asarray(number, dtype), shape)
