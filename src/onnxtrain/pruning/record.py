"""The record of a pruning: its settings and its results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from onnxtrain.data.data_names import DataNames
from onnxtrain.model_file.file import ModelFile
from onnxtrain.pruning.thresholds import Probe


@dataclass(frozen=True)
class LayerRow:
    """Result of the pruning for one tensor.

    Attributes:
        name: Its name.
        shape: Its shape.
        size: All its elements.
        non_zeros: Those that are left.
        threshold: Magnitude of the smallest survivor of the cut; infinite where there is none.
        max_scale: The largest s, by which a step was multiplied, before the last cut; ``None`` without promotion.
    """

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
    """An accuracy (or loss) at a sparsity."""

    sparsity: float
    value: float


@dataclass(frozen=True)
class PruneRecord:
    """Settings and results of a pruning.

    Attributes:
        method: "ssgd", "magnitude" or "random".
        optimizer: Update rule of the training.
        scope: "global" or "layer".
        metric: "accuracy", or "loss" where accuracy has no meaning.
        measured_on: "validation data" or "training data".
        accuracy_before: Of the model given; like all of these the loss where ``metric`` says so.
        accuracy_trained: Before the last cut.
        accuracy_after: Of the result.
        layers: What became of every tensor.
        points: After every cut, without fine-tuning.
        curve: What cuts to other sparsities would have left in place of the last one, without fine-tuning.
        probes: What the search for an accuracy bound tried.
        masks: By tensor, true where a weight stays.
        given: The weights before anything was done.
        values: All that is trained, with its zeros.
    """

    method: str
    optimizer: str
    scope: str
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

    @property
    def size(self) -> int:
        """Number of weights in the pruned tensors."""
        return sum(row.size for row in self.layers)

    @property
    def non_zeros(self) -> int:
        """Number of weights that are left."""
        return sum(row.non_zeros for row in self.layers)

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in the pruned tensors."""
        return 1 - self.non_zeros / self.size

    @property
    def compression(self) -> float:
        """All weights over those that are left, as papers give it; infinite where none is left."""
        return self.size / self.non_zeros if self.non_zeros else math.inf
