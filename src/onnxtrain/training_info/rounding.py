"""Optimizer states of fewer bits than their parameters: what stands between them and the update.

In bfloat16 a state is one tensor, which ``Cast`` widens and ``RoundStochastic`` rounds
(:mod:`onnxtrain.passes.round_states` has its formula). In 8 bits it is two, ``{state}`` (uint8, of the parameter's
shape) and ``{state}_scale`` (float, one number for each :data:`BLOCK` elements), between ``DecodeBlockwise`` and
``EncodeBlockwise``.

The code of 8 bits is a floating-point number whose largest exponent belongs to the scale s of its block, a power of
two: with exponent bits e, of which ``top`` is the largest, and three bits f of fraction::

    number = s 2^(e - top) (1 + f/8)    for e > 0
    number = s 2^(1 - top) f/8          for e = 0

The code of what may be negative has a sign and four bits of exponent (top = 15), that of sums of squares, whose root
the update divides by, has five (top = 31). They reach down to 2^-17 and 2^-33 of s: the least root is larger than the
least of what is divided by it. s is the smallest power of two of which the block's largest magnitude is at most 15/8,
and at least 2^-126. A number becomes its lower or its upper neighbour at random, such that the expected value is the
number; where e > 0, they are at most 1/8 of it apart. A sum of squares above zero never becomes zero. A block with a
number that is not finite becomes NaN as a whole. Since scales are powers of two, a code's number is encoded again
without a change when the scale of its block moves, as long as e > 0: nothing drifts.

Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, for blocks, for a code without a
sign, and for small tensors that stay as they are. Its codes are others, and it rounds to the nearest.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import Builder, Value
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN

OPERATOR = "RoundStochastic"
"""Of the domain ``onnxtrain``: float numbers and a count to bfloat16; see :mod:`onnxtrain.passes.round_states`."""

ENCODE = "EncodeBlockwise"
"""Of the domain ``onnxtrain``: float numbers and a count to codes of 8 bits and scales."""

DECODE = "DecodeBlockwise"
"""Of the domain ``onnxtrain``: codes of 8 bits and scales to float numbers."""

BFLOAT16 = ir.DataType.BFLOAT16.numpy()

BLOCK = 256
"""Elements of a state in 8 bits that have a scale in common."""

LEAST_BLOCKWISE = 4096
"""Elements of the smallest tensor whose states are in 8 bits: of less, such as biases, there is nothing to save."""


def is_signed(role: str) -> bool:
    """Whether a state of this letter may be negative: H is an average, or the sum, of squares."""
    return role != "H"


class Rounding(NamedTuple):
    """How the optimizer's states of float32 parameters are kept.

    Attributes:
        kind: "bfloat16" or "8bit".
        seed: What is drawn follows from it, from the name of the state and the update count.
    """

    kind: str
    seed: int = 0

    def first_values(self, name: str, first: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of a state that starts from ``first``, by name."""
        if first.dtype != np.float32:
            return {name: first}
        if self.kind == "bfloat16":
            return {name: _repeated(first.flat[0] if first.size else 0.0, first.shape, BFLOAT16)}
        if first.size < LEAST_BLOCKWISE or np.any(first.flat[:1]):
            return {name: first}
        codes = _repeated(0, first.shape, np.dtype(np.uint8))
        return {name: codes, f"{name}_scale": np.zeros(-(-first.size // BLOCK), np.float32)}

    def rounded(self, op: Builder, kept: tuple[Value, ...], role: str, new: Value, count: Value) -> tuple[Value, ...]:
        """The new value of a state as it is kept; every state draws numbers of its own, which follow from its name."""
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
    """A state as the update reads it."""
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
