"""Low-bit weights dequantized in NumPy's float64."""

from __future__ import annotations

import numpy as np


def unpacked(packed, bits):
    """The integers of each row, the lowest bits of a byte first."""
    parts = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8(2**bits - 1)
    return parts.reshape(len(packed), int(np.prod(packed.shape[1:])) * 8 // bits)


def weight(integers, scales, zeros, bits, inputs):
    """w [N, K] of integers [N, blocks, bytes] and one scale and zero point for each block."""
    outputs, blocks = integers.shape[:2]
    block = integers.shape[2] * 8 // bits
    steps = unpacked(integers, bits).reshape(outputs, blocks, block) - np.asarray(zeros, np.float64)[..., None]
    return (steps * np.asarray(scales, np.float64)[..., None]).reshape(outputs, blocks * block)[:, :inputs]
