"""The base of losses on class scores: class axis, labels or distributions, class weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import onnx_ir as ir

from onnxtrain.data.conversion import kind_of
from onnxtrain.data.target_checks import DistributionCheck, LabelCheck, TargetCheck, checked_class_weights
from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.value import Dimension
from onnxtrain.losses.base import (
    IgnoredWherePresent,
    ReducedLoss,
    TargetForm,
    TargetKind,
    class_axis,
    count_of,
    label_axis,
    node_rank,
)
from onnxtrain.metrics.reading import Reading


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

    @property
    def counts_labels(self) -> bool:
        """Whether labels may be ignored."""
        return self.ignore_index is not None

    def label_weight(self, labels: np.ndarray) -> float:
        """The number of labels that are not ignored."""
        return float(np.count_nonzero(labels != self.ignore_index))

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

    def reading(self, prediction: Value, target: Value) -> Reading:
        """Scores along the class axis; labels that are ignored do not count."""
        return Reading(self.name, "classes", self.class_axis(prediction), self.ignore_index)


def classes_second(op: Builder, logits: Value, axis: int) -> Value:
    """The logits with the class axis in second place, where SoftmaxCrossEntropyLoss wants it."""
    rank = node_rank(logits)
    if axis == 1:
        return logits
    order = [0, axis, *(index for index in range(1, rank) if index != axis)]
    return op.Transpose(logits, perm=order)
