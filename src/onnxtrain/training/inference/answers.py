"""Probabilities and labels from the scores that a loss is built on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import OptionError
from onnxtrain.metrics.base import MetricInput
from onnxtrain.metrics.whole_metrics import sigmoid, softmax


def check_answers(metric_input: MetricInput, what: str) -> None:
    """Refuse scores of which nothing says how they become probabilities.

    Args:
        metric_input: Meaning of the loss's predictions.
        what: What was asked for, for the message.

    Raises:
        OptionError: Predictions are neither scores over classes nor binary logits.
    """
    if metric_input.predicts not in ("classes", "binary"):
        kind = "are numbers" if metric_input.predicts == "numbers" else "may be anything"
        raise OptionError(
            f"{what} needs scores over classes, or binary logits, but with the loss {metric_input.loss} predictions "
            f"{kind}; call predict() for the outputs."
        )


def probabilities(metric_input: MetricInput, scores: Array) -> Array:
    """Probabilities of the shape of the scores.

    Of one binary logit per example, [N] or [N, 1], those of no and yes [N, 2].
    """
    if metric_input.predicts == "classes":
        found = scores if metric_input.probabilities else softmax(scores.astype(np.float64), metric_input.axis)
        return np.asarray(found, scores.dtype)
    yes = np.asarray(sigmoid(scores.astype(np.float64)), scores.dtype)
    if scores.ndim > 2 or (scores.ndim == 2 and scores.shape[1] != 1):
        return yes
    column = yes.reshape(-1, 1)
    return np.concatenate([1 - column, column], axis=1)


def answers(metric_input: MetricInput, scores: Array, labels: Sequence[str] | None) -> Array:
    """The most probable class of every example, by its label where classes have some; 1 for yes and 0 for no.

    Scores that are NaN have the answer -1.

    Args:
        metric_input: Meaning of the loss's predictions.
        scores: The scores.
        labels: The names of the classes; more classes than names have their numbers.
    """
    if metric_input.predicts == "binary":
        yes = np.where(np.isnan(scores), -1, scores > 0).astype(np.int64)
        return yes[:, 0] if yes.ndim == 2 and yes.shape[1] == 1 else yes
    found = np.where(np.isnan(scores).any(metric_input.axis), -1, scores.argmax(metric_input.axis)).astype(np.int64)
    if labels is None:
        return found
    names = [*labels, *map(str, range(len(labels), scores.shape[metric_input.axis]))]
    return np.asarray(names)[found]
