"""Metrics that are no means of batches: exact over a whole data set, from sums or from all scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import OptionError
from onnxtrain.training.call_text import read_call
from onnxtrain.training.data.conversion import Array
from onnxtrain.training.metrics.base import PredictionKind

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """Targets and predictions of some examples in one form.

    Attributes:
        kind: what they are.
        truth: classes [M]; answers of 0 and 1 [M, questions]; or numbers [M].
        scores: logits [M, classes] or [M, questions], or numbers [M].
    """

    kind: PredictionKind
    truth: Array
    scores: Values

    @classmethod
    def of(
        cls, kind: PredictionKind, y_true: Array, y_pred: Array, *, axis: int = 1, ignore_index: int | None = None
    ) -> Predictions:
        """Bring targets and predictions of any shape to that form."""
        scores = np.asarray(y_pred, np.float64)
        if kind == "numbers":
            return cls(kind, np.asarray(y_true, np.float64).reshape(-1), scores.reshape(-1))
        if kind == "binary":
            questions = scores.shape[-1] if scores.ndim > 1 else 1
            return cls(kind, np.asarray(y_true).reshape(-1, questions), scores.reshape(-1, questions))
        truth = np.asarray(y_true)
        if truth.shape == scores.shape:
            truth = truth.argmax(axis)
        labels, flat = truth.reshape(-1), np.moveaxis(scores, axis, -1).reshape(-1, scores.shape[axis])
        if ignore_index is not None:
            kept = labels != ignore_index
            labels, flat = labels[kept], flat[kept]
        return cls(kind, labels.astype(np.int64), flat)

    def confusion(self) -> Values:
        """How often class i was taken for class j [classes, classes]; for questions [questions, 2, 2]."""
        if self.kind == "classes":
            size = self.scores.shape[1]
            pairs = self.truth * size + self.scores.argmax(1)
            return np.asarray(np.bincount(pairs, minlength=size * size).reshape(size, size), np.float64)
        truth, said = self.truth > 0.5, self.scores > 0
        counts = [[(~truth & ~said).sum(0), (~truth & said).sum(0)], [(truth & ~said).sum(0), (truth & said).sum(0)]]
        return np.asarray(counts, np.float64).transpose(2, 0, 1)


@dataclass(frozen=True)
class WholeMetric:
    """A metric of a whole data set.

    Attributes:
        name: what it is called.
        reads: for which predictions it is.
        measure: predictions of a batch to what is kept of them.
        finish: what was kept of all batches, joined, to the number.
        summed: whether what is kept is added up, instead of joined along the first axis.
        doc: what it is, in words.
    """

    name: str
    reads: tuple[PredictionKind, ...]
    measure: Callable[[Predictions], Values]
    finish: Callable[[Values], float]
    summed: bool = True
    doc: str = ""


def _ratio(part: Any, whole: Any) -> Values:
    """0 where there is nothing to divide by, as in scikit-learn."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    return np.asarray(np.divide(part, whole, out=np.zeros_like(part), where=whole != 0))


def _counts(confusion: Values) -> tuple[Values, Values, Values]:
    """Right, said and true of every class that occurs; of every question, of one class and two the positive one."""
    if confusion.ndim == 3:
        return confusion[:, 1, 1], confusion[:, :, 1].sum(1), confusion[:, 1].sum(1)
    right, said, true = np.diagonal(confusion), confusion.sum(0), confusion.sum(1)
    if len(confusion) == 2:
        return right[1:], said[1:], true[1:]
    found = (said + true) > 0
    return right[found], said[found], true[found]


def _precision(confusion: Values) -> float:
    right, said, _ = _counts(confusion)
    return float(_ratio(right, said).mean())


def _recall(confusion: Values) -> float:
    right, _, true = _counts(confusion)
    return float(_ratio(right, true).mean())


def _f1(confusion: Values) -> float:
    right, said, true = _counts(confusion)
    return float(_ratio(2 * right, said + true).mean())


def _iou(confusion: Values) -> float:
    right, said, true = _counts(confusion)
    return float(_ratio(right, said + true - right).mean())


def _columns(kept: Values) -> list[tuple[Array, Values]]:
    """Truths and scores of every question; for several classes each against the rest."""
    half = kept.shape[1] // 2
    return [(kept[:, index] > 0.5, kept[:, half + index]) for index in range(half)]


def _answers(predictions: Predictions) -> Values:
    """Truths and scores side by side [M, 2 questions]."""
    truth, scores = predictions.truth, predictions.scores
    if predictions.kind == "classes":
        size = scores.shape[1]
        if size == 2:
            truth, scores = truth[:, None] == 1, scores[:, 1:] - scores[:, :1]
        else:
            shifted = np.exp(scores - scores.max(1, keepdims=True))
            truth, scores = truth[:, None] == np.arange(size), shifted / shifted.sum(1, keepdims=True)
    return np.concatenate([truth.astype(np.float64), scores], axis=1)


def _auc(kept: Values) -> float:
    """The probability that a positive example scores higher than a negative one, ties counted half; macro mean.

    NaN where a class has no example, or all of them.
    """
    areas = []
    for truth, scores in _columns(kept):
        if truth.all() or not truth.any():
            return float("nan")
        _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]  # mean ranks of ties, from 1
        positive, negative = int(truth.sum()), int((~truth).sum())
        areas.append((ranks[truth].sum() - positive * (positive + 1) / 2) / (positive * negative))
    return float(np.mean(areas))


def _average_precision(kept: Values) -> float:
    """sum over thresholds of (recall_i - recall_(i-1)) precision_i; macro mean."""
    areas = []
    for truth, scores in _columns(kept):
        if truth.all() or not truth.any():
            return float("nan")
        values, group = np.unique(-scores, return_inverse=True)
        true = np.cumsum(np.bincount(group, truth, len(values)))
        said = np.cumsum(np.bincount(group, minlength=len(values)))
        areas.append(float((np.diff(true, prepend=0) / truth.sum() * (true / said)).sum()))
    return float(np.mean(areas))


def _joined(predictions: Predictions) -> Values:
    return np.stack([np.asarray(predictions.truth, np.float64), predictions.scores], axis=1)


def _r2(kept: Values) -> float:
    """1 - sum (t - y)^2 / sum (t - mean t)^2 over all elements."""
    truth, found = kept[:, 0], kept[:, 1]
    spread = ((truth - truth.mean()) ** 2).sum()
    return float(1 - ((truth - found) ** 2).sum() / spread) if spread else float("nan")


def _surprise(predictions: Predictions) -> Values:
    """The sum of -log p of the labels, and their number."""
    scores = predictions.scores - predictions.scores.max(1, keepdims=True)
    chosen = np.take_along_axis(scores, predictions.truth[:, None], 1)[:, 0]
    return np.array([(np.log(np.exp(scores).sum(1)) - chosen).sum(), len(chosen)])


def _right_in(count: int) -> Callable[[Predictions], Values]:
    def measure(predictions: Predictions) -> Values:
        own = np.take_along_axis(predictions.scores, predictions.truth[:, None], 1)
        better = (predictions.scores > own).sum(1)
        return np.array([(better < count).sum(), len(own)], np.float64)

    return measure


def _mean(kept: Values) -> float:
    return float(kept[0] / kept[1]) if kept[1] else float("nan")


_CLASSIFIED: Final[tuple[PredictionKind, ...]] = ("classes", "binary")

WHOLE: Final[dict[str, WholeMetric]] = {
    metric.name: metric
    for metric in (
        WholeMetric("precision", _CLASSIFIED, Predictions.confusion, _precision, doc="right among what was said"),
        WholeMetric("recall", _CLASSIFIED, Predictions.confusion, _recall, doc="right among what is true"),
        WholeMetric("f1", _CLASSIFIED, Predictions.confusion, _f1, doc="harmonic mean of precision and recall"),
        WholeMetric("iou", _CLASSIFIED, Predictions.confusion, _iou, doc="intersection over union"),
        WholeMetric("auc", _CLASSIFIED, _answers, _auc, summed=False, doc="area under the ROC curve"),
        WholeMetric("average_precision", _CLASSIFIED, _answers, _average_precision, summed=False),
        WholeMetric("perplexity", ("classes",), _surprise, lambda kept: float(np.exp(_mean(kept)))),
        WholeMetric("r2", ("numbers",), _joined, _r2, summed=False, doc="share of the variance that is explained"),
    )
}
"""The metrics of whole data sets by their names."""


def find_whole_metric(name: object) -> WholeMetric | None:
    """The metric of a name such as ``"f1"`` or ``"top_k(5)"``; ``None`` where it is none of these.

    Raises:
        OptionError: k is no number of classes.
    """
    if not isinstance(name, str):
        return None
    call = read_call(name)
    if call is None or call.name != "top_k":
        return WHOLE.get(name)
    given = [*call.positional, *call.named.values()] or ["5"]
    if len(given) > 1 or not given[0].strip().isdecimal() or int(given[0]) < 1:
        raise OptionError(f"{name!r} needs a number of classes of at least 1, as in 'top_k(5)'.")
    count = int(given[0])
    return WholeMetric(f"top_{count}", ("classes",), _right_in(count), _mean)


@dataclass(frozen=True)
class MeasuredWhole:
    """A metric of a whole data set that knows how to read predictions.

    Attributes:
        metric: the metric.
        read: targets and predictions to the form that it takes.
        of_output: see :class:`~onnxtrain.training.metrics.NamedMetric`.
    """

    metric: WholeMetric
    read: Callable[[Array, Array], Predictions]
    of_output: bool = False

    @property
    def name(self) -> str:
        """What the value is called in results."""
        return self.metric.name

    def start(self) -> _Kept:
        """What takes the batches of one evaluation."""
        return _Kept(self)


class _Kept:
    """What a metric keeps of the batches so far."""

    def __init__(self, measured: MeasuredWhole) -> None:
        self._measured = measured
        self._parts: list[Values] = []

    def part(self, y_true: Array, y_pred: Array) -> Values:
        """What the metric needs of a batch."""
        return self._measured.metric.measure(self._measured.read(y_true, y_pred))

    def take(self, part: Values) -> None:
        """Take what it needs of the next batch."""
        metric = self._measured.metric
        self._parts = [self._parts[0] + part] if metric.summed and self._parts else [*self._parts, part]

    @property
    def value(self) -> float:
        """The metric of all batches; NaN before the first."""
        if not self._parts:
            return float("nan")
        metric = self._measured.metric
        return metric.finish(self._parts[0] if metric.summed else np.concatenate(self._parts))
