"""Hashes that identify arrays and graphs: of all bytes, or of evenly spread blocks of very large arrays."""

from __future__ import annotations

import copy
import hashlib
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from onnxtrain.data.conversion import Array

if TYPE_CHECKING:
    from onnxtrain.model_file.file import ModelFile

BLOCK_BYTES: Final = 2**20
"""Bytes that are hashed at a time."""

_BLOCKS: Final = 256
"""Maximum number of blocks of an array that are hashed, evenly spread from the first to the last."""

_VALUES: Final = 512
"""Values of an array of which a checksum is computed, in a few microseconds."""

_T = TypeVar("_T")


class Fingerprint:
    """A hash under construction.

    >>> first, second = Fingerprint(), Fingerprint()
    >>> first.add_array(np.arange(3.0))
    >>> second.add_array(np.arange(3.0) + 1)
    >>> first.digest() == second.digest()
    False
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add_bytes(self, content: bytes | memoryview) -> None:
        """Add bytes and their number."""
        self._hash.update(len(content).to_bytes(8, "little"))
        self._hash.update(content)

    def add_text(self, text: str) -> None:
        """Add a string."""
        self.add_bytes(text.encode("utf-8", "surrogatepass"))

    def add_array(self, array: Array) -> None:
        """Add all values of an array."""
        if array.dtype.hasobject:
            self.add_text(repr(array.tolist()))
        elif array.size:
            self.add_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def add_large_array(self, array: Array) -> None:
        """Add type, shape and values of an array; very large arrays are sampled."""
        self.add_text(f"{array.dtype} {array.shape}")
        if array.dtype.hasobject or not array.size:
            self.add_array(array)
            return
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for start in sampled(range(0, len(content), BLOCK_BYTES)):
            self.add_bytes(content[start : start + BLOCK_BYTES])

    def digest(self) -> str:
        """Return the hash so far as a string."""
        return self._hash.hexdigest()


def describe_graph(file: ModelFile) -> str:
    """Hash the graph, without the values of its initializers."""
    graph = copy.deepcopy(file.proto.graph)
    for tensor in graph.initializer:
        name, dims, kind = tensor.name, list(tensor.dims), tensor.data_type
        tensor.Clear()
        tensor.name, tensor.data_type = name, kind
        tensor.dims.extend(dims)
    del graph.sparse_initializer[:]
    structure = Fingerprint()
    for part in (graph, *file.proto.functions, *file.proto.opset_import):
        structure.add_bytes(part.SerializeToString(deterministic=True))
    return structure.digest()


def checksum(arrays: Iterable[Array]) -> int:
    """Return a checksum of arrays [N, ...]: of all values in order, or of evenly spread ones of a large array."""
    found = 0
    for array in arrays:
        values = array.reshape(-1)
        if values.size > _VALUES:
            step, columns = values.size // _VALUES, values.size // len(array)
            while math.gcd(step, columns) > 1:  # otherwise the same columns of all rows
                step += 1
            values = values[::step]
        content = repr(values.tolist()).encode() if array.dtype.hasobject else values.tobytes()
        found = zlib.crc32(content, found)
    return found


def row_sums(array: Array) -> Array:
    """Return a number for each row of an array [N, ...]: the sum of its bytes, as many at a time as divide it."""
    if array.dtype.hasobject:
        return np.asarray([zlib.crc32(repr(row).encode()) for row in np.atleast_1d(array).tolist()], np.uint64)
    rows = np.ascontiguousarray(np.atleast_1d(array))
    if not rows.size:
        return np.zeros(len(rows), np.uint64)
    content = rows.reshape(-1).view(np.uint8).reshape(len(rows), -1)
    unit = next(size for size in (8, 4, 2, 1) if content.shape[1] % size == 0)
    return np.asarray(content.view(f"u{unit}").sum(axis=1, dtype=np.uint64))


def sampled(blocks: Sequence[_T]) -> Sequence[_T]:
    """Return all blocks, or a bounded number of them with the first and the last.

    >>> len(sampled(range(10))), len(sampled(range(100_000))), sampled(range(100_000))[-1]
    (10, 256, 99999)
    """
    if len(blocks) <= _BLOCKS:
        return blocks
    return [blocks[index] for index in np.linspace(0, len(blocks) - 1, _BLOCKS).round().astype(int)]
