"""Predictions compared with targets as a report shows them: counts of mistakes, or pairs of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from onnxtrain.report.record import Confusion, Residuals
from onnxtrain.training.data.conversion import Array
from onnxtrain.training.metrics.reading import Reading
from onnxtrain.training.metrics.told import measure_whole
from onnxtrain.training.metrics.whole_metrics import Values, WholeMetric

MOST_CLASSES: Final = 500
"""Of more classes no matrix is kept."""

MOST_PAIRS: Final = 2000
"""Up to so many pairs of numbers are kept, of more every second, fourth, ..."""


class Outcome:
    """A measure that keeps what a report shows, instead of a number.

    Args:
        reading: how predictions are to be read, of a loss that says what they are.
        labels: the names of the classes, where they have some.
    """

    name = "outcome"
    of_output = False
    value = math.nan

    def __init__(self, reading: Reading, labels: Sequence[str] | None = None) -> None:
        self._labels = labels
        self._measured = measure_whole(
            reading, WholeMetric(self.name, ("classes", "binary", "numbers"), lambda _: np.zeros(0), lambda _: math.nan)
        )
        self._counts: Values | None = None
        self._pairs = np.zeros((0, 2))
        self._every = 1
        self._seen = 0
        self._too_many = 0

    def start(self) -> Outcome:
        """What takes the batches: itself."""
        return self

    def part(self, y_true: Array, y_pred: Array) -> tuple[str, Any]:
        """What counts of a batch: counts of mistakes, or pairs of numbers."""
        found = self._measured.read(y_true, y_pred)
        if found.kind == "numbers":
            return "numbers", np.stack([found.truth, found.scores], axis=1)
        if found.kind == "classes" and found.scores.shape[1] > MOST_CLASSES:
            return "too many", found.scores.shape[1]
        return "counts", found.confusion()

    def take(self, part: tuple[str, Any]) -> None:
        """Take what counts of the next batch."""
        kind, found = part
        if kind == "numbers":
            self._add_numbers(found)
        elif kind == "too many":
            self._too_many = found
        else:
            self._counts = found if self._counts is None else self._counts + found

    def _add_numbers(self, pairs: Values) -> None:
        """Keep every so many-th pair, evenly over all that came."""
        self._pairs = np.concatenate([self._pairs, pairs[-self._seen % self._every :: self._every]])
        self._seen += len(pairs)
        while len(self._pairs) > MOST_PAIRS:
            self._pairs, self._every = self._pairs[::2], self._every * 2

    @property
    def note(self) -> str:
        """Why there is nothing to show, or ""."""
        return f"Of {self._too_many} classes no matrix is drawn." if self._too_many else ""

    def shown(self) -> list[Confusion | Residuals]:
        """What a report draws."""
        if len(self._pairs):
            return [Residuals(self._pairs[:, 0].tolist(), self._pairs[:, 1].tolist())]
        if self._counts is None:
            return []
        if self._counts.ndim == 2:
            names = self._labels or [str(index) for index in range(len(self._counts))]
            return [Confusion(self._counts.tolist(), list(names))]
        several = len(self._counts) > 1
        return [
            Confusion(counts.tolist(), ["no", "yes"], f"question {index}" if several else "")
            for index, counts in enumerate(self._counts)
        ]
