"""Arrays by name, as trainers and sessions hold weights and states: copied, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def copied(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copy the arrays; the next step overwrites the originals."""
    return {name: np.array(array) for name, array in arrays.items()}


def assert_same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
