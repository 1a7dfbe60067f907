"""Focal losses: cross-entropies that down-weight easy examples, for imbalanced classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.losses.base import (
    BinaryLoss,
    ClassLoss,
    classes_second,
    count_of,
    mean_of,
    mean_over,
    node_rank,
    size_of,
    softplus,
)
from onnxtrain.losses.probabilities import logit
from onnxtrain.lowering.training_info.recipe import LossTerms


@checks_arguments
@dataclass(frozen=True)
class Focal(ClassLoss):
    """Focal loss over classes: mean over labels of -w_t (1 - p_t)^gamma log p_t, with p = softmax(z).

    For distributions over classes it is the mean of -sum_c w_c t_c (1 - p_c)^gamma log p_c. The divisor is the number
    of labels that are not ignored, whatever their weights.

    Args:
        gamma: Focusing parameter, 0 or more; 0 gives the cross-entropy.
        class_weights: As in :class:`SoftmaxCrossEntropy`.
        ignore_index: Label to ignore. The text ``"focal"`` has -100.
        axis: The class axis of the logits.
        check_targets: Refuse targets that are no distributions.

    Source:
        T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollár, "Focal Loss for Dense Object Detection", ICCV 2017; Keras:
        ``CategoricalFocalCrossentropy``, with ``alpha`` for ``class_weights``.
    """

    name: ClassVar[str] = "focal"

    gamma: float = 2.0
    class_weights: Sequence[float] | Mapping[int, float] | None = None
    ignore_index: int | None = None
    axis: int | None = None
    check_targets: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_gamma(self.name, self.gamma)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss; integer targets are labels, floating ones distributions over classes."""
        axis = self.class_axis(prediction)
        if target.is_float:
            log_p = self.log_probabilities(op, prediction, axis)
            terms = -(target * _modulated(op, op.Exp(log_p), self.gamma, log_p))
            if (of_classes := self.weights_of_classes(op, prediction, axis)) is not None:
                terms = terms * op.reshape(of_classes, [-1 if a == axis else 1 for a in range(node_rank(prediction))])
            count = count_of(op, prediction, prediction) / size_of(op, prediction, axis)
        else:
            ignored = None if self.ignore_index is None else int(self.ignore_index)
            logits = classes_second(op, prediction, axis)
            if self.from_logits is False:
                log_p = self.log_probabilities(op, logits, 1)
                loss = op.NegativeLogLikelihoodLoss(log_p, target, reduction="none", ignore_index=ignored)
            else:
                loss = op.SoftmaxCrossEntropyLoss(logits, target, reduction="none", ignore_index=ignored)
            loss = loss.with_shape(target.shape)
            terms = _modulated(op, op.Exp(-loss), self.gamma, loss)
            if self.class_weights is not None and (weight := self.label_weights(op, prediction, target)) is not None:
                terms = terms * weight
            count = self.label_count(op, prediction, target)
        terms = terms.with_shape(prediction.shape if target.is_float else target.shape)
        divisor = count if self.ignore_index is None or target.is_float else op.Max(count, 1.0)
        return mean_of(op, terms, count, weights, divisor=divisor)


@checks_arguments
@dataclass(frozen=True)
class BinaryFocal(BinaryLoss):
    """Focal loss of independent binary outputs: mean of a_t (1 - p_t)^gamma (softplus(z) - t z), p = sigmoid(z).

    p_t is p for t = 1 and 1 - p for t = 0, a_t is alpha and 1 - alpha; for targets t in (0, 1) both are interpolated
    linearly. As ``torchvision.ops.sigmoid_focal_loss`` with ``reduction="mean"``.

    Args:
        gamma: Focusing parameter, 0 or more.
        alpha: Weight of the positive class, in [0, 1]; ``None`` for no weights.
        check_targets: Refuse targets outside [0, 1].
    """

    name: ClassVar[str] = "binary_focal"

    gamma: float = 2.0
    alpha: float | None = 0.25
    check_targets: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_gamma(self.name, self.gamma)
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise OptionError(f"alpha is {self.alpha}; binary_focal needs a number in [0, 1], or None for no weights.")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        given = self.from_logits is False
        z = logit(op, prediction) if given else prediction
        p = prediction if given else op.Sigmoid(z)
        right = (target * p + (1.0 - target) * (1.0 - p)).with_shape(z.shape)
        loss = softplus(op, z) - target * z
        terms = _modulated(op, right, self.gamma, loss)
        if self.alpha is not None:
            terms = terms * (target * (2.0 * self.alpha - 1.0) + (1.0 - self.alpha))
        return mean_over(op, terms, prediction, weights)


def _modulated(op: Builder, probability: Value, gamma: float, loss: Value) -> Value:
    """(1 - p)^gamma loss."""
    if gamma == 0:
        return loss
    # A power below 1 has an infinite slope at 0, where p rounds to 1.
    rest = op.Max(1.0 - probability, op.scalar(np.finfo(probability.dtype.numpy()).eps, probability))
    return op.Pow(rest, op.scalar(gamma, probability)) * loss


def _check_gamma(name: str, gamma: float) -> None:
    if not (np.isfinite(gamma) and gamma >= 0):
        raise OptionError(f"gamma is {gamma}; {name} needs a finite number, 0 or more.")
