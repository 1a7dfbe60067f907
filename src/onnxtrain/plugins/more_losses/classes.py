"""Losses of classes: divergence of distributions, margins, ordered classes, overlap, embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir

from onnxtrain.data.conversion import Array, first_row
from onnxtrain.data.target_checks import Examples, LabelCheck, TargetCheck
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import (
    ClassLoss,
    ReducedLoss,
    ScoreLoss,
    TargetForm,
    TargetKind,
    check_above_zero,
    count_of,
    known_size,
    mean_of,
    mean_over,
    node_rank,
    softplus,
)
from onnxtrain.losses.dice_loss import Dice
from onnxtrain.losses.embedding_losses import EmbeddingLoss
from onnxtrain.losses.probabilities import logit
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput

_FAR = 1e9


class RowLoss(ClassLoss):
    """Base of losses on rows of scores, without weights of classes and ignored labels."""

    text_defaults: ClassVar[Mapping[str, Any]] = {}
    class_weights: ClassVar[Sequence[float] | Mapping[int, float] | None] = None  # type: ignore[misc]
    ignore_index: ClassVar[int | None] = None  # type: ignore[misc]

    def with_form(self, form: TargetForm) -> Self:
        """Set the class axis if none was given."""
        given: dict[str, Any] = {"axis": form.axis if self.axis is None else self.axis}
        return replace(self, **given)

    def mean(self, op: Builder, terms: Value, prediction: Value, weights: Value | None) -> LossTerms:
        """Emit the mean of terms without the class axis."""
        axis, shape = self.class_axis(prediction), prediction.shape
        rows = None if shape is None else tuple(size for index, size in enumerate(shape) if index != axis)
        terms = terms.with_shape(rows)
        return mean_of(op, terms, count_of(op, terms, prediction), weights)


@checks_arguments
@dataclass(frozen=True)
class KLDivergence(RowLoss):
    """Divergence from targets t to probabilities p: the mean over rows of sum_c t_c (log t_c - log p_c).

    As Keras's ``KLDivergence``, and ``torch.nn.KLDivLoss(reduction="batchmean")`` of distributions [N, C]. Predictions
    are logits, probabilities or their logarithms, as for :class:`SoftmaxCrossEntropy`.

    Args:
        axis: The class axis, as in :class:`SoftmaxCrossEntropy`.
        check_targets: Refuse targets that are no distributions.
    """

    name: ClassVar[str] = "kl_divergence"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("values",)

    axis: int | None = None
    check_targets: bool = True

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the form so far: targets are distributions."""
        return now

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss; 0 log 0 is 0."""
        axis = self.class_axis(prediction)
        tiny = float(np.finfo(prediction.dtype.numpy()).tiny)
        log_t = op.Log(op.Max(target, op.scalar(tiny, target)))
        both = target * (log_t - self.log_probabilities(op, prediction, axis))
        return self.mean(op, op.ReduceSum(both, op.ints(axis), keepdims=0), prediction, weights)


@dataclass(frozen=True)
class SignCheck:
    """Values are 1, or -1 or 0; messages name the ``loss``."""

    loss: str

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """Raise a `DataError` that names the first example with an invalid value."""
        wrong = ~(np.isin(targets, (-1, 0, 1)) | np.isnan(targets))  # missing ones are not checked here
        if wrong.any():
            raise DataError(
                f"{what} has {float(targets[wrong][0]):.6g} at example {int(examples[first_row(wrong)])}, but "
                f"{self.loss} needs 1 for the one class and -1 or 0 for the other."
            )


@checks_arguments
@dataclass(frozen=True)
class Hinge(ReducedLoss):
    """Hinge loss of scores y, as of a support vector machine: the mean of max(0, 1 - s y).

    s is 1 for targets of 1, and -1 for -1 or 0. Scores are not probabilities: the model ends without a Sigmoid.
    """

    name: ClassVar[str] = "hinge"
    predicts = "binary"
    elementwise: ClassVar[bool] = True

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that targets are 1, -1 or 0."""
        return SignCheck(self.name)

    def short_by(self, op: Builder, prediction: Value, target: Value) -> Value:
        """Emit how much each score lacks to its margin."""
        sign = op.cast(op.binary("Greater", target, 0), prediction.dtype) * 2.0 - 1.0
        return op.Relu(1.0 - sign * prediction)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        return mean_over(op, self.short_by(op, prediction, target), prediction, weights)


@checks_arguments
@dataclass(frozen=True)
class SquaredHinge(Hinge):
    """Squared hinge loss of scores y: the mean of max(0, 1 - s y)^2, with s as in :class:`Hinge`."""

    name: ClassVar[str] = "squared_hinge"

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        short = self.short_by(op, prediction, target)
        return mean_over(op, short * short, prediction, weights)


@checks_arguments
@dataclass(frozen=True)
class CategoricalHinge(RowLoss):
    """Hinge loss of several classes: the mean over rows of max(0, max_c (1 - t_c) y_c - sum_c t_c y_c + 1).

    As Keras's ``CategoricalHinge``. Targets are labels, or t, which is 1 for the class and 0 for the others. Scores are
    not probabilities.

    Args:
        axis: The class axis, as in :class:`SoftmaxCrossEntropy`.
        check_targets: Refuse targets outside [0, 1], or that do not sum to 1.
    """

    name: ClassVar[str] = "categorical_hinge"
    probabilities: ClassVar[Literal["distribution", "independent"] | None] = None
    from_logits: ClassVar[bool | None] = None  # type: ignore[misc]

    axis: int | None = None
    check_targets: bool = True

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        axis = self.class_axis(prediction)
        there = target
        if not target.is_float:
            one = op.OneHot(target, op.dimension(prediction, axis), op.constant([0, 1], ir.DataType.FLOAT), axis=axis)
            there = op.cast(one, prediction.dtype)  # ONNX Runtime has no OneHot of float64
        right = op.ReduceSum(there * prediction, op.ints(axis), keepdims=0)
        wrong = op.ReduceMax((1.0 - there) * prediction, op.ints(axis), keepdims=0)
        return self.mean(op, op.Relu(wrong - right + 1.0), prediction, weights)


@checks_arguments
@dataclass(frozen=True)
class Ordinal(ScoreLoss):
    """Loss of ordered classes (CORAL): the mean over rows of the sum over k of the cross-entropy of y_k and [t > k].

    The model has K - 1 logits for the labels 0 to K - 1: y_k says whether the class is above k. The class is the number
    of logits above 0. CORAL's last layer has one weight per feature, shared by all k, and K - 1 biases.

    Source:
        W. Cao, V. Mirjalili, S. Raschka, "Rank consistent ordinal regression for neural networks with application to
        age estimation", Pattern Recognition Letters 2020 (``coral_pytorch.losses.coral_loss``).
    """

    name: ClassVar[str] = "ordinal"
    ordered: ClassVar[bool] = True
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)
    probabilities: ClassVar[Literal["distribution", "independent"] | None] = "independent"

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the shape of the prediction without its last axis."""
        if node_rank(prediction) < 2:
            raise OptionError(
                f"ordinal needs logits [batch, ..., classes - 1], but {prediction.name!r} has the shape "
                f"{prediction.shape}."
            )
        return (prediction.shape or ())[:-1]

    def classes(self, prediction: Value) -> int | None:
        """Return one more than there are logits, where that is known."""
        size = known_size(prediction, -1)
        return None if size is None else size + 1

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are from 0 to K - 1."""
        return LabelCheck(self.classes(prediction))

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return that logits are not scores of classes, so that only functions measure them."""
        return MetricInput(self.name, None)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss: softplus(y) - [t > k] y."""
        z = logit(op, prediction) if self.from_logits is False else prediction
        steps = op.Range(op.constant(0), op.reshape(op.dimension(prediction, -1), []), op.constant(1))
        above = op.cast(op.Greater(op.Unsqueeze(target, op.ints(-1)), steps), z.dtype)
        terms = op.ReduceSum(softplus(op, z) - above * z, op.ints(-1), keepdims=0)
        return mean_of(op, terms.with_shape(target.shape), count_of(op, target, prediction), weights)


@checks_arguments
@dataclass(frozen=True)
class Tversky(Dice):
    """Tversky loss: the mean over examples and classes of 1 - (I + s) / (I + alpha FP + beta FN + s).

    I = sum p t, FP = sum p (1 - t) and FN = sum (1 - p) t run over the positions, and s is ``smooth``. With alpha and
    beta of 0.5 it is :class:`Dice` (with twice its ``smooth``), whose targets and further arguments it has. A beta
    above alpha finds more of a small class, at the price of false positives. As MONAI's ``TverskyLoss`` with
    ``smooth_nr = smooth_dr = smooth``. Keras documents alpha in this way as well, but applies it to FN, and beta to
    FP.

    Args:
        alpha: Weight of false positives, above 0.
        beta: Weight of false negatives, above 0.

    Source:
        S. Salehi, D. Erdogmus, A. Gholipour, "Tversky loss function for image segmentation using 3D fully convolutional
        deep networks", MLMI 2017.
    """

    name: ClassVar[str] = "tversky"

    alpha: float = 0.5
    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, alpha=self.alpha, beta=self.beta)

    def overlap(self, op: Builder, p: Value, there: Value, positions: Value) -> Value:
        """Emit the overlap [N, C]."""
        both, predicted, true = (op.ReduceSum(each, positions, keepdims=0) for each in (p * there, p, there))
        wrong = (predicted - both) * self.alpha + (true - both) * self.beta
        return (both + self.smooth) / (both + wrong + self.smooth)


@checks_arguments
@dataclass(frozen=True)
class Circle(EmbeddingLoss):
    """Circle loss of embeddings in a batch, with distances d_ij = max(0, 1 - cos(z_i, z_j)), as Keras's ``Circle``.

    The mean over the examples i that have both a p of the same label and an n of another of::

        softplus(log sum_p exp(gamma (d_ip + margin) (d_ip - margin))
                 + log sum_n exp(gamma max(0, 1 + margin - d_in) (1 - margin - d_in)))

    Keras also counts the other examples, as 0, and needs embeddings of length 1, to which they are scaled here.

    Args:
        gamma: Scale, above 0.
        margin: Relaxation, above 0.

    Source:
        Y. Sun et al., "Circle Loss: A Unified Perspective of Pair Similarity Optimization", CVPR 2020; as in Keras,
        gradients also flow through the weights of the pairs.
    """

    name: ClassVar[str] = "circle"

    gamma: float = 80.0
    margin: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, gamma=self.gamma, margin=self.margin)

    def compared(self, op: Builder, z: Value, positive: Value, negative: Value) -> tuple[Value, Value]:
        """Emit the sum over examples with both, and their number."""
        square = op.ReduceSum(z * z, op.ints(1), keepdims=1)
        unit = z / op.Sqrt(op.Max(square, op.scalar(np.finfo(z.dtype.numpy()).tiny, z)))
        distance = op.Relu(1.0 - op.MatMul(unit, op.Transpose(unit, perm=[1, 0])))
        near = (distance + self.margin) * (distance - self.margin) * self.gamma
        far = op.Relu(1.0 + self.margin - distance) * (1.0 - self.margin - distance) * self.gamma
        total = op.sum_of(
            [
                op.ReduceLogSumExp(terms - (1.0 - mask) * _FAR, op.ints(1), keepdims=0)
                for terms, mask in ((near, positive), (far, negative))
            ]
        )
        counted = op.ReduceMax(positive, op.ints(1), keepdims=0) * op.ReduceMax(negative, op.ints(1), keepdims=0)
        return op.ReduceSum(softplus(op, total) * counted, keepdims=0), op.ReduceSum(counted, keepdims=0)
