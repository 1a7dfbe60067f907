"""The protocol of metrics: start, update, merge, result; a NaN score makes every metric NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeGuard

import numpy as np

from onnxtrain.data.conversion import Array, kind_of, to_numpy
from onnxtrain.errors import DataError
from onnxtrain.errors.spelling import checks_arguments

if TYPE_CHECKING:
    from onnxtrain.metrics.error_rates import CharacterErrorRate


PredictionKind = Literal["classes", "binary", "numbers"]
"""Meaning of predictions: scores along a class axis, independent binary logits, or plain values."""

MetricFunction = Callable[[Array, Array], Any]
"""A metric as a function of all targets and all predictions."""


class Metric(Protocol):
    """A metric of a dataset that is read in batches: ``start``, ``update``, ``merge``, ``result``.

    A state summarizes some examples. It is a plain value that can be pickled, since processes exchange theirs.
    ``update`` and ``merge`` may modify and return the state that they are given.
    """

    @property
    def name(self) -> str:
        """Name of the value in results."""
        ...

    @property
    def of_output(self) -> bool:
        """True where predictions are the model's output instead of the logits before a final Softmax or Sigmoid."""
        ...

    def start(self) -> Any:
        """Return the state of no examples."""
        ...

    def update(self, state: Any, y_true: Array, y_pred: Array, /) -> Any:
        """Return the state with a batch added: targets and predictions, examples first."""
        ...

    def merge(self, state: Any, other: Any, /) -> Any:
        """Return the state of the examples of both; those of `state` come first."""
        ...

    def result(self, state: Any, /) -> Any:
        """Return the value of a state."""
        ...


@dataclass(frozen=True)
class Terms:
    """Numerator and denominator of a mean, so that means of batches combine exactly."""

    total: float
    weight: float

    def __add__(self, other: Terms) -> Terms:
        return Terms(self.total + other.total, self.weight + other.weight)

    @property
    def mean(self) -> float:
        """The weighted mean; NaN where the weight is 0."""
        return self.total / self.weight if self.weight else float("nan")


class MeanAccumulator:
    """Weighted mean of the values of batches, in float64.

    >>> mean = MeanAccumulator()
    >>> mean.add(1.0, 3)
    >>> mean.add(5.0, 1)
    >>> mean.value
    2.0
    """

    def __init__(self) -> None:
        self._terms = Terms(0.0, 0.0)

    def add(self, value: float, weight: float) -> None:
        """Add the mean of a batch with its weight; a weight of 0 adds nothing, even for NaN."""
        if weight:
            self._terms += Terms(float(value) * weight, float(weight))

    @property
    def weight(self) -> float:
        """Sum of the weights so far."""
        return self._terms.weight

    @property
    def value(self) -> float:
        """The mean so far; NaN before the first batch."""
        return self._terms.mean


class CountedPredictions(NamedTuple):
    """Selection of the predictions that a metric evaluates: those of ignored labels are excluded."""

    axis: int = 1
    ignore_index: int | None = None
    later: int = 0

    def hold_nan(self, y_true: Array, y_pred: Array) -> bool:
        """Return whether an evaluated prediction is NaN."""
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
"""All predictions are evaluated."""


class _NotANumber:
    """State of a metric after a NaN score."""

    def __reduce__(self) -> str:
        return "NOT_A_NUMBER"  # unpickled as the same object


NOT_A_NUMBER: Final = _NotANumber()


@dataclass(frozen=True)
class NamedMetric:
    """The implementation of :class:`Metric` that evaluations run: any NaN score makes the value NaN.

    Attributes:
        name: The name of the value in results.
        measure: Maps (y_true, y_pred) of a batch to its state.
        join: Merges two states; it may modify the first.
        finish: Maps the state of all batches to the value.
        of_output: True if predictions are the model's output, instead of the input of the loss: the logits before a
            final activation that the loss contains.
        counted: The evaluated predictions.
        number: True if the value is a single number, as rows of a history require.
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
        with np.errstate(invalid="ignore", over="ignore"):  # differences of infinite scores are NaN
            return self.merge(state, self.measure(y_true, y_pred))

    def merge(self, state: Any, other: Any, /) -> Any:
        """Return the state of the examples of both."""
        if state is None or other is None:
            return other if state is None else state
        nan = state is NOT_A_NUMBER or other is NOT_A_NUMBER  # "==" on arrays is elementwise
        return NOT_A_NUMBER if nan else self.join(state, other)

    def result(self, state: Any, /) -> Any:
        """Return the value; NaN without examples or after a NaN score."""
        if state is None or state is NOT_A_NUMBER:
            return float("nan")
        with np.errstate(invalid="ignore", over="ignore"):
            return self.finish(state)

    def __call__(self, y_true: Any, y_pred: Any, /) -> Any:
        """Compute the value for arrays, or data that convert to arrays."""
        return self.result(self.update(self.start(), *entered(y_true, y_pred)))


def of_present(metric: NamedMetric) -> NamedMetric:
    """Return the metric for targets some of which are missing (NaN): the mean over columns of its value on the others.

    Of targets of more axes it measures all present elements together; a table, such as the confusion matrix, counts the
    rows without a missing target.
    """

    def measure(y_true: Array, y_pred: Array) -> dict[int, Any]:
        if not metric.number or y_true.size != y_pred.size:
            rows = ~np.isnan(y_true).reshape(len(y_true), -1).any(1)
            parts = [(y_true[rows], y_pred[rows])]
        else:
            rank = (len(y_true), -1) if y_true.ndim <= 2 else (-1, 1)
            columns = zip(y_true.reshape(rank).T, y_pred.reshape(rank).T, strict=True)
            parts = [(true[~np.isnan(true), None], pred[~np.isnan(true), None]) for true, pred in columns]
        return {column: metric.update(None, *part) for column, part in enumerate(parts) if len(part[0])}

    def join(state: dict[int, Any], other: dict[int, Any]) -> dict[int, Any]:
        return {key: metric.merge(state.get(key), other.get(key)) for key in sorted(state.keys() | other.keys())}

    def finish(state: dict[int, Any]) -> Any:
        found = [metric.result(each) for each in state.values()]
        return found[0] if len(found) == 1 else float(np.mean(found)) if found else float("nan")

    return replace(metric, measure=measure, join=join, finish=finish)


def entered(y_true: Any, y_pred: Any) -> tuple[Array, Array]:
    """Convert targets and predictions to arrays."""
    found = to_numpy(y_true, "y_true"), to_numpy(y_pred, "y_pred")
    for name, array in zip(("y_true", "y_pred"), found, strict=True):
        if not array.ndim or array.dtype.fields is not None:
            kind = "records" if array.ndim else "a single value"
            raise DataError(f"{name} holds {kind}; give an array of numbers, examples first.")
    return found


def extended(one: list[Any], other: list[Any]) -> list[Any]:
    """Add a list to another one: joins states that keep all examples."""
    one.extend(other)
    return one


def is_metric(value: object) -> TypeGuard[Metric]:
    """Return whether an object has the methods of a metric."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("start", "update", "merge", "result")
    )


class Detections(NamedTuple):
    """Predicted boxes of images."""

    boxes: Array
    scores: Array
    overlapping: bool = False


class MetricInput(NamedTuple):
    """Meaning of the predictions and targets of a loss."""

    loss: str
    predicts: PredictionKind | None
    axis: int = 1
    ignore_index: int | None = None
    probabilities: bool = False
    later: int = 0
    sequence: CharacterErrorRate | None = None
    rewards: Callable[[Array, Array], tuple[Array, Array]] | None = None
    pairs: bool = True
    detections: Callable[[Array], Detections] | None = None

    @property
    def counted(self) -> CountedPredictions:
        """The evaluated predictions."""
        return CountedPredictions(self.axis, self.ignore_index, self.later)


@checks_arguments
@dataclass(frozen=True)
class LossMetric:
    """A metric of what a loss predicts, such as boxes, for :func:`onnxtrain.register_metric`.

    Attributes:
        of: Returns the metric for the predictions of a loss, or raises ``OptionError`` where it is for others.
    """

    of: Callable[[MetricInput], NamedMetric]
