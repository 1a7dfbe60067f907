"""RoundStochastic in NumPy, on the bits of the values."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WORD = (1 << 32) - 1


def _mixed(h):
    h = (h ^ h >> 16) * 0x7FEB352D & WORD
    h = (h ^ h >> 15) * 0x846CA68B & WORD
    return h ^ h >> 16


def drawn(seed, count, size):
    """32 bits for each element."""
    key = _mixed(_mixed(_mixed(seed & WORD) ^ seed >> 32) ^ count & WORD)
    h = (np.arange(size, dtype=np.uint64) * 0x9E3779B1 + np.uint64(key)) & WORD
    h = (h ^ h >> np.uint64(16)) * np.uint64(0x7FEB352D) & WORD
    return (h ^ h >> np.uint64(15) ^ np.uint64(_mixed(key ^ 0x85EBCA6B))) * np.uint64(0x846CA68B) & WORD


def round_stochastic(x, count, seed):
    """The numbers of x [float32] in bfloat16."""
    x = np.asarray(x, np.float32)
    bits = x.reshape(-1).view(np.uint32).astype(np.uint64)
    magnitude, sign = bits & 0x7FFFFFFF, bits >> np.uint64(16) & 0x8000
    rounded = np.minimum(magnitude + (drawn(seed, int(count), x.size) >> np.uint64(16)) >> np.uint64(16), 0x7F7F)
    special = np.where(magnitude > 0x7F800000, 0x7FC0, magnitude >> np.uint64(16))
    found = sign | np.where(magnitude < 0x7F800000, rounded, special)
    return found.astype(np.uint16).view(BFLOAT16).reshape(x.shape)
