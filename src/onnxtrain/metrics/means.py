"""Metrics that are means: accuracy, and the losses as functions of NumPy arrays.

Every metric has the form ``metric(y_true, y_pred) -> float`` and computes in float64. Logits are the values before a
softmax or sigmoid.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, ParamSpec

import numpy as np
import numpy.typing as npt

from onnxtrain.data.conversion import Array, kind_of
from onnxtrain.data.target_checks import check_labels, checked_class_weights
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.metrics.base import CountedPredictions, MetricFunction, NamedMetric, PredictionKind, Terms

_Values = npt.NDArray[np.float64]
_P = ParamSpec("_P")


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
"""Checks of the arguments of metrics, with the accepted values in words."""


def is_integer(value: object) -> bool:
    """Return whether a value is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number of Python or NumPy."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def checked_options(name: str, options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Check the arguments of a metric, which has those with known names."""
    found = dict(options)
    for option in options:
        if option not in known:
            raise OptionError(
                f"{option}={options[option]!r} is given, but the metric {name} has no such argument; it has "
                f"{', '.join(known) or 'none'}."
            )
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
    """A metric of this module."""

    function: MetricFunction
    terms: Callable[..., Terms]
    reads: tuple[PredictionKind, ...]

    def named(
        self, name: str, read: Callable[[Array, Array], tuple[Array, Array]] | None = None, **options: Any
    ) -> NamedMetric:
        """Return the metric under a name."""
        options = checked_options(name, options, self.terms.__kwdefaults__ or {})
        terms = functools.partial(self.terms, **options)
        counted = CountedPredictions(options.get("axis", 1), options.get("ignore_index"))
        measure: Callable[[Array, Array], Terms] = terms if read is None else lambda t, p: terms(*read(t, p))
        return NamedMetric(name, measure, operator.add, lambda found: found.mean, counted=counted)


BUILT_IN: Final[dict[str, BuiltIn]] = {}
"""Metrics of this module by name."""


def _mean(*reads: PredictionKind) -> Callable[[Callable[_P, Terms]], Callable[_P, float]]:
    """Make a metric of a function that returns the terms of a mean, for predictions of these kinds."""

    def decorate(terms: Any) -> Any:
        def metric(y_true: Any, y_pred: Any, **options: Any) -> float:
            return float(BUILT_IN[name].named(name, **options)(y_true, y_pred))

        name = terms.__name__
        functools.update_wrapper(metric, terms)
        metric.__annotations__ = {**terms.__annotations__, "return": "float"}
        metric.__signature__ = inspect.signature(terms).replace(return_annotation="float")  # type: ignore[attr-defined]
        BUILT_IN[name] = BuiltIn(checks_arguments(metric), terms, reads)
        return BUILT_IN[name].function

    return decorate


@_mean("classes", "binary")
def accuracy(
    y_true: Array,
    y_pred: Array,
    *,
    threshold: float = 0.5,
    ignore_index: int | None = None,
    axis: int = 1,
    binary: bool | None = None,
) -> Terms:
    """Fraction of correct predictions.

    Args:
        y_true: Class indices [N, ...], one-hot vectors or distributions of `y_pred`'s shape, or 0 and 1 for binary
            predictions.
        y_pred: Logits or probabilities [N, C, ...], whose largest is the prediction; binary ones, which are positive
            above the threshold; or predicted class indices of `y_true`'s shape.
        threshold: For binary predictions: 0.5 for probabilities, 0 for logits.
        ignore_index: A label to ignore.
        axis: The class axis.
        binary: True if the elements of `y_pred` are independent binary predictions; by default true for one column, [N]
            or [N, 1], and if `y_true` has zeros and ones of `y_pred`'s shape that are not one-hot vectors.

    Raises:
        DataError: The shapes do not fit each other, or `y_true` has another form.

    >>> accuracy(np.array([0, 2]), np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1]]))
    0.5
    >>> accuracy(np.array([[1, 1], [0, 0]]), np.array([[0.9, 0.8], [0.2, 0.7]]), binary=True)
    0.75
    """
    labels: Array
    if binary is None and kind_of(y_pred.dtype) == "float" and y_true.shape == y_pred.shape:
        binary = _is_multilabel(y_true, axis)
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


@_mean("classes")
def softmax_cross_entropy(
    y_true: Array,
    y_pred: Array,
    *,
    class_weights: Sequence[float] | Array | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    axis: int = 1,
) -> Terms:
    """Cross-entropy of a softmax over logits.

        loss = - sum over examples n of sum over classes c: w[c] t[n, c] log softmax(y_pred)[n, c] / W
        t    = (1 - label_smoothing) one_hot(y_true) + label_smoothing / C

    W is the sum of w[label] over the examples for class indices, their number for vectors of probabilities.
    PyTorch: ``torch.nn.functional.cross_entropy``.

    Args:
        y_true: Class indices [N, ...], or one-hot vectors or probabilities of `y_pred`'s shape.
        y_pred: Logits [N, C, ...].
        class_weights: One weight per class, 1 by default.
        label_smoothing: Share of the target that is spread evenly over all classes, from 0 to 1.
        ignore_index: A label to ignore.
        axis: The class axis.

    Raises:
        DataError: The shapes do not fit each other, or a label is out of range.
    """
    if y_pred.ndim <= axis:
        raise DataError(f"Predictions of shape {y_pred.shape} have no axis {axis} for the classes.")
    classes = y_pred.shape[axis]
    weights = np.ones(classes) if class_weights is None else np.asarray(class_weights, np.float64)
    if weights.shape != (classes,):
        raise DataError(f"There are {weights.size} class weights for {classes} classes; one each is needed.")
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
    # A term with target 0 is 0, even where log p is -inf.
    terms = np.multiply(weights * truth, log_probabilities, out=np.zeros_like(truth), where=truth != 0)
    return Terms(-float(terms.sum()), float(counted.sum()))


@_mean("binary")
def binary_cross_entropy(y_true: Array, y_pred: Array) -> Terms:
    """Cross-entropy of a sigmoid over logits: mean of ``max(x, 0) - x t + log(1 + exp(-|x|))``.

    PyTorch: ``torch.nn.functional.binary_cross_entropy_with_logits``.

    Args:
        y_true: Targets t from 0 to 1, of `y_pred`'s shape apart from axes of size 1.
        y_pred: Logits x.

    Raises:
        DataError: The shapes do not fit each other.
    """
    truth, logits = _same_shape(y_true, y_pred)
    return _sum(np.maximum(logits, 0) - logits * truth + np.log1p(np.exp(-np.abs(logits))))


@_mean("numbers")
def mean_squared_error(y_true: Array, y_pred: Array) -> Terms:
    """Mean of ``(y_pred - y_true)²``. PyTorch: ``torch.nn.functional.mse_loss``.

    Raises:
        DataError: The shapes do not fit each other.

    >>> mean_squared_error(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    2.0
    """
    truth, prediction = _same_shape(y_true, y_pred)
    return _sum((prediction - truth) ** 2)


@_mean("numbers")
def mean_absolute_error(y_true: Array, y_pred: Array) -> Terms:
    """Mean of ``|y_pred - y_true|``. PyTorch: ``torch.nn.functional.l1_loss``.

    Raises:
        DataError: The shapes do not fit each other.
    """
    truth, prediction = _same_shape(y_true, y_pred)
    return _sum(np.abs(prediction - truth))


@_mean("numbers")
def mean_absolute_percentage_error(y_true: Array, y_pred: Array) -> Terms:
    """Mean of ``|y_pred - y_true| / |y_true|``; a target of 0 is replaced by float64's epsilon.

    scikit-learn: ``mean_absolute_percentage_error``. 0.1 means ten percent.

    Raises:
        DataError: The shapes do not fit each other.

    >>> mean_absolute_percentage_error(np.array([2.0, 4.0]), np.array([1.0, 4.0]))
    0.25
    """
    truth, prediction = _same_shape(y_true, y_pred)
    return _sum(np.abs(prediction - truth) / np.maximum(np.abs(truth), np.finfo(np.float64).eps))


@_mean("numbers")
def huber(y_true: Array, y_pred: Array, *, delta: float = 1.0) -> Terms:
    """Mean of ``d²/2`` where ``d = |y_pred - y_true| <= delta``, else of ``delta (d - delta/2)``.

    PyTorch: ``torch.nn.functional.huber_loss``.

    Args:
        y_true: Targets.
        y_pred: Predictions of the same shape apart from axes of size 1.
        delta: Threshold between squared and linear, above 0.

    Raises:
        DataError: The shapes do not fit each other.
        OptionError: ``delta`` is not above 0.
    """
    if not delta > 0:
        raise OptionError(f"delta of huber is {delta}; it must be greater than 0.").about("delta", got=delta)
    truth, prediction = _same_shape(y_true, y_pred)
    distance = np.abs(prediction - truth)
    return _sum(np.where(distance <= delta, 0.5 * distance**2, delta * (distance - 0.5 * delta)))


def as_numbers(array: Array, what: str) -> _Values:
    """Convert an array to float64."""
    if kind_of(array.dtype) not in ("float", "integer", "boolean"):
        raise DataError(f"{what} have the type {array.dtype}, but this metric compares numbers; convert them first.")
    return np.asarray(array, np.float64)


def _sum(values: _Values) -> Terms:
    return Terms(float(values.sum()), float(values.size))


def _is_multilabel(y_true: Array, axis: int) -> bool | None:
    """Return True for targets of zeros and ones that are not one-hot, and None for one-hot vectors or distributions."""
    if y_true.ndim <= axis or y_true.shape[axis] == 1:
        return None
    sums = y_true.sum(axis=axis, dtype=np.float64)
    wrong = np.abs(sums - 1) > 0.02
    if not wrong.any():
        return None
    if np.isin(y_true, (0, 1)).all():
        return True
    raise DataError(
        f"Targets of shape {y_true.shape} are neither one-hot vectors nor distributions nor zeros and ones: one "
        f"sums to {sums[wrong][0]:.4g} along axis {axis}; give binary=True or binary=False."
    ).about("y_true", got=y_true.shape)


def _log_softmax(logits: Array) -> _Values:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _same_shape(y_true: Array, y_pred: Array) -> tuple[_Values, _Values]:
    """Reshape targets to the predictions; axes of size 1 may differ, but nothing broadcasts [N] - [N, 1] to [N, N]."""
    if [size for size in y_true.shape if size != 1] != [size for size in y_pred.shape if size != 1]:
        raise DataError(f"Targets of shape {y_true.shape} do not fit predictions of shape {y_pred.shape}.")
    return as_numbers(y_true, "targets").reshape(y_pred.shape), as_numbers(y_pred, "predictions")


def _check_index_shape(y_true: Array, y_pred: Array, axis: int) -> None:
    needed = y_pred.shape[:axis] + y_pred.shape[axis + 1 :]
    if y_pred.ndim <= axis or (y_true.shape != needed and y_true.size != np.prod(needed)):
        raise DataError(
            f"Targets of shape {y_true.shape} do not fit predictions of shape {y_pred.shape}: "
            f"class indices need shape {needed}, one-hot vectors the shape of the predictions."
        )
