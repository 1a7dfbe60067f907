"""Memory for arrays that kernels work on."""

from __future__ import annotations

import numpy as np

ALIGNMENT = 64
"""Bytes of a cache line, on which memory starts as vector loops like it."""


def aligned(size: int, *, zero: bool = False) -> np.ndarray:
    """New memory [size] of bytes that starts on a cache line.

    Args:
        size: In bytes.
        zero: Whether all are 0; the system gives such memory only when it is written.
    """
    raw = (np.zeros if zero else np.empty)(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
