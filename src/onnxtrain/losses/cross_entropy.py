"""Softmax cross-entropy of logits over classes, and the next-token loss of language models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from onnxtrain.data.target_checks import LabelCheck, TargetCheck
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.sizes import product
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import ClassLoss, TargetKind, classes_second, count_of, node_rank, size_of, weighted
from onnxtrain.losses.chunks import check_chunk, head_in_chunks, sum_in_chunks
from onnxtrain.lowering.logits import LogitHead, as_rows, find_head
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput


@checks_arguments
@dataclass(frozen=True)
class SoftmaxCrossEntropy(ClassLoss):
    """Softmax cross-entropy of logits: mean over labels of -w_t log softmax(z)_t.

    With label smoothing e the target distribution is (1 - e) onehot(t) + e / C. With weights and ignored labels
    the mean is PyTorch's: the weighted sum divided by the sum of the weights of the labels that are not ignored.

    Args:
        class_weights: One weight w per class, as a list or as a dictionary from class to weight; classes that are
            missing in it have 1. ``None`` for all ones.
        label_smoothing: e, in [0, 1).
        ignore_index: Label to ignore; a batch of ignored labels alone has loss 0. The text
            ``"softmax_cross_entropy"`` has -100, as in PyTorch.
        axis: The class axis of the logits. By default it is inferred from the shape of the labels: removing it from the
            logits' shape gives the labels' shape. Where several axes fit, it is the axis of the model's final Softmax
            or of its last layer's outputs (1 behind a convolution), else the last for logits of rank 3 (batch,
            sequence, vocabulary), and 1, as in ONNX, for others.
        check_targets: Refuse targets that are no distributions: values outside [0, 1], or that do not sum to
            1 over the classes.
        chunk: Rows (tokens) of logits to compute at once. The matmul that computes them becomes part of the loss,
            chunk by chunk; targets must be labels, and the class axis the last. ``None`` for all rows at once.
    """

    name: ClassVar[str] = "softmax_cross_entropy"

    class_weights: Sequence[float] | Mapping[int, float] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None
    axis: int | None = None
    check_targets: bool = True
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk)
        if not 0.0 <= self.label_smoothing < 1.0:
            raise OptionError(f"label_smoothing is {self.label_smoothing}; it needs a number in [0, 1).")

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the logits' shape, for labels without the class axis.

        Raises:
            OptionError: The logits cannot be computed in chunks.
        """
        if self.chunk is not None:
            self._check_chunks(prediction, kind)
        return super().target_shape(prediction, kind)

    def _check_chunks(self, prediction: Value, kind: TargetKind) -> None:
        assert self.chunk is not None
        if kind == "values":
            raise OptionError(
                f"{self.name}: chunk={self.chunk} needs labels as targets, but they are distributions, as large as the "
                "logits; leave chunk out."
            )
        if self.class_axis(prediction) != node_rank(prediction) - 1:
            raise OptionError(
                f"{self.name}: chunk={self.chunk} needs the classes on the last axis of {prediction.name!r}, of "
                f"shape {prediction.shape}, but they are on axis {self.class_axis(prediction)}; say axis=-1 if they "
                "are on the last, else leave chunk out."
            )
        if self.from_logits is False:
            raise OptionError(
                f"{self.name}: chunk={self.chunk} needs logits, but {prediction.name!r} holds probabilities; leave "
                "chunk out."
            )
        head_in_chunks(prediction.ir, self.name, self.chunk)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss; integer targets are labels, floating ones distributions over classes."""
        axis = self.class_axis(prediction)
        if target.is_float:
            return self._on_distributions(op, prediction, target, axis, weights)
        weight = self._weight(op, prediction, target)
        divisor = self.divisor(op, weight)
        if axis == node_rank(prediction) - 1:
            target, weights = _by_row(op, target, weights)
        head = None if self.chunk is None else find_head(prediction.ir)
        if head is None:  # also for a padded batch of a fixed size, whose logits are sliced
            total = self._total(op, prediction, target, axis, weights)
        else:
            total = self._total_in_chunks(op, head, target, weights)
        return LossTerms((total / divisor).with_shape(()), weight)

    def _total(self, op: Builder, prediction: Value, target: Value, axis: int, weights: Value | None) -> Value:
        """Emit the sum over labels; with the classes on the last axis, prediction and labels are rows."""
        is_last = axis == node_rank(prediction) - 1
        logits = as_rows(op, prediction) if is_last else classes_second(op, prediction, axis)
        of_classes = self.weights_of_classes(op, prediction, axis)
        given = self.from_logits is False
        if given:
            logits = self.log_probabilities(op, logits, 1)
        total, *log_p = op.several(
            "NegativeLogLikelihoodLoss" if given else "SoftmaxCrossEntropyLoss",
            *(logits, target, of_classes),
            outputs=2 if self.label_smoothing and not given else 1,
            reduction="sum" if weights is None else "none",
            ignore_index=None if self.ignore_index is None else int(self.ignore_index),
        )
        if weights is not None:
            total = op.ReduceSum(weighted(op, total.with_shape(target.shape), weights), keepdims=0)
        total = total.with_shape(())
        if self.label_smoothing:
            total = self._smoothed(op, total, logits if given else log_p[0], target, of_classes, weights)
        return total.with_shape(())

    def _total_in_chunks(self, op: Builder, head: LogitHead, labels: Value, weights: Value | None) -> Value:
        """Emit the same sum from the inputs of the logits, a chunk at a time; padding is ignored."""
        assert self.chunk is not None
        ignored = -100 if self.ignore_index is None else int(self.ignore_index)
        of_chunk = replace(self, ignore_index=ignored, chunk=None)
        by_row = [(labels, ignored)] if weights is None else [(labels, ignored), (weights, 0)]

        def term(body: Builder, logits: Value, labels: Value, weights: Value | None = None) -> Value:
            return of_chunk._total(body, logits, labels, 1, weights)

        return sum_in_chunks(op, head, self.chunk, by_row, term)

    def _smoothed(
        self,
        op: Builder,
        total: Value,
        log_probability: Value,
        target: Value,
        of_classes: Value | None,
        weights: Value | None,
    ) -> Value:
        """(1 - e) sum_i -w_t log p_t + e / C sum_i sum_c -w_c log p_c over the labels that are not ignored."""
        terms = log_probability
        if of_classes is not None:
            shape = [1, -1] + [1] * ((log_probability.rank or 2) - 2)
            terms = terms * op.reshape(of_classes, shape)
        uniform = op.ReduceSum(terms, op.ints(1), keepdims=0)
        if weights is not None:
            uniform = weighted(op, uniform.with_shape(target.shape), weights)
        if self.ignore_index is not None:
            uniform = uniform * op.cast(op.Not(self.ignored(op, target)), total.dtype)
        spread = op.ReduceSum(uniform, keepdims=0) / size_of(op, log_probability, 1)
        return total * (1.0 - self.label_smoothing) - spread * self.label_smoothing

    def divisor(self, op: Builder, weight: Value) -> Value:
        """Emit the weight, or 1 where every label is ignored: such a (micro-)batch has loss 0, not 0 / 0."""
        if self.class_weights is None:
            return weight if self.ignore_index is None else op.Max(weight, 1.0)
        given = self.class_weights.values() if isinstance(self.class_weights, Mapping) else self.class_weights
        if self.ignore_index is None and all(given):
            return weight
        return op.Where(op.binary("Equal", weight, 0), 1.0, weight)

    @property
    def counts_labels(self) -> bool:
        """True where labels may be ignored, or have weights."""
        return self.ignore_index is not None or self.class_weights is not None

    def label_weight(self, labels: np.ndarray) -> float:
        """Return the sum of the weights of the labels that are not ignored."""
        found = zip(*np.unique(labels[labels != self.ignore_index], return_counts=True), strict=True)
        given = self.class_weights
        if given is None:
            return float(sum(count for _, count in found))
        by_class = given if isinstance(given, Mapping) else dict(enumerate(given))
        return math.fsum(by_class.get(int(label), 1.0) * count for label, count in found)

    def _weight(self, op: Builder, prediction: Value, target: Value) -> Value:
        """Emit the sum of the weights of the labels that are not ignored."""
        of_labels = None if self.class_weights is None else self.label_weights(op, prediction, target)
        if of_labels is None:
            return self.label_count(op, prediction, target)
        return op.ReduceSum(of_labels, keepdims=0).with_shape(())

    def _on_distributions(
        self, op: Builder, prediction: Value, target: Value, axis: int, weights: Value | None
    ) -> LossTerms:
        if self.ignore_index is not None and self.ignore_index >= 0:  # a negative one is no class
            raise OptionError("ignore_index needs class indices as targets; got a distribution over classes.")
        log_probability = self.log_probabilities(op, prediction, axis)
        classes = size_of(op, prediction, axis)
        if self.label_smoothing:
            target = target * (1.0 - self.label_smoothing) + op.scalar(self.label_smoothing, prediction) / classes
        terms = target * log_probability
        if (of_classes := self.weights_of_classes(op, prediction, axis)) is not None:
            shape = [1] * node_rank(prediction)
            shape[axis] = -1
            terms = terms * op.reshape(of_classes, shape)
        rows = count_of(op, prediction, prediction) / classes
        if weights is not None:
            terms = weighted(op, terms.with_shape(prediction.shape), weights)
        total = -op.ReduceSum(terms, keepdims=0).with_shape(())
        return LossTerms((total / rows).with_shape(()), rows)


def _by_row(op: Builder, target: Value, weights: Value | None) -> tuple[Value, Value | None]:
    """Reshape labels [N, ...] to a vector, and repeat the weight of each example for its labels."""
    rank = node_rank(target)
    if rank == 1:
        return target, weights
    if weights is not None:
        spread = op.Expand(op.reshape(weights, [-1] + [1] * (rank - 1)), op.shape_of(target))
        weights = op.reshape(spread, [-1])
    return op.reshape(target, [-1], known=None if target.shape is None else (product(target.shape),)), weights


@checks_arguments
@dataclass(frozen=True)
class NextToken(SoftmaxCrossEntropy):
    """Language-model loss: softmax cross-entropy of logits [batch, sequence, vocabulary] for the next token.

    Targets are token ids at the positions of the inputs, mostly the inputs themselves: the logits at a position are
    compared with the next token, those at the last position with none. Metrics shift targets in the same way.

    Args:
        class_weights: As in :class:`SoftmaxCrossEntropy`.
        label_smoothing: In [0, 1).
        ignore_index: Token id to ignore: padding, or prompts whose answers are learned.
        axis: The axis of the vocabulary.
        check_targets: Unused: targets are token ids.
        chunk: Rows of logits to compute at once, as in :class:`SoftmaxCrossEntropy`.
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
                "next_token needs an ignore_index, which is the target of the last position; the default is -100."
            )

    @property
    def is_likelihood(self) -> bool:
        """True where the loss is the mean negative log-likelihood of a token, whose exponential is the perplexity."""
        plain = self.class_weights is None and not self.label_smoothing
        return plain and self.weight == 1.0 and self.reduction == "mean"

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss: shift the labels, which are smaller than the logits."""
        assert self.ignore_index is not None
        end = op.Expand(op.scalar(self.ignore_index, target), op.Concat(op.dimension(target, 0), op.ints(1), axis=0))
        later = op.Slice(target, op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(1))
        moved = op.Concat(later, end, axis=1).with_shape(target.shape)
        return super().build(op, prediction, moved, weights)

    def label_weight(self, labels: np.ndarray) -> float:
        """Return the weight of the labels that are compared: all but the first of each row."""
        return super().label_weight(self.counted(labels))

    def counted(self, labels: np.ndarray) -> np.ndarray:
        """Return all labels but the first of each row."""
        return labels[:, 1:]

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are tokens of the model."""
        return LabelCheck(self.classes(prediction), self.ignore_index, "tokens in the vocabulary of the model")

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [batch, sequence].

        Raises:
            OptionError: The logits have another rank.
        """
        if node_rank(prediction) != 3 or self.class_axis(prediction) != 2:
            raise OptionError(
                f"next_token needs logits of shape [batch, sequence, vocabulary], but {prediction.name!r} has shape "
                f"{prediction.shape}; name their output with output=, or use softmax_cross_entropy."
            ).about(prediction.name, got=prediction.shape)
        return super().target_shape(prediction, kind)

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return scores over the vocabulary, each for the next position."""
        return super().metric_input(prediction, target)._replace(later=1)
