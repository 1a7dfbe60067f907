"""Comparison of predictions with targets for a report: a confusion matrix, or pairs of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.metrics.base import MetricInput, NamedMetric
from onnxtrain.metrics.choice import reader
from onnxtrain.metrics.dataset_metrics import Values
from onnxtrain.training.report.record import Confusion, Residuals

MOST_CLASSES: Final = 500
"""Largest number of classes for which a matrix is kept."""

MOST_PAIRS: Final = 2000
"""Largest number of pairs that are kept; of more, every second, fourth, ..."""


@dataclass
class Outcome:
    """Comparison of predictions with targets for a report."""

    counts: Values | None = None
    pairs: Values = field(default_factory=lambda: np.zeros((0, 2)))
    every: int = 1
    seen: int = 0
    too_many: int = 0

    @property
    def note(self) -> str:
        """Reason for showing nothing, or ""."""
        return f"A matrix of {self.too_many} classes is not drawn." if self.too_many else ""

    def add(self, pairs: Values) -> None:
        """Add the pairs of the next batch, and thin out evenly."""
        self.pairs = np.concatenate([self.pairs, pairs[-self.seen % self.every :: self.every]])
        self.seen += len(pairs)
        while len(self.pairs) > MOST_PAIRS:
            self.pairs, self.every = self.pairs[::2], self.every * 2

    def shown(self, labels: Sequence[str] | None = None) -> list[Confusion | Residuals]:
        """Return the figures of a report."""
        if len(self.pairs):
            return [Residuals(self.pairs[:, 0].tolist(), self.pairs[:, 1].tolist())]
        if self.counts is None:
            return []
        if self.counts.ndim == 2:
            names = labels or [str(index) for index in range(len(self.counts))]
            return [Confusion(self.counts.tolist(), list(names))]
        several = len(self.counts) > 1
        return [
            Confusion(counts.tolist(), ["no", "yes"], f"output {index}" if several else "")
            for index, counts in enumerate(self.counts)
        ]


def outcome(metric_input: MetricInput) -> NamedMetric:
    """Return a metric whose value is an :class:`Outcome`."""
    read = reader(metric_input, "outcome", ("classes", "binary", "numbers"))

    def measure(y_true: Array, y_pred: Array) -> Outcome:
        found = read(y_true, y_pred)
        if found.kind == "numbers":
            pairs = np.stack([found.truth.reshape(-1), found.scores.reshape(-1)], axis=1)
            return Outcome(pairs=pairs, seen=len(pairs))
        if found.kind == "classes" and found.scores.shape[1] > MOST_CLASSES:
            return Outcome(too_many=found.scores.shape[1])
        return Outcome(found.confusion())

    return NamedMetric("outcome", measure, _joined, _thinned, counted=metric_input.counted, number=False)


def _joined(one: Outcome, other: Outcome) -> Outcome:
    """Add the outcome of the next batch."""
    if other.counts is not None:
        one.counts = other.counts if one.counts is None else one.counts + other.counts
    one.too_many = one.too_many or other.too_many
    one.add(other.pairs)
    return one


def _thinned(found: Outcome) -> Outcome:
    found.add(found.pairs[:0])
    return found
