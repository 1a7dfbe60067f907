"""Data for tests of the commands."""

import numpy as np


def examples(count: int = 60, seed: int = 0) -> dict[str, np.ndarray]:
    """Points of four features, labelled by the largest of the first three."""
    points = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return {"input": points, "label": points[:, :3].argmax(1)}
