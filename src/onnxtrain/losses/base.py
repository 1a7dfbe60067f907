"""The interface of losses: build the graph, specify targets, interpret predictions.

A loss is an average: a sum over examples (or labels, or elements) divided by a weight, their number. Both are
built, so that several micro-batches can be combined to exactly the average over the large batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir

from onnxtrain.data.conversion import kind_of
from onnxtrain.data.target_checks import TargetCheck
from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.value import Dimension
from onnxtrain.metrics.base import PredictionKind
from onnxtrain.metrics.reading import Reading
from onnxtrain.spelling import checks_arguments
from onnxtrain.training_info.recipe import LossTerms

TargetKind = Literal["indices", "values"]
"""Targets are class indices (int64), or numbers of the prediction's type and shape."""


class IgnoredWherePresent(int):
    """A label that a loss ignores where data hold it, and spends no node on where they do not."""


@checks_arguments
@dataclass(frozen=True)
class TargetForm:
    """Properties of targets that only data decide.

    Attributes:
        kind: Class indices or values.
        axis: The class axis of the prediction; ``None`` where the loss knows it, or has none.
        dtype: Element type of targets that may be of any; ``None`` for the loss's own.
        shape: Shape of targets that may have any, batch first; ``None`` for the loss's own.
        ignoring: Whether there may be labels of an index that is ignored where it is present.
    """

    kind: TargetKind
    axis: int | None = None
    dtype: ir.DataType | None = None
    shape: tuple[Dimension, ...] | None = None
    ignoring: bool = True


class Loss:
    """Base of the losses: builds itself for a prediction and a target."""

    name: ClassVar[str]
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("values",)
    trains_through: ClassVar[frozenset[str]] = frozenset()
    """Final activations that the loss contains: it is built on what stands before them."""
    predicts: PredictionKind | None = None
    """The kind of predictions, for metrics: ``"classes"`` (scores along a class axis), ``"binary"``
    (independent logits) or ``"numbers"``; ``None`` where the loss does not say."""
    text_defaults: ClassVar[Mapping[str, Any]] = {}
    """Arguments of a loss that is given as text, where they differ from those of the class."""
    weight: float = 1.0
    """Factor of the loss."""
    reduction: str = "mean"
    """Whether the loss of a batch is the mean of its terms, as :meth:`build` gives it, or their sum."""
    shape_hint: str = ""
    """Advice in errors about the shape or type of targets, where the loss accepts another."""

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
        """Return the number of classes, where the loss takes labels and the number is known."""
        return None

    def first_form(self, prediction: Value, kind: TargetKind | None) -> TargetForm:
        """Return the form of targets to assume before data are seen.

        Raises:
            OptionError: The loss takes no targets of this kind.
        """
        if kind is not None and kind not in self.target_kinds:
            raise OptionError(f"The loss {self.name} takes targets as {self.target_kinds[0]}, not {kind}.")
        return TargetForm(kind or self.target_kinds[0])

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the form of targets of this type and shape.

        Args:
            prediction: What the loss is built on.
            dtype: The targets' element type.
            shape: Their shape, examples first.
            sizes: What is known of the sizes that symbols stand for.
            now: What targets were taken for so far; it stays where it fits.
        """
        if len(self.target_kinds) < 2:
            return now
        values = kind_of(dtype) == "float" or prediction.rank == len(shape)
        return replace(now, kind="values" if values else "indices")

    def with_form(self, form: TargetForm) -> Self:
        """The loss for targets of a form."""
        return self

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """The check of the targets' values, besides that they are finite; ``None`` where any will do."""
        return None

    @property
    def counts_labels(self) -> bool:
        """Whether the weight of a batch of labels depends on which labels they are, and not on their number alone."""
        return False

    def label_weight(self, labels: np.ndarray) -> float:
        """Return the weight of a batch of labels, up to a factor that all batches share; see :class:`LossTerms`."""
        return float(labels.size)

    def reading(self, prediction: Value, target: Value) -> Reading:
        """Return how metrics interpret predictions; with labels of one rank less they are scores over classes."""
        if self.predicts is None and target.dtype.is_integer() and target.rank is not None:
            shape = prediction.shape
            if shape is not None and len(shape) == target.rank + 1:
                sizes = tuple(size if isinstance(size, int) else -1 for size in target.shape or ())
                return Reading(self.name, "classes", axis=label_axis(shape, sizes, {}, class_axis(len(shape))))
        return Reading(self.name, self.predicts)


class LossByExample(Loss):
    """Base of the losses that are a sum over examples, whose terms may have weights."""

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss.

        Args:
            op: Emits nodes.
            prediction: What the model gives.
            target: What it should give.
            weights: Factors of the examples' terms [N].
        """
        return super().build(op, prediction, target)


@dataclass(frozen=True, kw_only=True)
class ReducedLoss(LossByExample):
    """Base of the losses with a factor and a choice of the reduction.

    Args:
        weight: What the loss is multiplied by, 0 or more: beside other losses, or alone.
        reduction: ``"mean"``, or ``"sum"`` of the terms of a batch. What :meth:`build` returns is the mean; its weight
            is the number of terms.
    """

    weight: float = 1.0
    reduction: str = "mean"

    def __post_init__(self) -> None:
        check_weight(self.name, self.weight)
        if self.reduction == "none":
            raise OptionError(
                f"{self.name}: reduction is 'none', but training needs one number: give 'mean' or 'sum'; examples "
                "are weighted by fit(sample_weight=...)."
            )
        if self.reduction not in ("mean", "sum"):
            raise OptionError(f"{self.name}: reduction is {self.reduction!r}; it is 'mean' or 'sum'.")


def check_weight(name: str, weight: float) -> None:
    """Refuse a factor that a loss cannot have.

    Raises:
        OptionError: It is no finite number of at least 0.
    """
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not (np.isfinite(weight) and weight >= 0):
        raise OptionError(
            f"{name}: weight is {weight!r}, but must be a finite number, 0 or more: the factor of the whole loss; "
            "those of classes are class_weights."
        )


def reduced(op: Builder, loss: Loss, terms: LossTerms) -> LossTerms:
    """The terms of a loss that was built as a mean, with its reduction."""
    if loss.reduction == "mean":
        return terms
    return terms._replace(loss=(terms.loss * terms.weight).with_shape(()), sums=True)


def class_axis(rank: int) -> int:
    """The class axis where nothing tells it: the last of rank 3 (batch, sequence, vocabulary), else ONNX's, 1."""
    return 2 if rank == 3 else 1


def label_axis(prediction: Sequence[Dimension], labels: Sequence[int], sizes: Mapping[str, int], preferred: int) -> int:
    """The class axis that labels of a shape tell: without it the prediction has their shape.

    Args:
        prediction: The shape of the prediction.
        labels: The shape of the labels, examples first; -1 fits every size.
        sizes: What symbols of the prediction's shape stand for, as far as it is known.
        preferred: What is taken where it fits, and where none does.
    """
    fitting = [
        axis
        for axis in range(1, len(prediction))
        if _fits([*prediction[:axis], *prediction[axis + 1 :]], labels, sizes)
    ]
    return preferred if preferred in fitting or not fitting else fitting[0]


def fits_shape(wanted: Sequence[Dimension], found: Sequence[int]) -> bool:
    """Whether an array has a shape, its first axis, the examples, left out."""
    return _fits(wanted, found, {})


def _fits(wanted: Sequence[Dimension], found: Sequence[int], sizes: Mapping[str, int]) -> bool:
    if len(wanted) != len(found):
        return False
    known = dict(sizes)
    for dimension, size in zip(wanted[1:], found[1:], strict=True):
        if size == -1 or dimension is None:
            continue
        expected = dimension if isinstance(dimension, int) else known.setdefault(dimension, size)
        if expected != size:
            return False
    return True


@checks_arguments
def examples(op: Builder, batch: Value) -> Value:
    """The size of the first axis as a 0-d value of the type of ``batch``."""
    return size_of(op, batch, 0)


@checks_arguments
def node_rank(value: Value) -> int:
    """The rank of a prediction, which a loss needs.

    Raises:
        OptionError: It is not known.
    """
    if value.rank is None:
        raise OptionError(f"The rank of {value.name!r} is not known; declare its shape in the model.")
    return value.rank


def size_of(op: Builder, value: Value, axis: int) -> Value:
    """The size of one axis as a 0-d value of the type of ``value``."""
    return op.cast(op.reshape(op.dimension(value, axis), []), value.dtype).with_shape(())


def count_of(op: Builder, counted: Value, like: Value) -> Value:
    """The number of elements as a 0-d value of the type of ``like``."""
    static = counted.static_shape
    if static is not None:
        return op.scalar(int(np.prod(static)), like)
    return op.cast(op.Size(counted), like.dtype).with_shape(())


def weighted(op: Builder, terms: Value, weights: Value) -> Value:
    """The terms [N, ...] of a loss, each times the weight of its example."""
    return (terms * op.reshape(weights, [-1] + [1] * (node_rank(terms) - 1))).with_shape(terms.shape)


def mean_over(op: Builder, terms: Value, prediction: Value, weights: Value | None = None) -> LossTerms:
    """The mean of terms, of which there are as many as elements of the prediction; weights do not count in it."""
    if weights is not None:
        terms = weighted(op, terms.with_shape(prediction.shape), weights)
    total = op.ReduceSum(terms, keepdims=0).with_shape(())
    weight = count_of(op, prediction, prediction)
    return LossTerms((total / weight).with_shape(()), weight)
