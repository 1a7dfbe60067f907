"""Metrics: what says how well predictions agree with the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtrain.lazy import lazy_names, public_names

if TYPE_CHECKING:
    from onnxtrain.training.metrics.base import Metric, NamedMetric
    from onnxtrain.training.metrics.choice import resolve_metric
    from onnxtrain.training.metrics.means import (
        accuracy,
        binary_cross_entropy,
        huber,
        mean_absolute_error,
        mean_absolute_percentage_error,
        mean_squared_error,
        softmax_cross_entropy,
    )
    from onnxtrain.training.metrics.whole_metrics import confusion_matrix

__all__ = [
    "Metric",
    "NamedMetric",
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
__getattr__ = lazy_names(
    __name__,
    {
        "accuracy": "onnxtrain.training.metrics.means",
        "binary_cross_entropy": "onnxtrain.training.metrics.means",
        "confusion_matrix": "onnxtrain.training.metrics.whole_metrics",
        "huber": "onnxtrain.training.metrics.means",
        "mean_absolute_error": "onnxtrain.training.metrics.means",
        "mean_absolute_percentage_error": "onnxtrain.training.metrics.means",
        "mean_squared_error": "onnxtrain.training.metrics.means",
        "Metric": "onnxtrain.training.metrics.base",
        "NamedMetric": "onnxtrain.training.metrics.base",
        "resolve_metric": "onnxtrain.training.metrics.choice",
        "softmax_cross_entropy": "onnxtrain.training.metrics.means",
    },
)
