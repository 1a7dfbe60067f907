"""The protocol of metrics: start, update, merge, result; a NaN score makes every metric NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeGuard

import numpy as np

from onnxtrain.data.conversion import Array, kind_of, to_numpy
from onnxtrain.errors import DataError

if TYPE_CHECKING:
    from onnxtrain.metrics.error_rates import CharacterErrorRate


PredictionKind = Literal["classes", "binary", "numbers"]
"""Kinds of predictions: scores along a class axis, independent logits, or plain values."""

MetricFunction = Callable[[Array, Array], Any]
"""A metric as a function of all targets and all predictions."""


class Metric(Protocol):
    """A metric of a data set that comes in batches: ``start``, ``update``, ``merge``, ``result``.

    A state is what a metric knows of some examples, a plain value that can be pickled: other processes send theirs.
    ``update`` and ``merge`` may change the state that they are given and return it.
    """

    @property
    def name(self) -> str:
        """The name of the value in results."""
        ...

    @property
    def of_output(self) -> bool:
        """Whether predictions are the model's output, instead of the logits before a final Softmax or Sigmoid."""
        ...

    def start(self) -> Any:
        """Return the state of no examples."""
        ...

    def update(self, state: Any, y_true: Array, y_pred: Array, /) -> Any:
        """Return the state with a batch added: targets and predictions, examples first."""
        ...

    def merge(self, state: Any, other: Any, /) -> Any:
        """Return the state of the examples of both, those of `state` first."""
        ...

    def result(self, state: Any, /) -> Any:
        """Return the value of the examples of a state."""
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
        if weight:
            self._total += float(value) * weight
            self._weight += float(weight)

    @property
    def value(self) -> float:
        """The mean so far; NaN before anything was added."""
        return Terms(self._total, self._weight).mean


class CountedPredictions(NamedTuple):
    """The predictions that a metric counts: of labels that are ignored it counts none.

    Attributes:
        axis: the axis of the classes.
        ignore_index: a label that does not count.
        later: how many positions along axis 1 a target stands behind the prediction that is for it.
    """

    axis: int = 1
    ignore_index: int | None = None
    later: int = 0

    def hold_nan(self, y_true: Array, y_pred: Array) -> bool:
        """Return whether a prediction that counts is NaN."""
        if kind_of(y_pred.dtype) != "float":
            return False
        if self.later:
            y_true, y_pred = y_true[:, self.later :], y_pred[:, : -self.later]
        wrong = np.isnan(y_pred)
        if not wrong.any():
            return False
        if self.ignore_index is None or y_true.ndim >= y_pred.ndim or y_pred.ndim <= self.axis:
            return True
        rows = wrong.any(self.axis)
        if rows.size != y_true.size:
            return True
        return bool((rows.reshape(-1) & (y_true != self.ignore_index).reshape(-1)).any())


EVERY: Final = CountedPredictions()
"""All predictions count."""


class _NotANumber:
    """The state of a metric that has met a score which is NaN."""

    def __reduce__(self) -> str:
        return "NOT_A_NUMBER"  # one object, in other processes, too


NOT_A_NUMBER: Final = _NotANumber()


@dataclass(frozen=True)
class NamedMetric:
    """A metric by its name. Every metric is one of these when it is measured: a score that is NaN makes it NaN.

    Attributes:
        name: the name of the value in results.
        measure: (y_true, y_pred) of a batch to its part of the state.
        join: two parts, the first of which may be changed, to the part of both.
        finish: the part of all batches to the value.
        of_output: whether predictions are the model's output itself, instead of what the loss is built on: the
            logits before a final activation that the loss contains.
        counted: which predictions count.
        number: whether the value is one number, which a row of a history can hold.
    """

    name: str
    measure: Callable[[Array, Array], Any]
    join: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any]
    of_output: bool = False
    counted: CountedPredictions = EVERY
    number: bool = True

    def start(self) -> Any:
        """Return the state of no examples."""
        return None

    def update(self, state: Any, y_true: Array, y_pred: Array, /) -> Any:
        """Return the state with a batch added."""
        if state is NOT_A_NUMBER or self.counted.hold_nan(y_true, y_pred):
            return NOT_A_NUMBER
        with np.errstate(invalid="ignore", over="ignore"):  # infinite scores: their differences are NaN
            return self.merge(state, self.measure(y_true, y_pred))

    def merge(self, state: Any, other: Any, /) -> Any:
        """Return the state of the examples of both."""
        if state is None or other is None:
            return other if state is None else state
        nan = state is NOT_A_NUMBER or other is NOT_A_NUMBER  # an array has no single answer to "=="
        return NOT_A_NUMBER if nan else self.join(state, other)

    def result(self, state: Any, /) -> Any:
        """Return the value; NaN where there are no examples, or a score is NaN."""
        if state is None or state is NOT_A_NUMBER:
            return float("nan")
        with np.errstate(invalid="ignore", over="ignore"):
            return self.finish(state)

    def __call__(self, y_true: Any, y_pred: Any, /) -> Any:
        """The value for arrays, or what converts to them.

        Raises:
            DataError: they do not convert, or do not fit each other.
        """
        return self.result(self.update(self.start(), *entered(y_true, y_pred)))


def entered(y_true: Any, y_pred: Any) -> tuple[Array, Array]:
    """Targets and predictions as arrays.

    Raises:
        DataError: they do not convert, are a single value each, or hold records.
    """
    found = to_numpy(y_true, "y_true"), to_numpy(y_pred, "y_pred")
    for name, array in zip(("y_true", "y_pred"), found, strict=True):
        if not array.ndim or array.dtype.fields is not None:
            kind = "records" if array.ndim else "a single value"
            raise DataError(f"{name} holds {kind}; give an array of numbers, examples first.")
    return found


def mean_metric(
    name: str,
    terms: Callable[[Array, Array], Terms],
    *,
    of_output: bool = False,
    counted: CountedPredictions = EVERY,
) -> NamedMetric:
    """A metric that is a mean of terms."""
    return NamedMetric(name, terms, _added, lambda found: found.mean, of_output, counted)


def _added(one: Terms, other: Terms) -> Terms:
    return Terms(one.total + other.total, one.weight + other.weight)


def is_metric(value: object) -> TypeGuard[Metric]:
    """Return whether an object has the methods of a metric."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("start", "update", "merge", "result")
    )


class MetricInput(NamedTuple):
    """The interpretation of the predictions and targets of a loss.

    Attributes:
        loss: the loss's name.
        predicts: what predictions are; None where the loss does not say.
        axis: the axis of the classes.
        ignore_index: a label that does not count.
        probabilities: whether predictions are probabilities over classes instead of logits.
        later: how many places along axis 1 a target stands behind the prediction that is for it.
        sequence: how to read labels in order from scores of steps, where the loss is for these.
    """

    loss: str
    predicts: PredictionKind | None
    axis: int = 1
    ignore_index: int | None = None
    probabilities: bool = False
    later: int = 0
    sequence: CharacterErrorRate | None = None

    @property
    def counted(self) -> CountedPredictions:
        """Which predictions a metric counts."""
        return CountedPredictions(self.axis, self.ignore_index, self.later)
