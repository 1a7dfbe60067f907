"""The Dice loss of segmentation, which measures the overlap of prediction and target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from onnxtrain.data.target_checks import BinaryCheck, DistributionCheck, LabelCheck, TargetCheck
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.losses.base import (
    ClassLoss,
    TargetForm,
    TargetKind,
    check_above_zero,
    classes_second,
    examples,
    node_rank,
    size_of,
)
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput, PredictionKind

Activation = Literal["softmax", "sigmoid"]


@checks_arguments
@dataclass(frozen=True)
class Dice(ClassLoss):
    """Dice loss: the mean over examples and classes of 1 - (2 sum p t + smooth) / (sum p + sum t + smooth).

    The sums run over the positions of an example [N, C, positions...]; logits [N, positions] have one class. For
    labels, p = softmax(z) and t is one-hot; for targets of the prediction's shape, p = sigmoid(z), and each channel
    (axis 1) is an independent binary output. As MONAI's ``DiceLoss`` with ``smooth_nr = smooth_dr = smooth``.

    Args:
        smooth: Smoothing term, above 0, which prevents 0 / 0 for empty classes.
        activation: ``"softmax"`` or ``"sigmoid"``; by default softmax for labels and sigmoid for values.
        background: Include class 0.
        ignore_index: Label whose positions are ignored. The text ``"dice"`` has -100.
        axis: The class axis of the logits, as in :class:`SoftmaxCrossEntropy`.
        check_targets: Refuse targets outside [0, 1].

    Source:
        F. Milletari, N. Navab, S.-A. Ahmadi, "V-Net: Fully Convolutional Neural Networks for Volumetric Medical Image
        Segmentation", 3DV 2016 (with squares in the denominator, which are left out here).
    """

    name: ClassVar[str] = "dice"
    class_weights: ClassVar[Sequence[float] | Mapping[int, float] | None] = None  # type: ignore[misc]

    smooth: float = 1e-5
    activation: str | None = None
    background: bool = True
    ignore_index: int | None = None
    axis: int | None = None
    check_targets: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, smooth=self.smooth)
        if self.activation not in (None, "softmax", "sigmoid"):
            raise OptionError(f"activation is {self.activation!r}; dice takes 'softmax' or 'sigmoid'.")

    @property
    def probabilities(self) -> Literal["distribution", "independent"]:  # type: ignore[override]
        """The probabilities that the loss takes, by its activation."""
        return "independent" if self.activation == "sigmoid" else "distribution"

    @property
    def predicts(self) -> PredictionKind:  # type: ignore[override]
        """Scores over classes, or independent binary logits."""
        return "binary" if self.activation == "sigmoid" else "classes"

    def with_form(self, form: TargetForm) -> Self:
        """Return the loss with the activation for the kind of targets."""
        found = super().with_form(form)
        activation: Activation = "softmax" if form.kind == "indices" else "sigmoid"
        return found if self.activation is not None else replace(found, activation=activation)

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are classes, or values from 0 to 1."""
        if kind == "indices":
            return LabelCheck(self.classes(prediction), self.ignore_index)
        if not self.check_targets:
            return None
        if self.activation == "softmax":
            return DistributionCheck(self.name, self.class_axis(prediction))
        return BinaryCheck(self.name)

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return scores along the class axis, or binary logits."""
        if self.activation == "sigmoid":
            rank = node_rank(prediction)
            return MetricInput(self.name, "binary", axis=rank if rank == 2 else self.class_axis(prediction))
        return super().metric_input(prediction, target)

    def class_axis(self, prediction: Value) -> int:
        """Return the class axis; 1 for independent binary outputs."""
        if self.activation == "sigmoid" and self.axis is None:
            return 1
        return super().class_axis(prediction)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on scores [N, C, ...]."""
        if node_rank(prediction) == 2 and self.activation == "sigmoid":
            prediction, target = (op.Unsqueeze(value, op.ints(1)) for value in (prediction, target))
        axis = self.class_axis(prediction)
        if node_rank(prediction) < 3:
            raise OptionError(
                f"dice compares positions, but {prediction.name!r} has the shape {prediction.shape}; it needs logits "
                "of shape [batch, classes, positions...]."
            )
        z = classes_second(op, prediction, axis)
        p = z
        if self.from_logits is not False:
            p = op.Sigmoid(z) if self.activation == "sigmoid" else op.Softmax(z, axis=1)
        size = op.dimension(prediction, axis)
        if target.is_float:
            there = classes_second(op, target, axis)
        else:
            labels = target
            if self.ignore_index is not None:
                counts = op.Not(self.ignored(op, target))
                labels = op.Where(counts, target, op.zeros_like(target))
                p = p * op.cast(op.Unsqueeze(counts, op.ints(1)), p.dtype)
            there = op.OneHot(labels, size, op.constant([0, 1], prediction.dtype), axis=1)
            if self.ignore_index is not None:
                there = there * op.cast(op.Unsqueeze(counts, op.ints(1)), p.dtype)
        positions = op.ints(*range(2, node_rank(prediction)))
        terms = 1.0 - self.overlap(op, p, there, positions)
        classes = size_of(op, prediction, axis)
        if not self.background:
            terms = op.Slice(terms, op.ints(1), size, op.ints(1))
            classes = classes - 1.0
        if weights is not None:
            terms = terms * op.Unsqueeze(weights, op.ints(1))
        count = examples(op, prediction)
        total = op.ReduceSum(terms, keepdims=0).with_shape(()) / classes
        return LossTerms((total / count).with_shape(()), count)

    def overlap(self, op: Builder, p: Value, there: Value, positions: Value) -> Value:
        """Emit the overlap [N, C] of probabilities and targets, from 0 to 1."""
        both = op.ReduceSum(p * there, positions, keepdims=0)
        sums = op.ReduceSum(p + there, positions, keepdims=0)
        return (both * 2.0 + self.smooth) / (sums + self.smooth)
