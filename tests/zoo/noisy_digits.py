"""A task without a perfect solution: ten patterns of 64 values under noise with twice their amplitude."""

from __future__ import annotations

import numpy as np

Examples = tuple[np.ndarray, np.ndarray]


def noisy_digits(*counts: int) -> list[Examples]:
    """Sets of so many examples, x [count, 64] and classes y [count], all of the same patterns."""
    rng = np.random.default_rng(0)
    patterns = rng.standard_normal((10, 64)).astype(np.float32)

    def draw(count: int) -> Examples:
        y = rng.integers(0, 10, count)
        return (patterns[y] + 2 * rng.standard_normal((count, 64))).astype(np.float32), y

    return [draw(count) for count in counts]
