"""Metrics of numbers: the root of the mean squared error, and the cosine."""

from __future__ import annotations

import operator
from typing import Final

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import DataError
from onnxtrain.metrics.base import LossMetric, MetricInput, NamedMetric, Terms
from onnxtrain.metrics.choice import reader
from onnxtrain.metrics.dataset_metrics import DatasetMetric, Predictions, Values


def _squares(predictions: Predictions) -> Values:
    """Return the sum of (y_pred - y_true)² of each column, and the number of rows."""
    return np.append(((predictions.scores - predictions.truth) ** 2).sum(0), len(predictions.scores))


def _root(sums: Values) -> float:
    return float(np.sqrt(sums[:-1] / sums[-1]).mean()) if sums[-1] else float("nan")


_RMSE: Final = DatasetMetric("rmse", ("numbers",), _squares, _root)


def _rmse(given: MetricInput) -> NamedMetric:
    """Mean over the columns of sqrt(mean((y_pred - y_true)²)), as scikit-learn's ``root_mean_squared_error``."""
    return _RMSE.named(reader(_numbers(given), _RMSE.name, _RMSE.reads), given.counted)


def _cosine_similarity(given: MetricInput) -> NamedMetric:
    """Mean of y·t / (|y| |t|) along the last axis, as Keras's metric; a vector of zeros has the cosine 0."""
    name = "cosine_similarity"
    read = reader(_numbers(given), name, ("numbers",))

    def measure(y_true: Array, y_pred: Array) -> Terms:
        if y_pred.ndim < 2 or y_pred.shape[-1] < 2:
            raise DataError(
                f"{name} compares vectors [batch, ..., features] without missing targets, of at least two features, "
                f"but the predictions have the shape {y_pred.shape}."
            ).about(name, got=y_pred.shape)
        rows = (y_pred.size // y_pred.shape[-1], y_pred.shape[-1])
        found = read(y_true.reshape(rows) if y_true.size == y_pred.size else y_true, y_pred.reshape(rows))
        return Terms(float((_unit(found.truth) * _unit(found.scores)).sum()), float(rows[0]))

    return NamedMetric(name, measure, operator.add, lambda terms: terms.mean, counted=given.counted)


def _unit(vectors: Values) -> Values:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6))


def _numbers(given: MetricInput) -> MetricInput:
    """Take the predictions of a loss that does not say what they are, such as a function, as numbers."""
    return given._replace(predicts=given.predicts or "numbers")


RMSE: Final = LossMetric(_rmse)
COSINE_SIMILARITY: Final = LossMetric(_cosine_similarity)
