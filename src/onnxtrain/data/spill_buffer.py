"""Arrays that are written block by block: in memory while they are small, then in a temporary file that is mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Any, Final, Self

import numpy as np

from onnxtrain.data.conversion import Array

MEMORY_BYTES: Final = 64 * 2**20
"""Up to this size an array stays in memory; a larger one goes to a temporary file."""

# How many rows are changed at a time.
_ROWS: Final = 2**17


class GrowingArray:
    """An array whose number of rows is not known until all have been read.

    The temporary file has no name in the file system: however the process ends, nothing is left behind.

    Args:
        row_shape: the shape of one row.
        dtype: the element type.

    >>> array = GrowingArray((2,), np.dtype(np.float32))
    >>> array.append(np.zeros((3, 2)))
    >>> array.finish().shape
    (3, 2)
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._row_shape, self.dtype = row_shape, dtype
        self._blocks: list[Array] = []
        self._bytes = self._rows = 0
        self._file: IO[bytes] | None = None

    @classmethod
    def of(cls, array: Array, dtype: np.dtype[Any], change: Callable[[Array], Array] | None = None) -> Self:
        """The rows of an array in another type, or changed, some at a time."""
        result = cls(array.shape[1:], dtype)
        for start in range(0, len(array), _ROWS):
            block = array[start : start + _ROWS]
            result.append(block if change is None else change(block))
        return result

    def append(self, block: Array) -> None:
        """Add rows at the end.

        Raises:
            OSError: the temporary file cannot be written.
        """
        block = np.ascontiguousarray(block, self.dtype)
        self._rows += len(block)
        self._bytes += block.nbytes
        self._blocks.append(block)
        if self._bytes > MEMORY_BYTES and self.dtype.kind not in "OT":  # texts lie elsewhere
            import tempfile  # brings archives and random numbers: for large arrays only

            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - the array keeps it open
            for each in self._blocks:
                self._file.write(each.reshape(-1).view(np.uint8).data)
            self._blocks = []

    def finish(self) -> Array:
        """All rows."""
        shape = (self._rows, *self._row_shape)
        if self._file is None:
            return np.concatenate([np.empty((0, *self._row_shape), self.dtype), *self._blocks])
        self._file.flush()
        with self._file:
            return np.memmap(self._file, self.dtype, "r", 0, shape)


class GrowingTexts:
    """Texts that are written block by block, of which few differ: each is kept once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._found = GrowingArray((), np.dtype(np.int32))

    def append(self, block: Iterable[str]) -> None:
        """Add texts at the end."""
        self._found.append(np.array([self._numbers.setdefault(text, len(self._numbers)) for text in block], np.int32))

    def finish(self) -> Array:
        """Return all texts."""
        texts = np.array(list(self._numbers), str)
        return GrowingArray.of(self._found.finish(), texts.dtype, texts.__getitem__).finish()
