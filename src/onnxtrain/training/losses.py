"""Losses as graphs: what training minimises, built from a prediction and a target in standard operators.

A loss is an average: a sum over examples (or labels, or elements) divided by a weight, their number. Both are
built, so that several micro-batches can be combined to exactly the average over the large batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension

TargetKind = Literal["indices", "values"]
"""Targets are class indices (int64), or numbers of the prediction's type and shape."""


@dataclass(frozen=True)
class LossTerms:
    """A loss under construction: ``loss`` = (sum of terms) / ``weight``, both 0-d of the prediction's type."""

    loss: Value
    weight: Value


class Loss:
    """Base of the losses: builds itself for a prediction and a target."""

    name: ClassVar[str]
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("values",)
    trains_through: ClassVar[frozenset[str]] = frozenset()
    """Final activations that the loss contains: it is built on what stands before them."""

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Emit the loss."""
        raise OptionError(f"{type(self).__name__} does not define build().")

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """The shape of the target for a prediction."""
        return prediction.shape

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """The element type of the target for a prediction."""
        return prediction.dtype

    def classes(self, prediction: Value) -> int | None:
        """How many classes labels may name, where the loss takes labels and the number is known."""
        return None


@dataclass(frozen=True)
class SoftmaxCrossEntropy(Loss):
    """Softmax cross-entropy of logits: mean over labels of -w_t log softmax(z)_t.

    With label smoothing e the target distribution is (1 - e) onehot(t) + e / C. With weights and ignored labels
    the mean is that of PyTorch: the weighted sum divided by the sum of the weights of labels that count.

    Args:
        class_weights: One weight w per class; ``None`` for all ones.
        label_smoothing: e, in [0, 1).
        ignore_index: Labels of this value do not count.
        axis: The class axis of the logits. By default 1, as in ONNX, except for logits of rank 3, where it is
            the last (batch, sequence, vocabulary).
    """

    name: ClassVar[str] = "softmax_cross_entropy"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices", "values")
    trains_through: ClassVar[frozenset[str]] = frozenset({"Softmax", "LogSoftmax"})

    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None
    axis: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise OptionError(f"label_smoothing is {self.label_smoothing}; it needs a number in [0, 1).")
        if self.class_weights is not None:
            weights = np.asarray(self.class_weights, dtype=np.float64)
            if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
                raise OptionError("class_weights needs finite numbers of at least 0, not all 0.")

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Emit the loss on logits; integer targets are labels, floating ones distributions over classes."""
        axis = self.class_axis(prediction)
        self._check_weights(prediction, axis)
        if target.is_float:
            return self._on_distributions(op, prediction, target, axis)
        logits = _classes_second(op, prediction, axis)
        weights = None if self.class_weights is None else op.constant(self.class_weights, prediction.dtype)
        summed = op.several(
            "SoftmaxCrossEntropyLoss",
            *(logits, target, weights),
            outputs=2 if self.label_smoothing else 1,
            reduction="sum",
            ignore_index=self.ignore_index,
        )
        weight = self._label_weight(op, prediction, target, weights)
        total = summed[0].with_shape(())
        if self.label_smoothing:
            total = self._smoothed(op, total, summed[1], target, weights)
        return LossTerms((total / weight).with_shape(()), weight)

    def _smoothed(
        self, op: Builder, total: Value, log_probability: Value, target: Value, weights: Value | None
    ) -> Value:
        """(1 - e) sum_i -w_t log p_t + e / C sum_i sum_c -w_c log p_c over the labels that count."""
        terms = log_probability
        if weights is not None:
            shape = [1, -1] + [1] * ((log_probability.rank or 2) - 2)
            terms = terms * op.reshape(weights, shape)
        uniform = op.ReduceSum(terms, op.ints(1), keepdims=0)
        if self.ignore_index is not None:
            counts = op.cast(op.Not(op.Equal(target, op.scalar(self.ignore_index, target))), total.dtype)
            uniform = uniform * counts
        spread = op.ReduceSum(uniform, keepdims=0) / _size(op, log_probability, 1)
        return total * (1.0 - self.label_smoothing) - spread * self.label_smoothing

    def _label_weight(self, op: Builder, prediction: Value, target: Value, weights: Value | None) -> Value:
        if weights is None and self.ignore_index is None:
            return _count(op, target, prediction)
        counts = op.ones_like(target)
        if self.ignore_index is not None:
            counts = op.Not(op.Equal(target, op.scalar(self.ignore_index, target)))
        counts = op.cast(counts, prediction.dtype)
        if weights is not None:
            safe = target
            if self.ignore_index is not None:
                ignored = op.Equal(target, op.scalar(self.ignore_index, target))
                safe = op.Where(ignored, op.zeros_like(target), target)
            counts = counts * op.Gather(weights, safe)
        return op.ReduceSum(counts, keepdims=0).with_shape(())

    def _on_distributions(self, op: Builder, prediction: Value, target: Value, axis: int) -> LossTerms:
        if self.ignore_index is not None:
            raise OptionError("ignore_index needs class indices as targets; got a distribution over classes.")
        log_probability = op.LogSoftmax(prediction, axis=axis)
        classes = _size(op, prediction, axis)
        if self.label_smoothing:
            target = target * (1.0 - self.label_smoothing) + op.scalar(self.label_smoothing, prediction) / classes
        terms = target * log_probability
        if self.class_weights is not None:
            shape = [1] * node_rank(prediction)
            shape[axis] = -1
            terms = terms * op.reshape(op.constant(self.class_weights, prediction.dtype), shape)
        rows = _count(op, prediction, prediction) / classes
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
        axis = (2 if rank == 3 else 1) if self.axis is None else self.axis
        if not -rank <= axis < rank or axis % rank == 0:
            raise OptionError(f"axis is {axis}, but the logits {prediction.name!r} have rank {rank}.")
        return axis % rank

    def _check_weights(self, prediction: Value, axis: int) -> None:
        size = None if prediction.shape is None else prediction.shape[axis]
        if self.class_weights is not None and isinstance(size, int) and len(self.class_weights) != size:
            raise OptionError(f"class_weights has {len(self.class_weights)} numbers, but there are {size} classes.")

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


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy on logits: mean of softplus(z) - t z, for targets t in [0, 1].

    Args:
        positive_weight: Weight of the positive class: mean of w t softplus(-z) + (1 - t) softplus(z).
    """

    name: ClassVar[str] = "binary_cross_entropy"
    trains_through: ClassVar[frozenset[str]] = frozenset({"Sigmoid"})

    positive_weight: float = 1.0

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Emit the loss on logits."""
        # softplus(-|z|) + max(z, 0) - t z does not overflow for any z.
        z = prediction
        base = op.Softplus(-op.Abs(z)) + op.Relu(z)
        if self.positive_weight == 1.0:
            terms = base - target * z
        else:
            factor = target * (self.positive_weight - 1.0) + 1.0
            terms = (1.0 - target) * z + factor * (base - z)
        return _mean(op, terms, prediction)


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """Mean of (y - t)^2 over all elements."""

    name: ClassVar[str] = "mean_squared_error"

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Emit the loss."""
        difference = (prediction - target).with_shape(prediction.shape)
        return _mean(op, difference * difference, prediction)


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    """Mean of |y - t| over all elements; the gradient at 0 is 0."""

    name: ClassVar[str] = "mean_absolute_error"

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Emit the loss."""
        return _mean(op, op.Abs((prediction - target).with_shape(prediction.shape)), prediction)


@dataclass(frozen=True)
class Huber(Loss):
    """Mean over all elements of d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2), with d = y - t.

    As ``torch.nn.HuberLoss``.

    Args:
        delta: Where the square ends, above 0.
    """

    name: ClassVar[str] = "huber"

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not (self.delta > 0 and np.isfinite(self.delta)):
            raise OptionError(f"delta is {self.delta}; the Huber loss needs a finite number above 0.")

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Emit the loss: with q = min(|d|, delta) it is q (|d| - q / 2)."""
        distance = op.Abs((prediction - target).with_shape(prediction.shape))
        inner = op.Min(distance, op.scalar(self.delta, prediction))
        return _mean(op, inner * (distance - inner * 0.5), prediction)


@dataclass(frozen=True)
class CustomLoss(Loss):
    """A loss of a user's own: a function that emits nodes and returns a 0-d value.

    Micro-batches are weighted by their number of examples.

    Args:
        function: Called with the builder, the prediction and the target.
        kind: Whether targets are class indices or values; "values" by default.
    """

    name: ClassVar[str] = "custom"

    function: Callable[[Builder, Value, Value], Value]
    kind: TargetKind = "values"

    @property
    def target_kinds(self) -> tuple[TargetKind, ...]:  # type: ignore[override]
        """The one kind that was given."""
        return (self.kind,)

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Int64 for class indices, else the type of the prediction."""
        return ir.DataType.INT64 if kind == "indices" else prediction.dtype

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """The shape of the prediction; without its class axis for class indices."""
        shape = prediction.shape
        if kind == "values" or shape is None:
            return shape
        return SoftmaxCrossEntropy().target_shape(prediction, kind)

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Emit the loss."""
        return LossTerms(self.function(op, prediction, target), examples(op, prediction))


LOSSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (SoftmaxCrossEntropy, BinaryCrossEntropy, MeanSquaredError, MeanAbsoluteError, Huber)
}
"""The losses by the names that the command line takes."""


def examples(op: Builder, batch: Value) -> Value:
    """The size of the first axis as a 0-d value of the type of ``batch``."""
    return _size(op, batch, 0)


def node_rank(value: Value) -> int:
    """The rank of a prediction, which a loss needs.

    Raises:
        OptionError: It is not known.
    """
    if value.rank is None:
        raise OptionError(f"The rank of {value.name!r} is not known; declare its shape in the model.")
    return value.rank


def _classes_second(op: Builder, logits: Value, axis: int) -> Value:
    """The logits with the class axis in second place, where SoftmaxCrossEntropyLoss wants it."""
    rank = node_rank(logits)
    if axis == 1:
        return logits
    order = [0, axis, *(index for index in range(1, rank) if index != axis)]
    return op.Transpose(logits, perm=order)


def _size(op: Builder, value: Value, axis: int) -> Value:
    """The size of one axis as a 0-d value of the type of ``value``."""
    return op.cast(op.reshape(op.dimension(value, axis), []), value.dtype).with_shape(())


def _count(op: Builder, counted: Value, like: Value) -> Value:
    """The number of elements as a 0-d value of the type of ``like``."""
    static = counted.static_shape
    if static is not None:
        return op.scalar(int(np.prod(static)), like)
    return op.cast(op.Size(counted), like.dtype).with_shape(())


def _mean(op: Builder, terms: Value, prediction: Value) -> LossTerms:
    total = op.ReduceSum(terms, keepdims=0).with_shape(())
    weight = _count(op, prediction, prediction)
    return LossTerms((total / weight).with_shape(()), weight)
