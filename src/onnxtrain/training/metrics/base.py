"""What a metric is: a mean in two parts for those that are one, and what takes batch after batch for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from onnxtrain.training.data.conversion import Array

PredictionKind = Literal["classes", "binary", "numbers"]
"""What predictions are: scores along a class axis, independent logits, or the numbers themselves."""


class Metric(Protocol):
    """A number that says how well predictions agree with the truth."""

    def __call__(self, y_true: Array, y_pred: Array, /) -> float:
        """Compare targets and predictions, examples first in both."""
        ...


@dataclass(frozen=True)
class Terms:
    """A mean in two parts, so that means of batches combine exactly.

    Attributes:
        total: the weighted sum.
        weight: the sum of the weights; 0 when everything was ignored.
    """

    total: float
    weight: float

    @property
    def mean(self) -> float:
        """The weighted mean, NaN when nothing was counted."""
        return self.total / self.weight if self.weight else float("nan")


class Collector(Protocol):
    """Takes batch after batch and knows the value of all."""

    @property
    def value(self) -> float:
        """The value of all batches so far; NaN before the first."""
        ...

    def part(self, y_true: Array, y_pred: Array) -> Any:
        """What counts of a batch; another process may take it."""
        ...

    def take(self, part: Any) -> None:
        """Take what counts of the next batch."""
        ...


class Measure(Protocol):
    """A metric as an evaluation uses it."""

    @property
    def name(self) -> str:
        """What the value is called in results."""
        ...

    @property
    def of_output(self) -> bool:
        """Whether predictions are the model's output itself; see `NamedMetric`."""
        ...

    def start(self) -> Collector:
        """What takes the batches of one evaluation."""
        ...


class MeanAccumulator:
    """The mean of values of batches, each weighted by the size of its batch, in float64.

    >>> mean = MeanAccumulator()
    >>> mean.add(1.0, 3)
    >>> mean.add(5.0, 1)
    >>> mean.value
    2.0
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._weight = 0.0

    def add(self, value: float, weight: float) -> None:
        """Add the mean of one batch with its weight; a weight of 0 adds nothing, whatever the value."""
        self.add_terms(terms_of(value, weight))

    def add_terms(self, terms: Terms) -> None:
        """Add a batch as what `NamedMetric.measure` returns."""
        self._total += terms.total
        self._weight += terms.weight

    @property
    def value(self) -> float:
        """The mean so far; NaN before anything was added."""
        return Terms(self._total, self._weight).mean


class Means:
    """The mean of a metric that is one."""

    def __init__(self, measure: Callable[[Array, Array], Terms]) -> None:
        self._measure, self._mean = measure, MeanAccumulator()

    def part(self, y_true: Array, y_pred: Array) -> Terms:
        """The terms of a batch."""
        return self._measure(y_true, y_pred)

    def take(self, part: Terms) -> None:
        """Add the terms of a batch."""
        self._mean.add_terms(part)

    @property
    def value(self) -> float:
        """The mean so far."""
        return self._mean.value


def terms_of(value: float, weight: float) -> Terms:
    """The terms of a mean that is known; a weight of 0 counts nothing, whatever the value."""
    return Terms(float(value) * weight if weight else 0.0, float(weight))
