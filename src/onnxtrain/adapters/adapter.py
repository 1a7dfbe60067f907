"""In-memory adapter: low-rank matrices by layer name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxtrain.adapters.checkpoint import Checkpoint

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Entry:
    """The adapter of one layer: x W becomes x (W + scale A B)."""

    a: Array
    b: Array
    scale: float = 1.0
    magnitude: Array | None = None
    gain: Array | None = None
    embedding: bool = False
    alias: str = ""

    @property
    def is_convolution(self) -> bool:
        """Return whether the layer is a convolution."""
        return self.a.ndim > 2

    @property
    def rank(self) -> int:
        """The number of columns of A and rows of B."""
        return len(self.a) if self.is_convolution else int(self.a.shape[1])

    @property
    def inputs(self) -> int:
        """Number of input features."""
        return int(self.a.shape[1]) if self.is_convolution else len(self.a)

    @property
    def outputs(self) -> int:
        """Number of output features."""
        return len(self.b) if self.is_convolution else int(self.b.shape[1])

    @property
    def size(self) -> int:
        """Number of elements of all its arrays."""
        return sum(array.size for array in (self.a, self.b, self.magnitude, self.gain) if array is not None)

    def delta(self) -> Array:
        """Compute scale A B in float32 or wider: [inputs, outputs]; [outputs, inputs, *window] for a convolution."""
        a, b = (array.astype(np.promote_types(array.dtype, np.float32)) for array in (self.a, self.b))
        if not self.is_convolution:
            return np.asarray((a @ b) * a.dtype.type(self.scale))
        rank = self.rank
        product = b.reshape(-1, rank) @ a.reshape(rank, -1)
        return np.asarray(product.reshape(self.outputs, *a.shape[1:]) * a.dtype.type(self.scale))


def concatenated(terms: Sequence[tuple[Entry, float]], scale: float) -> Entry:
    """Return the adapter that adds the sum of factor x scale A B of several adapters of one layer: ranks add up."""
    first = terms[0][0]
    a = np.concatenate([entry.a for entry, _ in terms], axis=0 if first.is_convolution else 1)
    scaled = [entry.b * entry.b.dtype.type(factor * entry.scale / scale) for entry, factor in terms]
    return replace(first, a=a, b=np.concatenate(scaled, axis=1 if first.is_convolution else 0), scale=scale)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapters of a model's layers."""

    entries: Mapping[str, Entry]
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    base: Mapping[str, Any] | None = None
    folded: bool = False
    tensors: Mapping[str, Array] = field(default_factory=dict)
    of_modules: Mapping[str, Array] = field(default_factory=dict)
    trained: tuple[str, ...] | None = None
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @property
    def dora(self) -> bool:
        """Return whether any layer has a DoRA magnitude vector."""
        return any(entry.magnitude is not None or entry.gain is not None for entry in self.entries.values())

    def patterns(self) -> dict[str, dict[str, float]]:
        """Return the ranks and alphas of the layers that differ from the usual ones: PEFT's rank and alpha patterns."""
        root = math.sqrt if self.rslora else float
        ranks, alphas = dict[str, float](), dict[str, float]()
        for name, entry in self.entries.items():
            alpha = entry.scale * root(entry.rank)
            if entry.rank != self.rank:
                ranks[entry.alias or name] = entry.rank
            if abs(alpha - self.alpha) > 1e-6 * abs(self.alpha):
                alphas[entry.alias or name] = integral(alpha)
        return {"rank_pattern": ranks, "alpha_pattern": alphas}


def integral(number: float) -> float:
    """Convert a number that is an integer up to rounding to int."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-6 * max(1.0, abs(number)) else number
