"""Arrays of bytes that are read as floats: a quarter of the memory, and of what is read from a file."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Rescaled:
    """An array whose rows are ``stored * scale + shift`` in float32 once they are read.

    It has as much of an array's interface as a dataset needs.

    Args:
        stored: [N, ...].
        scale: broadcasts with a row.
        shift: likewise.

    >>> array = Rescaled(np.array([[0, 255]], np.uint8), np.array([1 / 255]), np.array([-0.5]))
    >>> array[:1].tolist(), array.shape
    ([[-0.5, 0.5]], (1, 2))
    """

    dtype: Final = np.dtype(np.float32)

    def __init__(self, stored: Array, scale: Array, shift: Array) -> None:
        self._stored = stored
        self._scale, self._shift = scale.astype(np.float32), shift.astype(np.float32)
        self.shape, self.ndim = stored.shape, stored.ndim
        self.base = stored

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, rows: Any) -> Array:
        values = self._stored[rows].astype(np.float32)
        values *= self._scale
        values += self._shift
        return np.asarray(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or self.dtype, copy=False)
