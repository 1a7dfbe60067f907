"""An adapter as a value: small matrices by the names of the layers that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Entry:
    """The adapter of one layer: x W becomes x (W + scale A B).

    Attributes:
        a: A [inputs, rank]; of a convolution [rank, inputs, *window].
        b: B [rank, outputs]; of a convolution [outputs, rank, 1, 1].
        scale: What x A B is multiplied with.
        magnitude: Of DoRA, the norm that each column of the weight gets [outputs].
        gain: Of DoRA, as files without the weights have it: the magnitude over the norm that there would be [outputs].
        embedding: Whether the layer looks rows up.
        alias: What the checkpoint calls the layer, where that is another name.
    """

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
        """The size of what comes in."""
        return int(self.a.shape[1]) if self.is_convolution else len(self.a)

    @property
    def outputs(self) -> int:
        """The size of what goes out."""
        return len(self.b) if self.is_convolution else int(self.b.shape[1])

    @property
    def size(self) -> int:
        """The number of its elements."""
        return sum(array.size for array in (self.a, self.b, self.magnitude, self.gain) if array is not None)

    def delta(self) -> Array:
        """scale A B, in float32 or wider: [inputs, outputs], of a convolution [outputs, inputs, *window]."""
        a, b = (array.astype(np.promote_types(array.dtype, np.float32)) for array in (self.a, self.b))
        if not self.is_convolution:
            return np.asarray((a @ b) * a.dtype.type(self.scale))
        rank = self.rank
        product = b.reshape(-1, rank) @ a.reshape(rank, -1)
        return np.asarray(product.reshape(self.outputs, *a.shape[1:]) * a.dtype.type(self.scale))


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapters of a model's layers.

    Attributes:
        entries: By the names of the layers.
        rank: The rank that the settings name; single layers may have another.
        alpha: The weight that they name.
        rslora: Whether their scale is the rank-stabilized one.
        dropout: The dropout that they were trained with.
        base: What the manifest says of the model that they were made for; ``None`` where there is none.
        folded: Whether it is not known which scale B contains.
    """

    entries: Mapping[str, Entry]
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    base: Mapping[str, Any] | None = None
    folded: bool = False

    @property
    def dora(self) -> bool:
        """Return whether any layer has a DoRA magnitude vector."""
        return any(entry.magnitude is not None or entry.gain is not None for entry in self.entries.values())
