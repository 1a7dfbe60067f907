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
    """Result of the pruning for one tensor.

    Attributes:
        name: Its name.
        shape: Its shape.
        size: Number of elements.
        non_zeros: Number of non-zero elements.
        threshold: Smallest magnitude that survived the cut; infinite if none did.
        max_scale: Largest scale s of a step before the last cut; ``None`` without sparsity promotion.
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
    """The accuracy, or the loss, at a sparsity."""

    sparsity: float
    value: float


@dataclass(frozen=True)
class PruneRecord:
    """Settings and results of a pruning.

    Attributes:
        method: "ssgd", "magnitude" or "random".
        optimizer: Update rule of the training.
        allocation: "uniform", "global" or "flops".
        block: (outputs, inputs) of the blocks of weights.
        n_m: (n, m) where n of each m weights remain, or ``None``.
        metric: "accuracy", or "loss" for a model that does not classify; all accuracies below are then losses.
        measured_on: "validation data" or "training data".
        accuracy_before: Accuracy of the given model.
        accuracy_trained: Accuracy before the last cut.
        accuracy_after: Accuracy of the result.
        layers: One row per pruned tensor.
        points: Accuracy after each cut, without fine-tuning.
        curve: Accuracies of alternatives to the last cut at other sparsities, without fine-tuning.
        probes: The sparsities that the search for ``accuracy_drop`` tried.
        masks: By tensor, true for the remaining weights.
        given: The weights of the given model.
        values: Final values of the trained initializers, zeros included.
        file: The given model.
        names: Column names and class labels of the data.
        structure: The kinds of structures that were removed; empty for single weights. ``file`` is then the smaller
            model, ``masks`` and ``given`` belong to the given one, and a row's ``non_zeros`` are its remaining weights.
        removed_structures: How many were removed.
        multiply_adds: Multiply-adds of matmuls and convolutions before and after; free axes count once.
        speedup: The time of the trained model over that of the smaller one, for one example.
        stops: Operators through which structures could not be followed, each with the reason.
        shortfall: What the result lacks of what may be expected, in a sentence; "" where it lacks nothing.
    """

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
