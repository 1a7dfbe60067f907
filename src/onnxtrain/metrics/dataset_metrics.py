"""Metrics that are not means of batches: exact over a whole dataset, from sums or from all scores."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxtrain.data.conversion import Array, kind_of
from onnxtrain.data.target_checks import check_labels
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.metrics.base import EVERY, CountedPredictions, NamedMetric, PredictionKind, entered, extended
from onnxtrain.metrics.means import as_numbers, checked_options
from onnxtrain.operators.call_text import read_call

Values = npt.NDArray[np.float64]

AVERAGES: Final = ("macro", "micro", "weighted")
"""Averages over classes: macro (mean of classes), micro (all examples together), weighted (by class size)."""


@dataclass(frozen=True)
class Predictions:
    """Targets and predictions of some examples in a normalized layout."""

    kind: PredictionKind
    truth: Array
    scores: Values

    @classmethod
    def of(
        cls, kind: PredictionKind, y_true: Array, y_pred: Array, *, axis: int = 1, ignore_index: int | None = None
    ) -> Predictions:
        """Normalize targets and predictions of any shape."""
        scores = as_numbers(y_pred, "predictions")
        misfit = DataError(f"Targets of shape {y_true.shape} do not fit predictions of shape {y_pred.shape}.")
        if kind != "classes":
            if y_true.size != scores.size or len(y_true) != len(scores):
                raise misfit
            truth = as_numbers(y_true, "targets").reshape(scores.shape)
            if kind == "binary":
                several = 0 < axis < scores.ndim
                columns = scores.shape[axis] if several else 1
                truth, scores = (np.moveaxis(each, axis, -1) if several else each for each in (truth, scores))
            else:
                columns = scores[:1].size
            rows = scores.size // columns if columns else 0
            return cls(kind, truth.reshape(rows, columns), scores.reshape(rows, columns))
        if not 0 < axis < scores.ndim:
            raise DataError(f"Predictions of shape {scores.shape} have no axis {axis} for the classes.")
        truth = y_true.argmax(axis) if y_true.shape == scores.shape else y_true
        labels, flat = truth.reshape(-1), np.moveaxis(scores, axis, -1).reshape(-1, scores.shape[axis])
        if len(labels) != len(flat):
            raise misfit
        if ignore_index is not None:
            kept = labels != ignore_index
            labels, flat = labels[kept], flat[kept]
        if kind_of(labels.dtype) == "float" and (labels == np.floor(labels)).all():
            labels = labels.astype(np.int64)  # as user-defined losses may have them
        check_labels(labels, flat.shape[1])
        return cls(kind, labels.astype(np.int64), flat)

    def confusion(self) -> Values:
        """Count examples of class i predicted as class j [classes, classes]; for binary outputs [outputs, 2, 2]."""
        if self.kind == "classes":
            return _counted(self.truth, self.scores.argmax(1), self.scores.shape[1])
        truth, said = self.truth > 0.5, self.scores > 0
        counts = [[(~truth & ~said).sum(0), (~truth & said).sum(0)], [(truth & ~said).sum(0), (truth & said).sum(0)]]
        return np.asarray(counts, np.float64).transpose(2, 0, 1)

    def probabilities(self) -> Values:
        """Return probabilities of classes [M, classes], or of the positive class [M, outputs]."""
        if self.kind == "binary":
            return sigmoid(self.scores)
        return softmax(self.scores)


def softmax(scores: Values, axis: int = -1) -> Values:
    """exp(z) / sum exp(z) along an axis."""
    raised = np.exp(scores - scores.max(axis, keepdims=True))
    return np.asarray(raised / raised.sum(axis, keepdims=True))


def sigmoid(scores: Values) -> Values:
    """1 / (1 + exp(-z)), without overflow."""
    small = np.exp(-np.abs(scores))
    return np.asarray(np.where(scores >= 0, 1 / (1 + small), small / (1 + small)))


def _counted(truth: Array, said: Array, size: int) -> Values:
    pairs = truth * size + said
    return np.asarray(np.bincount(pairs, minlength=size * size).reshape(size, size), np.float64)


@dataclass(frozen=True)
class DatasetMetric:
    """A metric of a whole dataset."""

    name: str
    reads: tuple[PredictionKind, ...]
    measure: Callable[[Predictions], Values]
    finish: Callable[[Values], Any]
    summed: bool = True
    doc: str = ""
    number: bool = True

    def named(self, read: Callable[[Array, Array], Predictions], counted: CountedPredictions = EVERY) -> NamedMetric:
        """Return the metric for predictions that ``read`` converts."""
        if self.summed:
            return NamedMetric(
                self.name,
                lambda t, p: self.measure(read(t, p)),
                np.add,
                self.finish,
                counted=counted,
                number=self.number,
            )
        return NamedMetric(
            self.name,
            lambda t, p: [self.measure(read(t, p))],
            extended,
            lambda parts: self.finish(np.concatenate(parts)),
            counted=counted,
            number=self.number,
        )


def _ratio(part: Any, whole: Any) -> Values:
    """Divide; 0 / 0 is 0, as in scikit-learn."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    return np.asarray(np.divide(part, whole, out=np.zeros_like(part), where=whole != 0))


@dataclass(frozen=True)
class _ByClass:
    """A metric per class, averaged to one number."""

    parts: Callable[[Values, Values, Values], tuple[Any, Any]]
    average: str | None = None

    def __call__(self, confusion: Values) -> float:
        """Return the metric of a confusion matrix [classes, classes] or [outputs, 2, 2]."""
        if not confusion.sum():
            return float("nan")
        if confusion.ndim == 3 and (self.average is None or len(confusion) > 1):
            right, said, true = confusion[:, 1, 1], confusion[:, :, 1].sum(1), confusion[:, 1].sum(1)
        else:
            table = confusion[0] if confusion.ndim == 3 else confusion
            right, said, true = np.diagonal(table), table.sum(0), table.sum(1)
            found = np.arange(len(table)) == 1 if self.average is None and len(table) == 2 else (said + true) > 0
            right, said, true = right[found], said[found], true[found]
        part, whole = self.parts(right, said, true)
        if self.average == "micro":
            return float(_ratio(np.sum(part), np.sum(whole)))
        if self.average == "weighted":
            return float(_ratio((_ratio(part, whole) * true).sum(), true.sum()))
        return float(_ratio(part, whole).mean())


_BY_CLASS: Final[dict[str, tuple[Callable[[Values, Values, Values], tuple[Any, Any]], str]]] = {
    "precision": (lambda right, said, true: (right, said), "true positives among the predicted"),
    "recall": (lambda right, said, true: (right, true), "true positives among the actual"),
    "f1": (lambda right, said, true: (2 * right, said + true), "harmonic mean of precision and recall"),
    "iou": (lambda right, said, true: (right, said + true - right), "intersection over union"),
}


def _columns(kept: Values) -> list[tuple[Array, Values]]:
    """Split targets and scores by output; several classes are one against the rest."""
    half = kept.shape[1] // 2
    return [(kept[:, index] > 0.5, kept[:, half + index]) for index in range(half)]


def _one_against_rest(predictions: Predictions) -> Values:
    """Concatenate binary targets and scores [M, 2 outputs]."""
    truth, scores = predictions.truth, predictions.scores
    if predictions.kind == "classes":
        size = scores.shape[1]
        if size == 2:
            truth, scores = truth[:, None] == 1, scores[:, 1:] - scores[:, :1]
        else:
            truth, scores = truth[:, None] == np.arange(size), predictions.probabilities()
    return np.concatenate([truth.astype(np.float64), scores], axis=1)


def _auc(kept: Values) -> float:
    """Return the probability that a positive example scores higher than a negative one, ties half; macro mean."""
    areas = []
    for truth, scores in _columns(kept):
        if truth.all() or not truth.any() or np.isnan(scores).any():
            return float("nan")
        _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]  # mean ranks of ties, from 1
        positive, negative = int(truth.sum()), int((~truth).sum())
        areas.append((ranks[truth].sum() - positive * (positive + 1) / 2) / (positive * negative))
    return float(np.mean(areas))


def _average_precision(kept: Values) -> float:
    """sum over thresholds of (recall_i - recall_(i-1)) precision_i; macro mean. A class without examples gives 0."""
    if not len(kept):
        return float("nan")
    areas = []
    for truth, scores in _columns(kept):
        if np.isnan(scores).any():
            return float("nan")
        if not truth.any():
            areas.append(0.0)
            continue
        values, group = np.unique(-scores, return_inverse=True)
        true = np.cumsum(np.bincount(group, truth, len(values)))
        said = np.cumsum(np.bincount(group, minlength=len(values)))
        areas.append(float((np.diff(true, prepend=0) / truth.sum() * (true / said)).sum()))
    return float(np.mean(areas))


def _joined(predictions: Predictions) -> Values:
    """Concatenate targets and predictions [M, 2 columns]."""
    return np.concatenate([predictions.truth, predictions.scores], axis=1)


def _r2(kept: Values) -> float:
    """Mean over columns of 1 - sum (t - y)^2 / sum (t - mean t)^2.

    Constant targets give 1 where every prediction is exact, else 0. A single example gives NaN.
    """
    if len(kept) < 2:
        return float("nan")
    truth, found = np.split(kept, 2, axis=1)
    missed = ((truth - found) ** 2).sum(0)
    spread = np.where((truth == truth[0]).all(0), 0.0, ((truth - truth.mean(0)) ** 2).sum(0))
    known = spread > 0
    values = np.where(known, 1 - missed / np.where(known, spread, 1), np.where(missed == 0, 1.0, 0.0))
    return float(values.mean()) if not np.isnan(missed).any() else float("nan")


def _negative_log_likelihood(predictions: Predictions) -> Values:
    """Return the sum of -log p of the labels, and their number."""
    scores = predictions.scores - predictions.scores.max(1, keepdims=True)
    chosen = np.take_along_axis(scores, predictions.truth[:, None], 1)[:, 0]
    return np.array([(np.log(np.exp(scores).sum(1)) - chosen).sum(), len(chosen)])


def _top_hits(predictions: Predictions, count: int) -> Values:
    """Count labels among the `count` best classes (on ties the later class first), and all labels."""
    truth, scores = predictions.truth[:, None], predictions.scores
    own = np.take_along_axis(scores, truth, 1)
    before = (scores > own) | ((scores == own) & (np.arange(scores.shape[1]) > truth))
    return np.array([(before.sum(1) < count).sum(), len(own)], np.float64)


def _confidences(predictions: Predictions, bins: int) -> Values:
    """Return examples, sum of confidences and number of correct ones per bin [outputs, 3, bins]."""
    probabilities = predictions.probabilities()
    if predictions.kind == "classes":
        right = probabilities.argmax(1) == predictions.truth
        probabilities, right = probabilities.max(1)[:, None], right[:, None]
    else:
        right = predictions.truth > 0.5
    edges = np.linspace(0, 1, bins + 1)[1:-1]
    return np.stack(
        [
            [np.bincount(bin_of, weight, bins) for weight in (np.ones(len(chance)), chance, yes.astype(np.float64))]
            for chance, yes in zip(probabilities.T, right.T, strict=True)
            for bin_of in (np.searchsorted(edges, chance),)
        ]
    )


def _calibration_error(kept: Values) -> float:
    """sum over bins of |correct - confidence| / examples; mean over outputs."""
    examples, confidence, right = kept[:, 0], kept[:, 1], kept[:, 2]
    return float((np.abs(right - confidence).sum(1) / examples.sum(1)).mean()) if examples.sum() else float("nan")


def _table(confusion: Values) -> npt.NDArray[np.int64]:
    """Return counts [classes, classes]; [2, 2] for one binary output, [outputs, 2, 2] for several."""
    counts = confusion.astype(np.int64)
    return counts[0] if counts.ndim == 3 and len(counts) == 1 else counts


def _mean(kept: Values) -> float:
    return float(kept[0] / kept[1]) if kept[1] else float("nan")


_CLASSIFIED: Final[tuple[PredictionKind, ...]] = ("classes", "binary")


def _calibration(bins: int) -> DatasetMetric:
    measure = functools.partial(_confidences, bins=bins)
    doc = "gap between confidence and accuracy"
    return DatasetMetric("calibration_error", _CLASSIFIED, measure, _calibration_error, doc=doc)


def _by_class(name: str, average: str | None = None) -> DatasetMetric:
    parts, doc = _BY_CLASS[name]
    shown = name if average is None else f"{name}_{average}"
    return DatasetMetric(shown, _CLASSIFIED, Predictions.confusion, _ByClass(parts, average), doc=doc)


def _top(count: int) -> DatasetMetric:
    return DatasetMetric(f"top_{count}", ("classes",), functools.partial(_top_hits, count=count), _mean)


DATASET_METRICS: Final[dict[str, DatasetMetric]] = {
    metric.name: metric
    for metric in (
        *(_by_class(name, average) for name in _BY_CLASS for average in (None, *AVERAGES)),
        DatasetMetric("auc", _CLASSIFIED, _one_against_rest, _auc, summed=False, doc="area under the ROC curve"),
        DatasetMetric("average_precision", _CLASSIFIED, _one_against_rest, _average_precision, summed=False),
        DatasetMetric("perplexity", ("classes",), _negative_log_likelihood, lambda kept: float(np.exp(_mean(kept)))),
        _calibration(15),
        DatasetMetric("confusion_matrix", _CLASSIFIED, Predictions.confusion, _table, number=False),
        DatasetMetric("r2", ("numbers",), _joined, _r2, summed=False, doc="share of the variance that is explained"),
    )
}
"""Metrics of whole datasets by name."""

SHOWN: Final = tuple(name for name in DATASET_METRICS if not name.endswith(AVERAGES))
"""Names for messages, without other averages."""

_ALIASES: Final = {
    "f1_score": "f1",
    "precision_score": "precision",
    "recall_score": "recall",
    "jaccard": "iou",
    "roc_auc": "auc",
    "auroc": "auc",
    "ece": "calibration_error",
    "expected_calibration_error": "calibration_error",
    "r2_score": "r2",
    "top_k_accuracy": "top_k",
}
"""Names of these metrics in other libraries."""

DATASET_METRIC_NAMES: Final = (*DATASET_METRICS, "top_k", *_ALIASES)
"""All names that :func:`find_dataset_metric` accepts."""


def find_dataset_metric(name: object) -> DatasetMetric | None:
    """Find a metric such as ``"f1"``, ``"f1(average=micro)"`` or ``"top_k(5)"``; ``None`` for other names."""
    found = _find(name) if isinstance(name, str) else None
    return None if found is None else replace(found, name=str(name).strip())


def _find(name: str) -> DatasetMetric | None:
    call = read_call(name)
    if call is None:
        return None
    called = _ALIASES.get(call.name, call.name)
    if (ranked := re.fullmatch(r"top_(\d+)", called)) is not None:
        return _top(_at_least_one(name, [ranked[1]], "a number of classes", "top_k(5)"))
    given = [*call.positional, *call.named.values()]
    allowed = {"top_k": "k", "calibration_error": "bins", **dict.fromkeys(_BY_CLASS, "average")}.get(called)
    if called != "top_k" and called not in DATASET_METRICS:
        return None
    if len(given) > (allowed is not None) or any(key != allowed for key in call.named):
        takes = f"takes {allowed} alone" if allowed else "takes no arguments"
        raise OptionError(f"{name!r} gives the metric {call.name} unknown arguments; it {takes}.")
    if called == "top_k":
        return _top(_at_least_one(name, given or ["5"], "a number of classes", "top_k(5)"))
    if not given:
        return DATASET_METRICS[called]
    if called == "calibration_error":
        return _calibration(_at_least_one(name, given, "a number of bins", "calibration_error(15)"))
    average = given[0].strip().strip("'\"")
    if average not in AVERAGES:
        raise OptionError(f"average is {given[0]} in {name!r}; it is {', '.join(AVERAGES)}.")
    return _by_class(called, average)


def _at_least_one(name: str, given: Sequence[str], what: str, example: str) -> int:
    if not given[0].strip().isdecimal() or int(given[0]) < 1:
        raise OptionError(f"{name!r} needs {what} of at least 1, as in '{example}'.")
    return int(given[0])


@checks_arguments
def confusion_matrix(
    y_true: Any, y_pred: Any, *, classes: int | None = None, axis: int = 1, ignore_index: int | None = None
) -> npt.NDArray[np.int64]:
    """Count examples of class i predicted as class j [classes, classes].

    scikit-learn: ``confusion_matrix(y_true, y_pred, labels=range(classes))``.

    Args:
        y_true: Class indices [N, ...].
        y_pred: Scores [N, C, ...], whose largest is the prediction, or class indices of `y_true`'s shape.
        classes: Number of classes; by default that of the scores, or the largest index plus 1.
        axis: The class axis of scores.
        ignore_index: A label to ignore.

    Raises:
        DataError: The shapes do not fit each other, a label is not a class, or a score is NaN.

    >>> confusion_matrix([0, 1, 1], [0, 1, 0])
    array([[1, 0],
           [1, 1]])
    """
    given_options = {"classes": classes, "axis": axis, "ignore_index": ignore_index}
    checked_options("confusion_matrix", given_options, given_options)
    truth, given = entered(y_true, y_pred)
    if CountedPredictions(axis, ignore_index).hold_nan(truth, given):
        raise DataError("y_pred holds NaN, which is not a class; check the model.")
    if kind_of(given.dtype) == "float" and given.ndim != truth.ndim:
        return _table(Predictions.of("classes", truth, given, axis=axis, ignore_index=ignore_index).confusion())
    if truth.shape != given.shape:
        raise DataError(f"Targets of shape {truth.shape} do not fit predictions of shape {given.shape}.")
    kept = slice(None) if ignore_index is None else truth.reshape(-1) != ignore_index
    truth, given = truth.reshape(-1)[kept], given.reshape(-1)[kept]
    for array, what in ((truth, "y_true"), (given, "y_pred")):
        check_labels(array, classes, what=what)
    size = classes or int(max(truth.max(initial=0), given.max(initial=0))) + 1
    return _table(_counted(truth.astype(np.int64), given.astype(np.int64), size))
