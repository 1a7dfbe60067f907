"""Packed sparse weights: the values of blocks that are not zero, and 16-bit deltas of their flat indices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCKS = (1, 4, 16)
"""Outputs of a block, which share an index."""

COST = {1: 1.0, 4: 0.5, 16: 0.55}
"""Time of a multiplication in a block, relative to one of a single weight: a block loads its input once
(``benchmarks/sparse.py`` measures it)."""

_LARGEST_DELTA = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [outputs, depth] as blocks."""

    values: np.ndarray
    deltas: np.ndarray
    outputs: int
    depth: int

    @property
    def block(self) -> int:
        """Outputs that share an index."""
        return int(self.values.shape[1])

    @property
    def shape(self) -> list[int]:
        """The attribute ``shape`` of the operators: [block rows, depth, block]."""
        return [self.outputs // self.block, self.depth, self.block]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.values.nbytes + self.deltas.nbytes)


def pack(matrix: np.ndarray) -> PackedWeight:
    """Pack a matrix [outputs, depth] in the blocks that multiply fastest.

    Example:
        >>> packed = pack(np.array([[0, 2, 0], [0, 0, 3]], np.float32))
        >>> packed.values.ravel().tolist(), packed.deltas.tolist(), packed.shape
        ([2.0, 3.0], [1, 4], [2, 3, 1])
    """
    outputs, depth = matrix.shape
    stored = {block: _blocks(matrix, block) for block in BLOCKS if outputs % block == 0}
    block = min(stored, key=lambda size: np.count_nonzero(stored[size].any(axis=1)) * size * COST[size])
    blocks = stored[block]
    indices = np.flatnonzero(blocks.any(axis=1))
    deltas, kept = _deltas(indices)
    values = np.where(kept[:, None] >= 0, blocks[indices[kept]] if len(indices) else 0, 0)
    return PackedWeight(values.astype(np.float32).reshape(-1, block), deltas, outputs, depth)


def _blocks(matrix: np.ndarray, block: int) -> np.ndarray:
    """Return the blocks, [outputs / block * depth, block]."""
    outputs, depth = matrix.shape
    return matrix.reshape(outputs // block, block, depth).transpose(0, 2, 1).reshape(-1, block)


def _deltas(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the deltas, and for each the place of its index; -1 for one that bridges a gap of more than 16 bits."""
    gaps = np.diff(indices, prepend=0)
    bridges = np.maximum(gaps - 1, 0) // _LARGEST_DELTA
    count = len(indices) + int(bridges.sum())
    places = np.full(count, -1)
    at = np.arange(len(indices)) + np.cumsum(bridges)
    places[at] = np.arange(len(indices))
    deltas = np.full(count, _LARGEST_DELTA, np.uint16)
    deltas[at] = gaps - bridges * _LARGEST_DELTA
    return deltas, places
