"""Metrics over NumPy arrays: accuracy, and the losses that models are trained with.

Every metric has the form ``metric(y_true, y_pred) -> float`` and computes in float64. Logits are the values
in front of a softmax or sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import DataError, OptionError
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.data.conversion import Array, kind_of
from onnxtrain.training.data.target_checks import check_labels
from onnxtrain.training.metrics.base import Metric, PredictionKind, Terms

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
    return _accuracy(y_true, y_pred, threshold=threshold, ignore_index=ignore_index, axis=axis, binary=binary).mean


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
        labels, predicted = y_true.argmax(axis).ravel(), y_pred.argmax(axis).ravel()
    else:
        _check_index_shape(y_true, y_pred, axis)
        labels, predicted = y_true.ravel(), y_pred.argmax(axis).ravel()
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
    return _softmax_cross_entropy(
        y_true,
        y_pred,
        class_weights=class_weights,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        axis=axis,
    ).mean


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
    log_probabilities = _log_softmax(np.moveaxis(y_pred, axis, -1).reshape(-1, classes))
    if y_true.shape == y_pred.shape:
        truth = np.moveaxis(y_true, axis, -1).reshape(-1, classes).astype(np.float64)
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
    return _binary_cross_entropy(y_true, y_pred).mean


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
    return _mean_squared_error(y_true, y_pred).mean


def _mean_squared_error(y_true: Array, y_pred: Array) -> Terms:
    truth, prediction = _same_shape(y_true, y_pred)
    return _sum((prediction - truth) ** 2)


@checks_arguments
def mean_absolute_error(y_true: Array, y_pred: Array) -> float:
    """The mean of ``|y_pred - y_true|``. PyTorch: ``torch.nn.functional.l1_loss``.

    Raises:
        DataError: the shapes do not fit each other.
    """
    return _mean_absolute_error(y_true, y_pred).mean


def _mean_absolute_error(y_true: Array, y_pred: Array) -> Terms:
    truth, prediction = _same_shape(y_true, y_pred)
    return _sum(np.abs(prediction - truth))


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
    return _huber(y_true, y_pred, delta=delta).mean


def _huber(y_true: Array, y_pred: Array, *, delta: float = 1.0) -> Terms:
    if not delta > 0:
        raise OptionError(f"delta of huber is {delta}; it must be greater than 0.")
    truth, prediction = _same_shape(y_true, y_pred)
    distance = np.abs(prediction - truth)
    return _sum(np.where(distance <= delta, 0.5 * distance**2, delta * (distance - 0.5 * delta)))


@dataclass(frozen=True)
class BuiltIn:
    """A metric of this module.

    Attributes:
        function: the metric itself.
        terms: the same as the terms of a mean.
        reads: for which predictions it is.
    """

    function: Metric
    terms: Callable[..., Terms]
    reads: tuple[PredictionKind, ...]


BUILT_IN: Final[dict[str, BuiltIn]] = {
    "accuracy": BuiltIn(accuracy, _accuracy, ("classes", "binary")),
    "softmax_cross_entropy": BuiltIn(softmax_cross_entropy, _softmax_cross_entropy, ("classes",)),
    "binary_cross_entropy": BuiltIn(binary_cross_entropy, _binary_cross_entropy, ("binary",)),
    "mean_squared_error": BuiltIn(mean_squared_error, _mean_squared_error, ("numbers",)),
    "mean_absolute_error": BuiltIn(mean_absolute_error, _mean_absolute_error, ("numbers",)),
    "huber": BuiltIn(huber, _huber, ("numbers",)),
}


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
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _same_shape(y_true: Array, y_pred: Array) -> tuple[_Values, _Values]:
    """Bring both to one shape; axes of size 1 may differ, nothing broadcasts: [N] - [N, 1] is not [N, N]."""
    if [size for size in y_true.shape if size != 1] != [size for size in y_pred.shape if size != 1]:
        raise DataError(f"targets of shape {y_true.shape} do not fit predictions of shape {y_pred.shape}.")
    return y_true.astype(np.float64).reshape(y_pred.shape), y_pred.astype(np.float64)


def _check_index_shape(y_true: Array, y_pred: Array, axis: int) -> None:
    needed = y_pred.shape[:axis] + y_pred.shape[axis + 1 :]
    if y_pred.ndim <= axis or (y_true.shape != needed and y_true.size != np.prod(needed)):
        raise DataError(
            f"targets of shape {y_true.shape} do not fit predictions of shape {y_pred.shape}: "
            f"class indices need shape {needed}, one-hot vectors the shape of the predictions."
        )
