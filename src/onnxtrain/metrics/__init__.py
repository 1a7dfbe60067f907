"""Metrics of predictions against targets."""

from __future__ import annotations

from onnxtrain.errors._internal import public_names
from onnxtrain.metrics.base import LossMetric, Metric, NamedMetric
from onnxtrain.metrics.choice import resolve_metric
from onnxtrain.metrics.dataset_metrics import confusion_matrix
from onnxtrain.metrics.error_rates import CharacterErrorRate, WordErrorRate
from onnxtrain.metrics.means import (
    accuracy,
    binary_cross_entropy,
    huber,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    softmax_cross_entropy,
)

__all__ = [
    "CharacterErrorRate",
    "LossMetric",
    "Metric",
    "NamedMetric",
    "WordErrorRate",
    "accuracy",
    "binary_cross_entropy",
    "confusion_matrix",
    "huber",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "resolve_metric",
    "softmax_cross_entropy",
]

__dir__ = public_names(__name__)
