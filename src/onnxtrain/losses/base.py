"""Base classes of losses: build the graph, specify targets, describe predictions to metrics.

A loss is a mean: a sum over examples (or labels, or elements) divided by a weight, their number. Both are built, so
that several micro-batches combine to exactly the mean over the large batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir

from onnxtrain.data.conversion import kind_of
from onnxtrain.data.target_checks import DistributionCheck, LabelCheck, TargetCheck, checked_class_weights
from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.value import Dimension
from onnxtrain.metrics.base import MetricInput, PredictionKind
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

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return how metrics interpret predictions; with labels of one rank less they are scores over classes."""
        if self.predicts is None and target.dtype.is_integer() and target.rank is not None:
            shape = prediction.shape
            if shape is not None and len(shape) == target.rank + 1:
                sizes = tuple(size if isinstance(size, int) else -1 for size in target.shape or ())
                return MetricInput(self.name, "classes", axis=label_axis(shape, sizes, {}, class_axis(len(shape))))
        return MetricInput(self.name, self.predicts)


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


class ClassLoss(ReducedLoss):
    """Base of the losses on scores along a class axis, whose targets are labels or distributions.

    The fields below are those that a subclass declares.
    """

    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices", "values")
    trains_through: ClassVar[frozenset[str]] = frozenset({"Softmax", "LogSoftmax"})
    predicts = "classes"
    text_defaults: ClassVar[Mapping[str, Any]] = {"ignore_index": IgnoredWherePresent(-100)}

    class_weights: Sequence[float] | Mapping[int, float] | None
    ignore_index: int | None
    axis: int | None
    check_targets: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", checked_class_weights(self.class_weights))

    def label_count(self, op: Builder, prediction: Value, target: Value) -> Value:
        """Return the number of labels that are not ignored, in the type of the prediction."""
        if self.ignore_index is None:
            return count_of(op, target, prediction)
        # Integers: a sum of ones in 16-bit floats ends at 2048.
        counted = op.cast(op.Not(op.Equal(target, op.scalar(self.ignore_index, target))), ir.DataType.INT64)
        return op.cast(op.ReduceSum(counted, keepdims=0), prediction.dtype).with_shape(())

    def class_axis(self, prediction: Value) -> int:
        """The class axis of the logits, from 1.

        Raises:
            OptionError: The logits have no such axis.
        """
        rank = node_rank(prediction)
        if rank < 2:
            raise OptionError(
                f"{self.name} needs logits of shape [batch, classes, ...], but {prediction.name!r} has "
                f"shape {prediction.shape}; for one logit per example use binary_cross_entropy."
            )
        axis = class_axis(rank) if self.axis is None else self.axis
        if not -rank <= axis < rank or axis % rank == 0:
            raise OptionError(
                f"axis is {axis}, but the logits {prediction.name!r} have rank {rank}: it is 1 to {rank - 1}, or "
                f"counts from the end with -1 to {1 - rank}; axis 0 is the batch."
            )
        return axis % rank

    def only_class_axis(self, prediction: Value) -> int | None:
        """The class axis that labels have to have: 1 where there is no other; ``None`` where they tell it."""
        return 1 if self.axis is None and prediction.rank == 2 else None

    def weight_by_class(self, prediction: Value, axis: int) -> tuple[float, ...] | None:
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
        given: dict[str, Any] = {"axis": axis, "ignore_index": None if optional else self.ignore_index}
        return replace(self, **given)

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Labels name classes; distributions sum to 1."""
        if kind == "indices":
            return LabelCheck(self.classes(prediction), self.ignore_index)
        return DistributionCheck(self.name, self.class_axis(prediction)) if self.check_targets else None

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Scores along the class axis; labels that are ignored do not count."""
        return MetricInput(self.name, "classes", self.class_axis(prediction), self.ignore_index)


def classes_second(op: Builder, logits: Value, axis: int) -> Value:
    """The logits with the class axis in second place, where SoftmaxCrossEntropyLoss wants it."""
    rank = node_rank(logits)
    if axis == 1:
        return logits
    order = [0, axis, *(index for index in range(1, rank) if index != axis)]
    return op.Transpose(logits, perm=order)


Forms = TargetForm | tuple[TargetForm, ...]
"""Forms of targets: of the only loss, or of each loss."""


@dataclass(frozen=True)
class JointLoss:
    """The sum of losses, each on an output of its own: sum of weight times loss.

    Attributes:
        parts: The outputs, each with its loss.
    """

    parts: tuple[tuple[str, Loss], ...]

    @property
    def name(self) -> str:
        """The name in messages."""
        return " + ".join(f"{loss.name}({output})" for output, loss in self)

    def __iter__(self) -> Iterator[tuple[str, Loss]]:
        return iter(self.parts)
