"""The metric that a user means: a name, or a function of targets and predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.training.data.conversion import Array
from onnxtrain.training.metrics.base import Collector, Means, Metric, Terms, terms_of
from onnxtrain.training.metrics.means import BUILT_IN


@dataclass(frozen=True)
class NamedMetric:
    """A metric with its name, that also tells how much a batch weighs.

    Attributes:
        name: what the value is called in results.
        measure: (y_true, y_pred) to the terms of the mean.
        of_output: whether predictions are the model's output itself, instead of what the loss is built on: the
            logits before a final activation that the loss contains.
    """

    name: str
    measure: Callable[[Array, Array], Terms]
    of_output: bool = False

    def start(self) -> Collector:
        """What takes the batches of one evaluation."""
        return Means(self.measure)

    def __call__(self, y_true: Array, y_pred: Array, /) -> float:
        """The value for one batch."""
        return self.measure(y_true, y_pred).mean


def resolve_metric(metric: str | Metric, **options: Any) -> NamedMetric:
    """Find a metric by name, or take a function of (y_true, y_pred).

    Args:
        metric: ``accuracy``, ``softmax_cross_entropy``, ``binary_cross_entropy``, ``mean_squared_error``,
            ``mean_absolute_error``, ``huber``, or a function, whose values count once per example of a batch.
        options: further arguments of a metric found by name, such as ``ignore_index``.

    Raises:
        OptionError: there is no such metric.

    >>> import numpy as np
    >>> resolve_metric("accuracy", threshold=0.0)(np.array([1, 0]), np.array([2.5, -1.0]))
    1.0
    """
    if isinstance(metric, NamedMetric):
        return metric
    if isinstance(metric, str):
        if metric not in BUILT_IN:
            raise OptionError(
                f"there is no metric '{metric}': use {', '.join(BUILT_IN)} or a function of (y_true, y_pred)."
            )
        terms = BUILT_IN[metric].terms
        return NamedMetric(metric, lambda y_true, y_pred: terms(y_true, y_pred, **options))
    if not callable(metric):
        raise OptionError(f"a metric is a name or a function of (y_true, y_pred), not a {type(metric).__name__}.")
    name = getattr(metric, "__name__", type(metric).__name__)
    return NamedMetric(name, lambda y_true, y_pred: terms_of(metric(y_true, y_pred), len(y_true)), of_output=True)
