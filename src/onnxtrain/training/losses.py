"""Losses as graphs: what training minimises, built from a prediction and a target in standard operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.training.custom_loss import CustomLoss
from onnxtrain.training.data.conversion import kind_of
from onnxtrain.training.data.target_checks import BinaryCheck, DistributionCheck, LabelCheck, TargetCheck
from onnxtrain.training.loss import (
    IgnoredWherePresent,
    Loss,
    LossByExample,
    TargetForm,
    TargetKind,
    class_axis,
    count_of,
    examples,
    label_axis,
    mean_over,
    node_rank,
    size_of,
    weighted,
)
from onnxtrain.training.reading import Reading
from onnxtrain.training_info.recipe import LossTerms

__all__ = [
    "LOSSES",
    "BinaryCrossEntropy",
    "CustomLoss",
    "Huber",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "NextToken",
    "SoftmaxCrossEntropy",
    "TargetForm",
    "TargetKind",
    "examples",
    "node_rank",
]


@dataclass(frozen=True)
class SoftmaxCrossEntropy(LossByExample):
    """Softmax cross-entropy of logits: mean over labels of -w_t log softmax(z)_t.

    With label smoothing e the target distribution is (1 - e) onehot(t) + e / C. With weights and ignored labels
    the mean is that of PyTorch: the weighted sum divided by the sum of the weights of labels that count.

    Args:
        class_weights: One weight w per class, as a list or as a dictionary from class to weight, in which the classes
            that are left out have 1; ``None`` for all ones.
        label_smoothing: e, in [0, 1).
        ignore_index: Labels of this value do not count; a batch of no others has the loss 0. The text
            ``"softmax_cross_entropy"`` has -100, as PyTorch.
        axis: The class axis of the logits. By default the one that the shape of the labels tells: without it the
            logits have that shape. Where several fit it is the axis of the model's final Softmax, else the last for
            logits of rank 3 (batch, sequence, vocabulary), and 1, as in ONNX, for others.
        check_targets: Refuse targets that are no distributions: numbers outside of [0, 1], or that do not sum to
            1 over the classes.
    """

    name: ClassVar[str] = "softmax_cross_entropy"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices", "values")
    trains_through: ClassVar[frozenset[str]] = frozenset({"Softmax", "LogSoftmax"})
    predicts = "classes"
    text_defaults: ClassVar[Mapping[str, Any]] = {"ignore_index": IgnoredWherePresent(-100)}

    class_weights: Sequence[float] | Mapping[int, float] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None
    axis: int | None = None
    check_targets: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise OptionError(f"label_smoothing is {self.label_smoothing}; it needs a number in [0, 1).")
        if self.class_weights is not None:
            given = self.class_weights
            if isinstance(given, Mapping):
                if not all(isinstance(key, int | np.integer) and key >= 0 for key in given):
                    raise OptionError(f"class_weights has the classes {list(given)}; they are whole numbers from 0.")
                object.__setattr__(self, "class_weights", {int(key): float(weight) for key, weight in given.items()})
            else:
                object.__setattr__(self, "class_weights", tuple(float(weight) for weight in given))
            weights = np.asarray([*given.values()] if isinstance(given, Mapping) else given, dtype=np.float64)
            if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
                raise OptionError("class_weights needs finite numbers of at least 0, not all 0.")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on logits; integer targets are labels, floating ones distributions over classes."""
        axis = self.class_axis(prediction)
        by_class = self._weight_by_class(prediction, axis)
        if target.is_float:
            return self._on_distributions(op, prediction, target, axis, weights)
        logits = _classes_second(op, prediction, axis)
        of_classes = None if by_class is None else op.constant(by_class, prediction.dtype)
        found = op.several(
            "SoftmaxCrossEntropyLoss",
            *(logits, target, of_classes),
            outputs=2 if self.label_smoothing else 1,
            reduction="sum" if weights is None else "none",
            ignore_index=None if self.ignore_index is None else int(self.ignore_index),
        )
        weight = self._label_weight(op, prediction, target, of_classes)
        divisor = weight if self.ignore_index is None else self._divisor(op, weight)
        total = found[0]
        if weights is not None:
            total = op.ReduceSum(weighted(op, total.with_shape(target.shape), weights), keepdims=0)
        total = total.with_shape(())
        if self.label_smoothing:
            total = self._smoothed(op, total, found[1], target, of_classes, weights)
        return LossTerms((total / divisor).with_shape(()), weight)

    def _smoothed(
        self,
        op: Builder,
        total: Value,
        log_probability: Value,
        target: Value,
        of_classes: Value | None,
        weights: Value | None,
    ) -> Value:
        """(1 - e) sum_i -w_t log p_t + e / C sum_i sum_c -w_c log p_c over the labels that count."""
        terms = log_probability
        if of_classes is not None:
            shape = [1, -1] + [1] * ((log_probability.rank or 2) - 2)
            terms = terms * op.reshape(of_classes, shape)
        uniform = op.ReduceSum(terms, op.ints(1), keepdims=0)
        if weights is not None:
            uniform = weighted(op, uniform.with_shape(target.shape), weights)
        if self.ignore_index is not None:
            counts = op.cast(op.Not(op.Equal(target, op.scalar(self.ignore_index, target))), total.dtype)
            uniform = uniform * counts
        spread = op.ReduceSum(uniform, keepdims=0) / size_of(op, log_probability, 1)
        return total * (1.0 - self.label_smoothing) - spread * self.label_smoothing

    def _divisor(self, op: Builder, weight: Value) -> Value:
        """The weight, but 1 where no label counts: that batch has the loss 0, not 0 / 0. A micro-batch may be one."""
        if self.class_weights is None:
            return op.Max(weight, 1.0)
        return op.Where(op.binary("Equal", weight, 0), 1.0, weight)

    def _label_weight(self, op: Builder, prediction: Value, target: Value, weights: Value | None) -> Value:
        """The sum of the weights of the labels that count."""
        if self.ignore_index is None:
            if weights is None:
                return count_of(op, target, prediction)
            return op.ReduceSum(op.Gather(weights, target), keepdims=0).with_shape(())
        ignored = op.Equal(target, op.scalar(self.ignore_index, target))
        if weights is None:
            # Integers: a sum of ones in 16-bit floats ends at 2048.
            number = op.ReduceSum(op.cast(op.Not(ignored), ir.DataType.INT64), keepdims=0)
            return op.cast(number, prediction.dtype).with_shape(())
        counts = op.cast(op.Not(ignored), prediction.dtype)
        safe = op.Where(ignored, op.zeros_like(target), target)
        return op.ReduceSum(counts * op.Gather(weights, safe), keepdims=0).with_shape(())

    def _on_distributions(
        self, op: Builder, prediction: Value, target: Value, axis: int, weights: Value | None
    ) -> LossTerms:
        if self.ignore_index is not None and self.ignore_index >= 0:  # below 0 it names no class to leave out
            raise OptionError("ignore_index needs class indices as targets; got a distribution over classes.")
        log_probability = op.LogSoftmax(prediction, axis=axis)
        classes = size_of(op, prediction, axis)
        if self.label_smoothing:
            target = target * (1.0 - self.label_smoothing) + op.scalar(self.label_smoothing, prediction) / classes
        terms = target * log_probability
        if self.class_weights is not None:
            shape = [1] * node_rank(prediction)
            shape[axis] = -1
            terms = terms * op.reshape(op.constant(self._weight_by_class(prediction, axis), prediction.dtype), shape)
        rows = count_of(op, prediction, prediction) / classes
        if weights is not None:
            terms = weighted(op, terms.with_shape(prediction.shape), weights)
        total = -op.ReduceSum(terms, keepdims=0).with_shape(())
        return LossTerms((total / rows).with_shape(()), rows)

    def class_axis(self, prediction: Value) -> int:
        """The class axis of the logits, from 1.

        Raises:
            OptionError: The logits have no such axis.
        """
        rank = node_rank(prediction)
        if rank < 2:
            raise OptionError(
                f"softmax_cross_entropy needs logits of shape [batch, classes, ...], but {prediction.name!r} has "
                f"shape {prediction.shape}; for one logit per example use binary_cross_entropy."
            )
        axis = class_axis(rank) if self.axis is None else self.axis
        if not -rank <= axis < rank or axis % rank == 0:
            raise OptionError(
                f"axis is {axis}, but the logits {prediction.name!r} have rank {rank}: it is 1 to {rank - 1}, or "
                f"counts from the end with -1 to {1 - rank}; axis 0 is the batch."
            )
        return axis % rank

    def _weight_by_class(self, prediction: Value, axis: int) -> tuple[float, ...] | None:
        """One weight per class.

        Raises:
            OptionError: There are more classes, or fewer.
        """
        given, size = self.class_weights, None if prediction.shape is None else prediction.shape[axis]
        if isinstance(given, Mapping):
            if not isinstance(size, int):
                raise OptionError("class_weights is a dictionary, but the model does not say how many classes it has.")
            if max(given) >= size:
                raise OptionError(f"class_weights has a weight for class {max(given)}, but there are {size} classes.")
            return tuple(given.get(index, 1.0) for index in range(size))
        if given is not None and isinstance(size, int) and len(given) != size:
            raise OptionError(f"class_weights has {len(given)} numbers, but there are {size} classes.")
        return None if given is None else tuple(given)

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Without the class axis for labels; as the logits for distributions."""
        shape = prediction.shape
        if kind == "values" or shape is None:
            return shape
        axis = self.class_axis(prediction)
        return tuple(size for index, size in enumerate(shape) if index != axis)

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Int64 for labels, the type of the logits for distributions."""
        return ir.DataType.INT64 if kind == "indices" else prediction.dtype

    def classes(self, prediction: Value) -> int | None:
        """The size of the class axis, where it is known."""
        size = None if prediction.shape is None else prediction.shape[self.class_axis(prediction)]
        return size if isinstance(size, int) else None

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Labels where the rank is one less, with the class axis that their shape tells; else distributions."""
        rank = node_rank(prediction)
        labels = len(shape) == rank - 1 or (len(shape) != rank and kind_of(dtype) != "float")
        form = replace(now, kind="indices" if labels else "values")
        if self.axis is not None or not labels:
            return form
        preferred = class_axis(rank) if now.axis is None else now.axis
        return replace(form, axis=label_axis(prediction.shape or (), shape, sizes, preferred))

    def with_form(self, form: TargetForm) -> Self:
        """The loss on the class axis of the form, where none was given; without ignored labels that data lack."""
        axis = form.axis if self.axis is None else self.axis
        optional = isinstance(self.ignore_index, IgnoredWherePresent) and not form.ignoring
        return replace(self, axis=axis, ignore_index=None if optional else self.ignore_index)

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Labels name classes; distributions sum to 1."""
        if kind == "indices":
            return LabelCheck(self.classes(prediction), self.ignore_index)
        return DistributionCheck(self.name, self.class_axis(prediction)) if self.check_targets else None

    def reading(self, prediction: Value, target: Value) -> Reading:
        """Scores along the class axis; labels that are ignored do not count."""
        return Reading(self.name, "classes", self.class_axis(prediction), self.ignore_index)


@dataclass(frozen=True)
class NextToken(SoftmaxCrossEntropy):
    """What a language model minimises: softmax cross-entropy of logits [batch, sequence, words] for the next word.

    Targets are words in the places of the inputs, mostly the inputs themselves: the logits at a place are compared with
    the word behind it, those at the last place with none. Metrics are told so, too.

    Args:
        class_weights: As in :class:`SoftmaxCrossEntropy`; so are those that follow.
        label_smoothing: In [0, 1).
        ignore_index: Words that are not to be predicted: padding, questions whose answers are learned.
        axis: The axis of the words.
        check_targets: Has no meaning here: targets are words.
    """

    name: ClassVar[str] = "next_token"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)
    text_defaults: ClassVar[Mapping[str, Any]] = {}

    ignore_index: int | None = -100
    axis: int | None = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ignore_index is None:
            raise OptionError(
                "next_token needs an ignore_index, which stands behind the last word; the default is -100."
            )

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss: it is the labels that are moved, since logits are large."""
        assert self.ignore_index is not None
        end = op.Expand(op.scalar(self.ignore_index, target), op.Concat(op.dimension(target, 0), op.ints(1), axis=0))
        later = op.Slice(target, op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(1))
        moved = op.Concat(later, end, axis=1).with_shape(target.shape)
        return super().build(op, prediction, moved, weights)

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """[batch, sequence].

        Raises:
            OptionError: The logits have another rank.
        """
        if node_rank(prediction) != 3 or self.class_axis(prediction) != 2:
            raise OptionError(
                f"next_token needs logits of shape [batch, sequence, words], but {prediction.name!r} has shape "
                f"{prediction.shape}; name the output with them by output=, or use softmax_cross_entropy."
            )
        return super().target_shape(prediction, kind)

    def reading(self, prediction: Value, target: Value) -> Reading:
        """Scores of words, each for the place behind it."""
        return replace(super().reading(prediction, target), later=1)


@dataclass(frozen=True)
class BinaryCrossEntropy(LossByExample):
    """Binary cross-entropy on logits: mean of softplus(z) - t z, for targets t in [0, 1].

    Args:
        positive_weight: Weight of the positive class: mean of w t softplus(-z) + (1 - t) softplus(z).
        check_targets: Refuse targets outside of [0, 1], for which the loss has no lower bound.
    """

    name: ClassVar[str] = "binary_cross_entropy"
    trains_through: ClassVar[frozenset[str]] = frozenset({"Sigmoid"})
    predicts = "binary"

    positive_weight: float = 1.0
    check_targets: bool = True

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Targets are from 0 to 1."""
        return BinaryCheck(self.name) if self.check_targets else None

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on logits."""
        # softplus(-|z|) + max(z, 0) - t z does not overflow for any z.
        z = prediction
        base = op.Softplus(-op.Abs(z)) + op.Relu(z)
        if self.positive_weight == 1.0:
            terms = base - target * z
        else:
            factor = target * (self.positive_weight - 1.0) + 1.0
            terms = (1.0 - target) * z + factor * (base - z)
        return mean_over(op, terms, prediction, weights)


@dataclass(frozen=True)
class MeanSquaredError(LossByExample):
    """Mean of (y - t)^2 over all elements."""

    name: ClassVar[str] = "mean_squared_error"
    predicts = "numbers"

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        difference = (prediction - target).with_shape(prediction.shape)
        return mean_over(op, difference * difference, prediction, weights)


@dataclass(frozen=True)
class MeanAbsoluteError(LossByExample):
    """Mean of |y - t| over all elements; the gradient at 0 is 0."""

    name: ClassVar[str] = "mean_absolute_error"
    predicts = "numbers"

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        return mean_over(op, op.Abs((prediction - target).with_shape(prediction.shape)), prediction, weights)


@dataclass(frozen=True)
class Huber(LossByExample):
    """Mean over all elements of d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2), with d = y - t.

    As ``torch.nn.HuberLoss``.

    Args:
        delta: Where the square ends, above 0.
    """

    name: ClassVar[str] = "huber"
    predicts = "numbers"

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not (self.delta > 0 and np.isfinite(self.delta)):
            raise OptionError(f"delta is {self.delta}; the Huber loss needs a finite number above 0.")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss: with q = min(|d|, delta) it is q (|d| - q / 2)."""
        distance = op.Abs((prediction - target).with_shape(prediction.shape))
        inner = op.Min(distance, op.scalar(self.delta, prediction))
        return mean_over(op, inner * (distance - inner * 0.5), prediction, weights)


LOSSES: dict[str, type[Loss]] = {
    loss.name: loss
    for loss in (SoftmaxCrossEntropy, NextToken, BinaryCrossEntropy, MeanSquaredError, MeanAbsoluteError, Huber)
}
"""The losses by the names that the command line takes."""


def _classes_second(op: Builder, logits: Value, axis: int) -> Value:
    """The logits with the class axis in second place, where SoftmaxCrossEntropyLoss wants it."""
    rank = node_rank(logits)
    if axis == 1:
        return logits
    order = [0, axis, *(index for index in range(1, rank) if index != axis)]
    return op.Transpose(logits, perm=order)
