"""Targets of a loss: requirements of the loss, and properties decided by data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.data import Dataset, TargetCheck, TensorSpec
from onnxtrain.data.labels import are_labels, as_classes, as_numbers, to_indices
from onnxtrain.data.target_checks import none_negative_below
from onnxtrain.errors import DataError, OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.value import PASTS, RIGHT_PADDED, Dimension, dimensions
from onnxtrain.losses.base import IgnoredWherePresent, Loss, LossByExample, TargetForm, TargetKind
from onnxtrain.losses.cross_entropy import SoftmaxCrossEntropy
from onnxtrain.metrics.base import NamedMetric
from onnxtrain.metrics.reading import Reading


@dataclass(frozen=True)
class Targets:
    """The targets of a loss on a prediction.

    Attributes:
        declared: The loss as it was given, which leaves the form of the targets open.
        form: What targets are taken for.
        loss: The loss for targets of that form.
        prediction: What the loss is built on.
        value: The algorithm's input for them.
        inputs: Those of the model.
        from_probabilities: Whether the prediction holds probabilities where the loss takes logits.
    """

    declared: Loss
    form: TargetForm
    loss: Loss
    prediction: ir.Value
    value: ir.Value
    inputs: tuple[ir.Value, ...]
    from_probabilities: bool = False

    @property
    def name(self) -> str:
        """The name of the targets in the step graph."""
        return str(self.value.name)

    @cached_property
    def spec(self) -> TensorSpec:
        """Type and shape that the loss requires."""
        spec = tensor_spec(self.value)
        if hint := self.declared.shape_hint:
            return replace(spec, hint=hint, size_hint=hint)
        if len(self.loss.target_kinds) < 2 or spec.dtype.kind == "f":
            return spec
        hint = ' For distributions over classes, say targets="values".'
        return replace(spec, hint=hint, size_hint=self._axis_hint())

    def _axis_hint(self) -> str:
        """Which axis of the logits labels are without, where there is a choice."""
        shape, axis = dimensions(self.prediction), self.form.axis
        if axis is None and isinstance(self.loss, SoftmaxCrossEntropy):
            axis = self.loss.class_axis(wrapped(self.prediction))
        if shape is None or len(shape) < 3 or axis is None:
            return ""
        logits = ", ".join("any" if size is None else str(size) for size in shape)
        return (
            f" Labels have the shape of the logits, ({logits}), without the class axis, here {axis}; for another give "
            "the loss axis=."
        )

    def check_batch_axis(self) -> None:
        """Refuse data sets for a model whose output has the batch elsewhere than in front, as its names tell.

        Raises:
            DataError: The targets have the batch on another axis, too.
        """
        shapes = [dimensions(value) for value in self.inputs]
        batches = {shape[0] for shape in shapes if shape and isinstance(shape[0], str)}
        axes = dimensions(self.value) or ()
        axis = next((axis for axis, size in enumerate(axes) if size in batches), 0)
        if axis and axes[0] not in batches:
            raise DataError(
                f"The output {self.prediction.name!r} has the batch on axis {axis}, and so have its targets, but data "
                "are cut into batches along axis 0; transpose the output in the model, or give whole batches to "
                "train_step."
            )

    def adapt(self, targets: np.ndarray, labels: Sequence[str] | None = None) -> np.ndarray:
        """Targets as the loss takes them, where people have them a little otherwise; see `labels.py`.

        Args:
            targets: Targets, examples first.
            labels: The texts that stand for the classes, where targets are texts.
        """
        shape = self._logits
        if shape is None or not isinstance(self.declared, LossByExample):
            return targets
        if len(self.declared.target_kinds) < 2:
            return as_numbers(targets, shape)
        targets = as_classes(targets, shape, self._class_axis)
        if labels is not None and are_labels(targets, labels, len(shape) - 1):
            return to_indices(targets, labels)
        return targets

    @cached_property
    def _logits(self) -> tuple[Dimension, ...] | None:
        """The shape of the prediction."""
        return dimensions(self.prediction)

    @cached_property
    def _class_axis(self) -> int:
        return self._whole_loss.reading(wrapped(self.prediction), wrapped(self.value)).axis

    @property
    def classes(self) -> int | None:
        """The number of classes, where targets are labels and it is known."""
        return self.declared.classes(wrapped(self.prediction))

    @property
    def take_labels(self) -> bool:
        """Whether targets may be labels of classes."""
        return "indices" in self.declared.target_kinds

    def form_of(self, targets: np.ndarray, sizes: Mapping[str, int]) -> TargetForm:
        """Return the form of targets.

        Args:
            targets: All targets, examples first.
            sizes: What the symbols of the inputs' shapes stand for.
        """
        form = self.declared.form_of(wrapped(self.prediction), targets.dtype, targets.shape, sizes, self.form)
        return replace(form, ignoring=True) if self.hold_ignored(targets) else form

    def form_of_dataset(self, dataset: Dataset, name: str | None = None) -> TargetForm:
        """Return the form of a dataset's targets, or of a named array, without reading the data."""
        targets = dataset.targets if name is None else dataset.values(name)
        form = self.form if targets is None else self.form_of(targets, dataset.sizes)
        if form.kind != "indices" or dataset.size is not None or self._ignored is None:
            return form
        return replace(form, ignoring=True)  # batches that nobody has seen may hold such labels

    def are_classes(self, targets: np.ndarray) -> bool:
        """Whether all of them name a class, so that there is nothing to ignore and nothing to refuse."""
        return self._end is not None and none_negative_below(targets, self._end)

    @cached_property
    def _end(self) -> int | None:
        """The number of classes, where targets are labels."""
        return self.classes if self.form.kind == "indices" else None

    def hold_ignored(self, targets: np.ndarray) -> bool:
        """Whether there are labels to ignore, for which the loss is not built so far."""
        if self.form.ignoring or self._ignored is None or targets.dtype.kind not in "iu":
            return False
        return bool((targets == np.int64(self._ignored)).any())  # a number of Python's must fit the targets' type

    @property
    def _ignored(self) -> int | None:
        """The label that is ignored where data hold it."""
        index = getattr(self.declared, "ignore_index", None)
        return index if isinstance(index, IgnoredWherePresent) else None

    @property
    def _whole_loss(self) -> Loss:
        """The loss with all that it ignores, where data hold it or not: for checks and metrics."""
        return self.declared.with_form(replace(self.form, ignoring=True))

    @cached_property
    def check(self) -> TargetCheck | None:
        """The check of their values."""
        return self._whole_loss.target_check(wrapped(self.prediction), self.form.kind)

    def metrics(self, metrics: Sequence[Any]) -> list[NamedMetric]:
        """Metrics by name, as functions or as objects, told how to read this loss's predictions.

        The loss says what predictions are; a metric for others is refused. Functions of a user's own get the
        model's output.

        Raises:
            OptionError: There is no such metric, or it is for other predictions.
        """
        from onnxtrain.metrics.told import told  # imports all metrics

        return [told(self.reading, metric) for metric in metrics]

    @cached_property
    def reading(self) -> Reading:
        """Return the interpretation of predictions and targets for metrics."""
        reading = self._whole_loss.reading(wrapped(self.prediction), wrapped(self.value))
        return reading._replace(probabilities=self.from_probabilities)


def target_input(loss: Loss, prediction: ir.Value, kind: TargetKind, name: str) -> ir.Value:
    """The input for the targets of a loss.

    Raises:
        OptionError: Their shape cannot be known.
    """
    given = wrapped(prediction)
    shape = loss.target_shape(given, kind)
    if shape is None:
        raise OptionError(f"The rank of {prediction.name!r} is not known; declare its shape in the model.")
    return ir.Value(name=name, type=ir.TensorType(loss.target_dtype(given, kind)), shape=ir.Shape(shape))


def tensor_spec(value: ir.Value) -> TensorSpec:
    """Return the type and shape that data for an input must have.

    Raises:
        OptionError: The input is no tensor.
    """
    if value.dtype is None or not value.name:
        raise OptionError(f"The input {value.name!r} has no tensor type; only tensors can be fed.")
    pasts, right_padded = value.meta.get(PASTS, ()), bool(value.meta.get(RIGHT_PADDED))
    return TensorSpec(value.name, value.dtype.numpy(), dimensions(value), pasts=pasts, right_padded=right_padded)


def wrapped(value: ir.Value, opset: int = 18) -> Value:
    """A value for what only looks at its type and shape."""
    return Builder(ir.Graph([], [], nodes=[]), opset).wrap(value)
