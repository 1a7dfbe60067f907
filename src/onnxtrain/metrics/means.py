"""Metrics over NumPy arrays: accuracy, and the losses that models are trained with.

Every metric has the form ``metric(y_true, y_pred) -> float`` and computes in float64. Logits are the values
in front of a softmax or sigmoid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxtrain.data.conversion import Array, kind_of
from onnxtrain.data.target_checks import check_labels, checked_class_weights
from onnxtrain.errors import DataError, OptionError
from onnxtrain.metrics.base import CountedPredictions, MetricFunction, NamedMetric, PredictionKind, Terms, mean_metric
from onnxtrain.spelling import checks_arguments

_Values = npt.NDArray[np.float64]


@checks_arguments
def accuracy(
    y_true: Array,
    y_pred: Array,
    *,
    threshold: float = 0.5,
    ignore_index: int | None = None,
    axis: int = 1,
    binary: bool | None = None,
) -> float:
    """The fraction of right predictions.

    Args:
        y_true: class indices [N, ...], one-hot vectors or distributions of `y_pred`'s shape, or 0 and 1 for binary
            predictions.
        y_pred: logits or probabilities [N, C, ...], whose largest value counts; binary ones, each of which
            says yes above the threshold; or predicted class indices of `y_true`'s shape.
        threshold: for binary predictions: 0.5 for probabilities, 0 for logits.
        ignore_index: a label that is not counted.
        axis: the axis of the classes.
        binary: whether every number of `y_pred` answers a question of its own, yes or no, and is counted by
            itself. By default that is so for one column, [N] or [N, 1], and where `y_true` has zeros and ones of
            `y_pred`'s shape that are no one-hot vectors.

    Raises:
        DataError: the shapes do not fit each other, or `y_true` is none of these.

    >>> accuracy(np.array([0, 2]), np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1]]))
    0.5
    >>> accuracy(np.array([[1, 1], [0, 0]]), np.array([[0.9, 0.8], [0.2, 0.7]]), binary=True)
    0.75
    """
    return _value("accuracy", y_true, y_pred, threshold=threshold, ignore_index=ignore_index, axis=axis, binary=binary)


def _accuracy(
    y_true: Array,
    y_pred: Array,
    *,
    threshold: float = 0.5,
    ignore_index: int | None = None,
    axis: int = 1,
    binary: bool | None = None,
) -> Terms:
    labels: Array
    if binary is None and kind_of(y_pred.dtype) == "float" and y_true.shape == y_pred.shape:
        binary = _has_questions(y_true, axis)
    one_column = y_pred.ndim == 1 or (y_pred.ndim > axis and y_pred.shape[axis] == 1)
    if binary:
        truth, scores = _same_shape(y_true, y_pred)
        labels, predicted = truth.ravel() > 0.5, scores.ravel() > threshold
    elif kind_of(y_pred.dtype) != "float" and y_pred.size == y_true.size:
        labels, predicted = y_true.ravel(), y_pred.ravel()
    elif one_column and binary is not False:
        labels, scores = _same_shape(y_true, y_pred)
        labels, predicted = labels.ravel(), scores.ravel() > threshold
    elif y_pred.ndim > axis and y_true.shape == y_pred.shape:
        labels = as_numbers(y_true, "targets").argmax(axis).ravel()
        predicted = as_numbers(y_pred, "predictions").argmax(axis).ravel()
    else:
        _check_index_shape(y_true, y_pred, axis)
        labels, predicted = y_true.ravel(), as_numbers(y_pred, "predictions").argmax(axis).ravel()
    right = labels == predicted
    if ignore_index is not None:
        right = right[labels != ignore_index]
    return Terms(float(np.count_nonzero(right)), float(right.size))


@checks_arguments
def softmax_cross_entropy(
    y_true: Array,
    y_pred: Array,
    *,
    class_weights: Sequence[float] | Array | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    axis: int = 1,
) -> float:
    """Cross-entropy of a softmax over logits.

        loss = - sum over examples n of sum over classes c: w[c] t[n, c] log softmax(y_pred)[n, c] / W
        t    = (1 - label_smoothing) one_hot(y_true) + label_smoothing / C

    W is the sum of w[label] over the examples for class indices, their number for vectors of probabilities.
    PyTorch: ``torch.nn.functional.cross_entropy``.

    Args:
        y_true: class indices [N, ...], or one-hot vectors or probabilities of `y_pred`'s shape.
        y_pred: logits [N, C, ...].
        class_weights: one weight per class, 1 by default.
        label_smoothing: how much of the truth is spread evenly over all classes, from 0 to 1.
        ignore_index: a label that is left out.
        axis: the axis of the classes.

    Raises:
        DataError: the shapes do not fit each other, or a label is out of range.
    """
    return _value(
        "softmax_cross_entropy",
        y_true,
        y_pred,
        class_weights=class_weights,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        axis=axis,
    )


def _softmax_cross_entropy(
    y_true: Array,
    y_pred: Array,
    *,
    class_weights: Sequence[float] | Array | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    axis: int = 1,
) -> Terms:
    if y_pred.ndim <= axis:
        raise DataError(f"predictions of shape {y_pred.shape} have no axis {axis} for the classes.")
    classes = y_pred.shape[axis]
    weights = np.ones(classes) if class_weights is None else np.asarray(class_weights, np.float64)
    if weights.shape != (classes,):
        raise DataError(f"there are {weights.size} class weights for {classes} classes; one each is needed.")
    log_probabilities = _log_softmax(as_numbers(np.moveaxis(y_pred, axis, -1).reshape(-1, classes), "predictions"))
    if y_true.shape == y_pred.shape:
        truth = as_numbers(np.moveaxis(y_true, axis, -1).reshape(-1, classes), "targets")
        counted = np.ones(len(truth))
    else:
        _check_index_shape(y_true, y_pred, axis)
        check_labels(y_true, classes, ignore_index)
        labels = y_true.ravel()
        if ignore_index is not None:
            kept = labels != ignore_index
            labels, log_probabilities = labels[kept], log_probabilities[kept]
        truth = np.eye(classes)[labels.astype(np.intp)]
        counted = weights[labels.astype(np.intp)]
    truth = (1 - label_smoothing) * truth + label_smoothing / classes
    # Where the truth is 0 the term is 0, also for a probability of 0, whose logarithm is infinite.
    terms = np.multiply(weights * truth, log_probabilities, out=np.zeros_like(truth), where=truth != 0)
    return Terms(-float(terms.sum()), float(counted.sum()))


@checks_arguments
def binary_cross_entropy(y_true: Array, y_pred: Array) -> float:
    """Cross-entropy of a sigmoid over logits: mean of ``max(x, 0) - x t + log(1 + exp(-|x|))``.

    PyTorch: ``torch.nn.functional.binary_cross_entropy_with_logits``.

    Args:
        y_true: truths t from 0 to 1, of `y_pred`'s shape apart from axes of size 1.
        y_pred: logits x.

    Raises:
        DataError: the shapes do not fit each other.
    """
    return _value("binary_cross_entropy", y_true, y_pred)


def _binary_cross_entropy(y_true: Array, y_pred: Array) -> Terms:
    truth, logits = _same_shape(y_true, y_pred)
    return _sum(np.maximum(logits, 0) - logits * truth + np.log1p(np.exp(-np.abs(logits))))


@checks_arguments
def mean_squared_error(y_true: Array, y_pred: Array) -> float:
    """The mean of ``(y_pred - y_true)²``. PyTorch: ``torch.nn.functional.mse_loss``.

    Raises:
        DataError: the shapes do not fit each other.

    >>> mean_squared_error(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    2.0
    """
    return _value("mean_squared_error", y_true, y_pred)


def _mean_squared_error(y_true: Array, y_pred: Array) -> Terms:
    truth, prediction = _same_shape(y_true, y_pred)
    return _sum((prediction - truth) ** 2)


@checks_arguments
def mean_absolute_error(y_true: Array, y_pred: Array) -> float:
    """The mean of ``|y_pred - y_true|``. PyTorch: ``torch.nn.functional.l1_loss``.

    Raises:
        DataError: the shapes do not fit each other.
    """
    return _value("mean_absolute_error", y_true, y_pred)


def _mean_absolute_error(y_true: Array, y_pred: Array) -> Terms:
    truth, prediction = _same_shape(y_true, y_pred)
    return _sum(np.abs(prediction - truth))


@checks_arguments
def mean_absolute_percentage_error(y_true: Array, y_pred: Array) -> float:
    """The mean of ``|y_pred - y_true| / |y_true|``; a truth of 0 counts as the smallest step of float64 above 1.

    scikit-learn: ``mean_absolute_percentage_error``. 0.1 is ten percent.

    Raises:
        DataError: the shapes do not fit each other.

    >>> mean_absolute_percentage_error(np.array([2.0, 4.0]), np.array([1.0, 4.0]))
    0.25
    """
    return _value("mean_absolute_percentage_error", y_true, y_pred)


def _mean_absolute_percentage_error(y_true: Array, y_pred: Array) -> Terms:
    truth, prediction = _same_shape(y_true, y_pred)
    return _sum(np.abs(prediction - truth) / np.maximum(np.abs(truth), np.finfo(np.float64).eps))


@checks_arguments
def huber(y_true: Array, y_pred: Array, *, delta: float = 1.0) -> float:
    """The mean of ``d²/2`` where ``d = |y_pred - y_true| <= delta``, else of ``delta (d - delta/2)``.

    PyTorch: ``torch.nn.functional.huber_loss``.

    Args:
        y_true: truths.
        y_pred: predictions of the same shape apart from axes of size 1.
        delta: where the square becomes a line, above 0.

    Raises:
        DataError: the shapes do not fit each other.
        OptionError: delta is not above 0.
    """
    return _value("huber", y_true, y_pred, delta=delta)


def _huber(y_true: Array, y_pred: Array, *, delta: float = 1.0) -> Terms:
    if not delta > 0:
        raise OptionError(f"delta of huber is {delta}; it must be greater than 0.")
    truth, prediction = _same_shape(y_true, y_pred)
    distance = np.abs(prediction - truth)
    return _sum(np.where(distance <= delta, 0.5 * distance**2, delta * (distance - 0.5 * delta)))


_KINDS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "axis": (lambda value: is_integer(value) and value >= 1, "the number of an axis, from 1"),
    "ignore_index": (lambda value: value is None or is_integer(value), "a label, which is an integer, or None"),
    "classes": (lambda value: value is None or (is_integer(value) and value >= 1), "a number of classes, from 1"),
    "binary": (lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "threshold": (lambda value: is_number(value), "a number"),
    "delta": (lambda value: is_number(value), "a number above 0"),
    "label_smoothing": (lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "predicts": (lambda value: isinstance(value, str), "'classes', 'binary' or 'numbers'"),
}
"""Types of arguments of metrics."""


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, of Python's or NumPy's."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, of Python's or NumPy's."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a metric.

    Raises:
        OptionError: one is of another kind than it needs.
    """
    found = dict(options)
    for option, value in options.items():
        if option == "class_weights" and value is not None:
            weights = checked_class_weights(value)
            if isinstance(weights, dict):
                raise OptionError(f"class_weights of {name} is a dictionary; the metric needs a list.")
            found[option] = weights
        elif option in _KINDS and not _KINDS[option][0](value):
            shown = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
            raise OptionError(f"{option} of {name} is {shown}; it needs {_KINDS[option][1]}.")
    return found


@dataclass(frozen=True)
class BuiltIn:
    """A metric of this module.

    Attributes:
        function: the metric itself.
        terms: the same as the terms of a mean.
        reads: for which predictions it is.
    """

    function: MetricFunction
    terms: Callable[..., Terms]
    reads: tuple[PredictionKind, ...]

    def named(
        self, name: str, read: Callable[[Array, Array], tuple[Array, Array]] | None = None, **options: Any
    ) -> NamedMetric:
        """The metric under a name.

        Args:
            name: the name.
            read: brings targets and predictions to the form that it takes.
            options: its arguments.

        Raises:
            OptionError: it has no such argument.
        """
        known = self.terms.__kwdefaults__ or {}
        for option in options:
            if option not in known:
                raise OptionError(
                    f"{option}={options[option]!r} is given, but the metric {name} has no such argument; it has "
                    f"{', '.join(known) or 'none'}."
                )
        options = checked_options(name, options)
        terms = functools.partial(self.terms, **options)
        counted = CountedPredictions(options.get("axis", 1), options.get("ignore_index"))
        return mean_metric(name, terms if read is None else lambda t, p: terms(*read(t, p)), counted=counted)


BUILT_IN: Final[dict[str, BuiltIn]] = {
    "accuracy": BuiltIn(accuracy, _accuracy, ("classes", "binary")),
    "softmax_cross_entropy": BuiltIn(softmax_cross_entropy, _softmax_cross_entropy, ("classes",)),
    "binary_cross_entropy": BuiltIn(binary_cross_entropy, _binary_cross_entropy, ("binary",)),
    "mean_squared_error": BuiltIn(mean_squared_error, _mean_squared_error, ("numbers",)),
    "mean_absolute_error": BuiltIn(mean_absolute_error, _mean_absolute_error, ("numbers",)),
    "mean_absolute_percentage_error": BuiltIn(
        mean_absolute_percentage_error, _mean_absolute_percentage_error, ("numbers",)
    ),
    "huber": BuiltIn(huber, _huber, ("numbers",)),
}


def _value(name: str, y_true: Any, y_pred: Any, **options: Any) -> float:
    """The value of a metric for arrays, or what converts to them."""
    return float(BUILT_IN[name].named(name, **options)(y_true, y_pred))


def as_numbers(array: Array, what: str) -> _Values:
    """An array in float64.

    Raises:
        DataError: it holds texts, dates or the like.
    """
    if kind_of(array.dtype) not in ("float", "integer", "boolean"):
        raise DataError(f"{what} have the type {array.dtype}, but this metric compares numbers; convert them first.")
    return np.asarray(array, np.float64)


def _sum(values: _Values) -> Terms:
    return Terms(float(values.sum()), float(values.size))


def _has_questions(y_true: Array, axis: int) -> bool | None:
    """Whether targets of the predictions' shape are answers one by one: zeros and ones, not one 1 per row."""
    if y_true.ndim <= axis or y_true.shape[axis] == 1:
        return None
    sums = y_true.sum(axis=axis, dtype=np.float64)
    wrong = np.abs(sums - 1) > 0.02
    if not wrong.any():
        return None
    if np.isin(y_true, (0, 1)).all():
        return True
    raise DataError(
        f"targets of shape {y_true.shape} are neither one-hot vectors nor distributions nor zeros and ones: one "
        f"sums to {sums[wrong][0]:.4g} along axis {axis}; give binary=True or binary=False."
    )


def _log_softmax(logits: Array) -> _Values:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _same_shape(y_true: Array, y_pred: Array) -> tuple[_Values, _Values]:
    """Bring both to one shape; axes of size 1 may differ, nothing broadcasts: [N] - [N, 1] is not [N, N]."""
    if [size for size in y_true.shape if size != 1] != [size for size in y_pred.shape if size != 1]:
        raise DataError(f"targets of shape {y_true.shape} do not fit predictions of shape {y_pred.shape}.")
    return as_numbers(y_true, "targets").reshape(y_pred.shape), as_numbers(y_pred, "predictions")


def _check_index_shape(y_true: Array, y_pred: Array, axis: int) -> None:
    needed = y_pred.shape[:axis] + y_pred.shape[axis + 1 :]
    if y_pred.ndim <= axis or (y_true.shape != needed and y_true.size != np.prod(needed)):
        raise DataError(
            f"targets of shape {y_true.shape} do not fit predictions of shape {y_pred.shape}: "
            f"class indices need shape {needed}, one-hot vectors the shape of the predictions."
        )
