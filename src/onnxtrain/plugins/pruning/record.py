"""Record of a pruning: settings and results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from onnxtrain.data.data_names import DataNames
from onnxtrain.model_file.file import ModelFile
from onnxtrain.plugins.pruning.thresholds import Probe


@dataclass(frozen=True)
class LayerRow:
    """Result of the pruning for one tensor."""

    name: str
    shape: tuple[int, ...]
    size: int
    non_zeros: int
    threshold: float
    max_scale: float | None

    @property
    def sparsity(self) -> float:
        """The fraction of zeros."""
        return 1 - self.non_zeros / self.size if self.size else 0.0


@dataclass(frozen=True)
class Point:
    """The accuracy, or the loss, at a sparsity."""

    sparsity: float
    value: float


@dataclass(frozen=True)
class PruneRecord:
    """Settings and results of a pruning."""

    method: str
    optimizer: str
    allocation: str
    block: tuple[int, int]
    n_m: tuple[int, int] | None
    metric: str
    measured_on: str
    accuracy_before: float
    accuracy_trained: float
    accuracy_after: float
    layers: tuple[LayerRow, ...]
    points: tuple[Point, ...]
    curve: tuple[Point, ...]
    probes: tuple[Probe, ...]
    masks: dict[str, np.ndarray] = field(repr=False)
    given: dict[str, np.ndarray] = field(repr=False)
    values: dict[str, np.ndarray] = field(repr=False)
    file: ModelFile = field(repr=False)
    names: DataNames = field(default_factory=DataNames, repr=False)
    structure: tuple[str, ...] = ()
    removed_structures: int = 0
    multiply_adds: tuple[int, int] = (0, 0)
    speedup: float = 1.0
    stops: dict[str, str] = field(default_factory=dict)
    shortfall: str = ""

    @property
    def size(self) -> int:
        """Number of weights in the pruned tensors."""
        return sum(row.size for row in self.layers)

    @property
    def non_zeros(self) -> int:
        """Number of remaining weights."""
        return sum(row.non_zeros for row in self.layers)

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in the pruned tensors."""
        return 1 - self.non_zeros / self.size

    @property
    def compression(self) -> float:
        """Number of weights over the number of remaining ones; infinite if none remains."""
        return self.size / self.non_zeros if self.non_zeros else math.inf
