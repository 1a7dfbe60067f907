"""Base classes of losses: build the graph, specify targets, describe predictions to metrics.

A loss is a mean: a sum over examples (or labels, or elements) divided by a weight, their number. Both are built, so
that several micro-batches combine to exactly the mean over the large batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir

from onnxtrain.data.conversion import kind_of
from onnxtrain.data.target_checks import (
    BinaryCheck,
    DistributionCheck,
    LabelCheck,
    TargetCheck,
    checked_class_weights,
)
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.output_axis import output_axis, units_axis
from onnxtrain.losses.probabilities import logarithm
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput, PredictionKind

TargetKind = Literal["indices", "values"]
"""Targets are class indices (int64), or values of the prediction's type and shape."""


class IgnoredWherePresent(int):
    """An ignored label that costs no nodes as long as no data contain it."""


@checks_arguments
@dataclass(frozen=True)
class TargetForm:
    """Properties of targets that only the data determine.

    Attributes:
        kind: Class indices or values.
        axis: The class axis of the prediction; ``None`` where the loss knows it or has none.
        dtype: Element type of targets whose type is free; ``None`` for the loss's own.
        shape: Shape of targets whose shape is free, batch first; ``None`` for the loss's own.
        ignoring: True if targets may contain an ignored label.
        missing: True if values may be missing: NaN.
    """

    kind: TargetKind
    axis: int | None = None
    dtype: ir.DataType | None = None
    shape: tuple[Dimension, ...] | None = None
    ignoring: bool = True
    missing: bool = False


class Loss:
    """Base of all losses: emits the loss of a prediction and a target."""

    name: ClassVar[str]
    has_text: ClassVar[bool] = True
    """True where ``loss="name"`` gives the loss, with arguments as in ``"huber(delta=0.5)"``."""
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("values",)
    probabilities: ClassVar[Literal["distribution", "independent"] | None] = None
    """The probabilities that the loss takes as well as logits: of classes, or independent ones."""
    from_logits: bool | None = None
    """Whether predictions are logits or probabilities; ``None`` where the graph is to tell."""
    predicts: PredictionKind | None = None
    """Meaning of predictions for metrics: ``"classes"`` (scores along a class axis), ``"binary"``
    (independent logits) or ``"numbers"``; ``None`` where the loss does not define it."""
    text_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of a loss given as text, where they differ from those of the class."""
    weight: float = 1.0
    """Factor of the loss."""
    reduction: str = "mean"
    """``"mean"`` of the terms of a batch, as :meth:`build` returns it, or their ``"sum"``."""
    own_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that evaluations report where none are requested."""
    equal_labels: ClassVar[bool] = False
    """True where labels only tell which examples belong together, so that any texts are labels."""
    ordered: ClassVar[bool] = False
    """True where the order of the classes counts, which the alphabet of text labels does not tell."""
    elementwise: ClassVar[bool] = False
    """True where the loss is :func:`mean_over` elements, from which missing targets are left out."""
    gathers: ClassVar[bool] = False
    """True where :meth:`gather` emits the prediction."""
    shape_hint: str = ""
    """Advice for errors about the shape or type of targets, where the loss accepts others."""

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Emit the loss."""
        raise OptionError(f"{type(self).__name__} does not define build().")

    def gather(self, model: ir.Model, output: ir.Value) -> ir.Value:
        """Emit the prediction behind a working copy, from several of its values; the output itself by default."""
        return output

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the shape of the targets for a prediction."""
        return prediction.shape

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Return the element type of the targets: int64 for class indices, the prediction's for values."""
        return ir.DataType.INT64 if kind == "indices" else prediction.dtype

    def classes(self, prediction: Value) -> int | None:
        """Return the number of classes of a loss on labels; ``None`` where it is not known."""
        return None

    def first_form(self, prediction: Value, kind: TargetKind | None) -> TargetForm:
        """Return the target form to assume before any data are seen.

        Raises:
            OptionError: The loss does not take targets of this kind.
        """
        if kind is not None and kind not in self.target_kinds:
            raise OptionError(f"The loss {self.name} takes targets as {self.target_kinds[0]}, not {kind}.")
        return TargetForm(kind or self.target_kinds[0])

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the target form for data of this type and shape.

        Args:
            prediction: The input of the loss.
            dtype: Element type of the targets.
            shape: Shape of the targets, examples first.
            sizes: Known sizes of symbolic dimensions.
            now: The form so far; it is kept where it fits.
        """
        if len(self.target_kinds) < 2:
            return now
        values = kind_of(dtype) == "float" or prediction.rank == len(shape)
        return replace(now, kind="values" if values else "indices")

    def with_form(self, form: TargetForm) -> Self:
        """Return the loss for targets of this form."""
        return self

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Return the check of the targets' values beyond being finite; ``None`` where any finite value is valid."""
        return None

    @property
    def counts_labels(self) -> bool:
        """True where the weight of a batch depends on which labels it has, not only on their number."""
        return False

    def label_weight(self, labels: np.ndarray) -> float:
        """Return the weight of a batch of labels, up to a factor common to all batches; see :class:`LossTerms`."""
        return float(labels.size)

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return the meaning of predictions for metrics; labels of one rank less imply scores over classes."""
        if not (self.predicts or self.equal_labels) and target.dtype.is_integer() and target.rank is not None:
            shape = prediction.shape
            if shape is not None and len(shape) == target.rank + 1:
                sizes = tuple(size if isinstance(size, int) else -1 for size in target.shape or ())
                return MetricInput(self.name, "classes", axis=label_axis(shape, sizes, {}, class_axis(len(shape))))
        if self.predicts == "binary":
            rank = 0 if prediction.rank is None else prediction.rank
            return MetricInput(self.name, "binary", axis=output_axis(prediction.ir, class_axis(rank)))
        return MetricInput(self.name, self.predicts)


class LossByExample(Loss):
    """Base of losses that are a sum over examples, whose terms may be weighted."""

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        return super().build(op, prediction, target)


@dataclass(frozen=True, kw_only=True)
class ReducedLoss(LossByExample):
    """Base of losses with a weight and a reduction.

    Args:
        weight: Factor of the whole loss, 0 or more.
        reduction: ``"mean"``, or ``"sum"`` of the terms of a batch. :meth:`build` returns the mean; its weight is the
            number of terms.
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


@dataclass(frozen=True, kw_only=True)
class ScoreLoss(ReducedLoss):
    """Base of losses on logits or probabilities."""

    from_logits: bool | None = None

    def log_probabilities(self, op: Builder, prediction: Value, axis: int) -> Value:
        """Emit the logarithms of the probabilities of classes."""
        if self.from_logits is False:
            return logarithm(op, prediction)
        return op.LogSoftmax(prediction, axis=axis).with_shape(prediction.shape)


class BinaryLoss(ScoreLoss):
    """Base of losses on independent binary outputs."""

    probabilities: ClassVar[Literal["distribution", "independent"] | None] = "independent"
    predicts = "binary"
    elementwise: ClassVar[bool] = True

    check_targets: bool

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that targets are from 0 to 1."""
        return BinaryCheck(self.name) if self.check_targets else None


def check_weight(name: str, weight: float) -> None:
    """Refuse an invalid weight of a loss."""
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not (np.isfinite(weight) and weight >= 0):
        raise OptionError(
            f"{name}: weight is {weight!r}, but must be a finite number, 0 or more: the factor of the whole loss; "
            "those of classes are class_weights."
        )


def check_above_zero(loss: Loss, **values: Any) -> None:
    """Refuse settings of a loss that are not finite numbers above 0."""
    for name, value in values.items():
        if not (isinstance(value, Real) and 0 < float(value) < math.inf):
            raise OptionError(f"{name} is {value!r}; {loss.name} needs a finite number above 0.")


def reduced(loss: Loss, terms: LossTerms) -> LossTerms:
    """Apply the reduction of a loss to terms that were built as a mean."""
    if loss.reduction == "mean":
        return terms
    return terms._replace(loss=(terms.loss * terms.weight).with_shape(()), sums=True)


def class_axis(rank: int) -> int:
    """Return the default class axis: the last for rank 3 (batch, sequence, vocabulary), else ONNX's, 1."""
    return 2 if rank == 3 else 1


def label_axis(prediction: Sequence[Dimension], labels: Sequence[int], sizes: Mapping[str, int], preferred: int) -> int:
    """Infer the class axis from the shape of labels: without it the prediction has their shape."""
    fitting = [
        axis
        for axis in range(1, len(prediction))
        if _fits([*prediction[:axis], *prediction[axis + 1 :]], labels, sizes)
    ]
    return preferred if preferred in fitting or not fitting else fitting[0]


def fits_shape(wanted: Sequence[Dimension], found: Sequence[int]) -> bool:
    """Return whether an array has a shape, apart from its first axis, the examples."""
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
    """Emit the size of the first axis as a 0-d value of the type of ``batch``."""
    return size_of(op, batch, 0)


@checks_arguments
def node_rank(value: Value) -> int:
    """Return the rank of a prediction.

    Raises:
        OptionError: The rank is not known.
    """
    if value.rank is None:
        raise OptionError(f"The rank of {value.name!r} is not known; declare its shape in the model.").about(value.name)
    return value.rank


def known_size(value: Value, axis: int) -> int | None:
    """Return the size of one axis; ``None`` where it is dynamic or not known."""
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None


def size_of(op: Builder, value: Value, axis: int) -> Value:
    """Emit the size of one axis as a 0-d value of the type of ``value``."""
    return op.cast(op.reshape(op.dimension(value, axis), []), value.dtype).with_shape(())


def count_of(op: Builder, counted: Value, like: Value) -> Value:
    """Emit the number of elements as a 0-d value of the type of ``like``."""
    static = counted.static_shape
    if static is not None:
        return op.scalar(int(np.prod(static)), like)
    return op.cast(op.Size(counted), like.dtype).with_shape(())


def weighted(op: Builder, terms: Value, weights: Value) -> Value:
    """Multiply the terms [N, ...] of a loss by the weights of their examples, or of the terms themselves."""
    if weights.rank != node_rank(terms):
        weights = op.reshape(weights, [-1] + [1] * (node_rank(terms) - 1))
    return (terms * weights).with_shape(terms.shape)


def softplus(op: Builder, z: Value) -> Value:
    """log(1 + exp(z)), which cannot overflow, and whose gradient is sigmoid(z) for every z."""
    size = op.Abs(z)
    return op.Softplus(-size) + (z + size) * 0.5


@checks_arguments
def mean_over(op: Builder, terms: Value, prediction: Value, weights: Value | None = None) -> LossTerms:
    """Emit the mean of elementwise terms; the divisor is the number of elements, with or without weights."""
    return mean_of(op, terms.with_shape(prediction.shape), count_of(op, prediction, prediction), weights)


def mean_of(
    op: Builder, terms: Value, count: Value, weights: Value | None = None, *, divisor: Value | None = None
) -> LossTerms:
    """Emit the sum of terms [N, ...], of weighted examples, over their number, or over a divisor that is never 0."""
    if weights is not None:
        terms = weighted(op, terms, weights)
    total = op.ReduceSum(terms, keepdims=0).with_shape(())
    return LossTerms((total / (count if divisor is None else divisor)).with_shape(()), count)


class ClassLoss(ScoreLoss):
    """Base of losses on scores along a class axis, whose targets are labels or distributions."""

    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices", "values")
    probabilities: ClassVar[Literal["distribution", "independent"] | None] = "distribution"
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

    @property
    def counts_labels(self) -> bool:
        """True where labels may be ignored."""
        return self.ignore_index is not None

    def label_weight(self, labels: np.ndarray) -> float:
        """Return the number of labels that are not ignored."""
        return float(np.count_nonzero(labels != self.ignore_index))

    def counted(self, labels: np.ndarray) -> np.ndarray:
        """Return the labels [N, ...] that are compared with a prediction."""
        return labels

    def ignores_all(self, labels: np.ndarray) -> bool:
        """Return whether there is a label to ignore, and no other is compared with a prediction."""
        return self.ignore_index is not None and not (self.counted(labels) != self.ignore_index).any()

    def label_count(self, op: Builder, prediction: Value, target: Value) -> Value:
        """Emit the number of labels that are not ignored, in the type of the prediction."""
        if self.ignore_index is None:
            return count_of(op, target, prediction)
        # Integers: a sum of ones in 16-bit floats ends at 2048.
        counted = op.cast(op.Not(self.ignored(op, target)), ir.DataType.INT64)
        return op.cast(op.ReduceSum(counted, keepdims=0), prediction.dtype).with_shape(())

    def ignored(self, op: Builder, target: Value) -> Value:
        """Emit which labels are ignored."""
        assert self.ignore_index is not None
        return op.Equal(target, op.scalar(self.ignore_index, target))

    def class_axis(self, prediction: Value) -> int:
        """Return the class axis of the logits, from 1."""
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
            ).about(prediction.name, got=axis, wanted=rank)
        return axis % rank

    def axis_of_graph(self, prediction: Value) -> int | None:
        """Return 1 for logits of rank 2, else the axis of the last layer's units; ``None`` where nodes do not tell."""
        if self.axis is not None or prediction.rank is None:
            return None
        found = 1 if prediction.rank == 2 else units_axis(prediction.ir)
        return found if found is not None and 0 < found < prediction.rank else None

    def weight_by_class(self, prediction: Value, axis: int) -> tuple[float, ...] | None:
        """Return one weight per class."""
        given, size = self.class_weights, known_size(prediction, axis)
        if isinstance(given, Mapping):
            if size is None:
                raise OptionError("class_weights is a dictionary, but the model does not say how many classes it has.")
            if max(given) >= size:
                raise OptionError(
                    f"class_weights has a weight for class {max(given)}, but there are {size} classes."
                ).about("class_weights", got=max(given), wanted=size)
            return tuple(given.get(index, 1.0) for index in range(size))
        if given is not None and size is not None and len(given) != size:
            raise OptionError(f"class_weights has {len(given)} numbers, but there are {size} classes.")
        return None if given is None else tuple(given)

    def weights_of_classes(self, op: Builder, prediction: Value, axis: int) -> Value | None:
        """Emit one weight per class; ``None`` where all are 1."""
        by_class = self.weight_by_class(prediction, axis)
        return None if by_class is None else op.constant(by_class, prediction.dtype)

    def label_weights(self, op: Builder, prediction: Value, target: Value) -> Value | None:
        """Emit the weight of each label: its class's, 0 where it is ignored; ``None`` where all weights are 1."""
        by_class = self.weights_of_classes(op, prediction, self.class_axis(prediction))
        ignored = None if self.ignore_index is None else self.ignored(op, target)
        if by_class is None:
            return None if ignored is None else op.cast(op.Not(ignored), prediction.dtype)
        if ignored is None:
            return op.Gather(by_class, target)
        safe = op.Where(ignored, op.zeros_like(target), target)
        return op.cast(op.Not(ignored), prediction.dtype) * op.Gather(by_class, safe)

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the logits' shape, for labels without the class axis."""
        shape = prediction.shape
        if kind == "values" or shape is None:
            return shape
        axis = self.class_axis(prediction)
        return tuple(size for index, size in enumerate(shape) if index != axis)

    def classes(self, prediction: Value) -> int | None:
        """Return the size of the class axis, where it is known."""
        return known_size(prediction, self.class_axis(prediction))

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return labels, with the class axis inferred, where the rank is one less; else distributions."""
        rank = node_rank(prediction)
        labels = len(shape) == rank - 1 or (len(shape) != rank and kind_of(dtype) != "float")
        form = replace(now, kind="indices" if labels else "values")
        if self.axis is not None or not labels:
            return form
        preferred = class_axis(rank) if now.axis is None else now.axis
        return replace(form, axis=label_axis(prediction.shape or (), shape, sizes, preferred))

    def with_form(self, form: TargetForm) -> Self:
        """Set the class axis if none was given, and drop an ignored label that the data do not contain."""
        axis = form.axis if self.axis is None else self.axis
        optional = isinstance(self.ignore_index, IgnoredWherePresent) and not form.ignoring
        given: dict[str, Any] = {"axis": axis, "ignore_index": None if optional else self.ignore_index}
        return replace(self, **given)

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are class indices, or that distributions sum to 1."""
        if kind == "indices":
            return LabelCheck(self.classes(prediction), self.ignore_index)
        return DistributionCheck(self.name, self.class_axis(prediction)) if self.check_targets else None

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return scores along the class axis, with the ignored label."""
        return MetricInput(self.name, "classes", self.class_axis(prediction), self.ignore_index)


def classes_second(op: Builder, logits: Value, axis: int) -> Value:
    """Transpose the class axis to position 1, as SoftmaxCrossEntropyLoss requires."""
    rank = node_rank(logits)
    if axis == 1:
        return logits
    order = [0, axis, *(index for index in range(1, rank) if index != axis)]
    return op.Transpose(logits, perm=order)


Forms = tuple[TargetForm, ...]
"""Form of each loss's targets."""


@dataclass(frozen=True)
class JointLoss:
    """Weighted sum of losses, each on an output of its own."""

    parts: tuple[tuple[str, Loss], ...]

    @property
    def name(self) -> str:
        """The name for messages."""
        return " + ".join(f"{loss.name}({output})" for output, loss in self)

    def __iter__(self) -> Iterator[tuple[str, Loss]]:
        return iter(self.parts)
