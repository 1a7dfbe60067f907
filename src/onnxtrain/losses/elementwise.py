"""Elementwise losses: binary cross-entropy, squared error, absolute error, Huber."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.losses.base import BinaryLoss, ReducedLoss, mean_over, softplus
from onnxtrain.losses.probabilities import logit
from onnxtrain.lowering.training_info.recipe import LossTerms


@checks_arguments
@dataclass(frozen=True)
class BinaryCrossEntropy(BinaryLoss):
    """Binary cross-entropy on logits: mean of softplus(z) - t z, for targets t in [0, 1].

    For probabilities p it is the mean of -t log p - (1 - t) log(1 - p), with logarithms of at least -100, as
    ``torch.nn.BCELoss``.

    Args:
        positive_weight: Weight of the positive class: mean of w t softplus(-z) + (1 - t) softplus(z).
        check_targets: Refuse targets outside [0, 1], for which the loss has no lower bound.
    """

    name: ClassVar[str] = "binary_cross_entropy"

    positive_weight: float = 1.0
    check_targets: bool = True

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        z = logit(op, prediction) if self.from_logits is False else prediction
        base = softplus(op, z)
        if self.positive_weight == 1.0:
            terms = base - target * z
        else:
            factor = target * (self.positive_weight - 1.0) + 1.0
            terms = (1.0 - target) * z + factor * (base - z)
        return mean_over(op, terms, prediction, weights)


@checks_arguments
@dataclass(frozen=True)
class MeanSquaredError(ReducedLoss):
    """Mean of (y - t)^2 over all elements."""

    name: ClassVar[str] = "mean_squared_error"
    predicts = "numbers"
    elementwise: ClassVar[bool] = True

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        difference = (prediction - target).with_shape(prediction.shape)
        return mean_over(op, difference * difference, prediction, weights)


@checks_arguments
@dataclass(frozen=True)
class MeanAbsoluteError(ReducedLoss):
    """Mean of |y - t| over all elements; the gradient at 0 is 0."""

    name: ClassVar[str] = "mean_absolute_error"
    predicts = "numbers"
    elementwise: ClassVar[bool] = True

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        return mean_over(op, op.Abs((prediction - target).with_shape(prediction.shape)), prediction, weights)


@checks_arguments
@dataclass(frozen=True)
class Huber(ReducedLoss):
    """Mean over all elements of d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2), with d = y - t.

    As ``torch.nn.HuberLoss``.

    Args:
        delta: Threshold between squared and linear, above 0.
    """

    name: ClassVar[str] = "huber"
    predicts = "numbers"
    elementwise: ClassVar[bool] = True

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.delta > 0 and np.isfinite(self.delta)):
            raise OptionError(f"delta is {self.delta}; the Huber loss needs a finite number above 0.")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss: with q = min(|d|, delta) it is q (|d| - q / 2)."""
        distance = op.Abs((prediction - target).with_shape(prediction.shape))
        inner = op.Min(distance, op.scalar(self.delta, prediction))
        return mean_over(op, inner * (distance - inner * 0.5), prediction, weights)
