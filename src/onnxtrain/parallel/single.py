"""A group of one process: every operation is done at once."""

from __future__ import annotations

import numpy as np

from onnxtrain.parallel.communicator import Communicator


class Single(Communicator):
    """A process alone, where a communicator is wanted."""

    rank = 0
    size = 1

    def all_reduce_(self, array: np.ndarray) -> None:
        """Leave the array as it is."""

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        """Leave the array as it is."""

    def all_gather_(self, array: np.ndarray) -> None:
        """Leave the array as it is."""
