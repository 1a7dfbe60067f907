"""Metrics: what says how well predictions agree with the truth."""

from onnxtrain.training.metrics.base import Metric
from onnxtrain.training.metrics.choice import NamedMetric, resolve_metric
from onnxtrain.training.metrics.means import (
    accuracy,
    binary_cross_entropy,
    huber,
    mean_absolute_error,
    mean_squared_error,
    softmax_cross_entropy,
)

__all__ = [
    "Metric",
    "NamedMetric",
    "accuracy",
    "binary_cross_entropy",
    "huber",
    "mean_absolute_error",
    "mean_squared_error",
    "resolve_metric",
    "softmax_cross_entropy",
]
