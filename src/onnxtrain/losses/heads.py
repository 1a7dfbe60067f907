"""Outputs of a model with the losses built on them: prediction, targets, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.data import TargetCheck, TensorSpec
from onnxtrain.data.labels import (
    are_labels,
    as_classes,
    as_groups,
    as_numbers,
    count_missing,
    is_order_known,
    learn_labels,
    some_labels,
    to_indices,
)
from onnxtrain.data.model_inputs import tensor_spec
from onnxtrain.data.target_checks import none_negative_below
from onnxtrain.errors import DataError, OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, dimensions, is_float
from onnxtrain.losses.base import (
    ClassLoss,
    IgnoredWherePresent,
    Loss,
    LossByExample,
    ScoreLoss,
    TargetForm,
    TargetKind,
    class_axis,
    weighted,
)
from onnxtrain.losses.cross_entropy import NextToken, SoftmaxCrossEntropy
from onnxtrain.losses.probabilities import Scores
from onnxtrain.lowering.logits import find_head
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput, NamedMetric, of_present
from onnxtrain.runtime.failures import require_shape


def named_output(graph: ir.Graph, name: str | None) -> ir.Value:
    """Return the output of the loss: the one of this name, by default the first floating one."""
    outputs = list(graph.outputs)
    if name is not None:
        found = [value for value in outputs if value.name == name]
        if not found:
            raise OptionError(f"output={name!r}, but the outputs are {', '.join(str(v.name) for v in outputs)}.")
    else:
        found = [value for value in outputs if is_float_tensor(value)]
    if not found or not is_float_tensor(found[0]):
        raise OptionError("The model has no floating output to build a loss on; name one with output=.")
    return found[0]


def is_float_tensor(value: ir.Value) -> bool:
    """Return whether a value is a floating tensor, not a sequence or an optional."""
    return is_float(value) and not isinstance(value.type, ir.SequenceType | ir.OptionalType)


REAL_ROWS = "real_examples"
"""Symbol of the batch axis of targets without those of a padding, whose loss reads as many first rows."""


def _read_by(loss: Loss, output: ir.Value, scores: Scores) -> tuple[ir.Value, int | None, bool | None]:
    """Return what a loss reads, logits where they are reached, with the class axis and whether it holds logits."""
    if loss.probabilities is None or loss.from_logits is True:
        return output, None, loss.from_logits
    by_class, axis = loss.probabilities == "distribution", scores.axis
    rank = len(dimensions(output) or ())
    wanted = getattr(loss, "axis", class_axis(rank))  # None where the loss infers it
    fits = not by_class or (axis is not None and (wanted is None or (rank and wanted % rank == axis)))
    if scores.kind in (None, "logits") or not fits:
        return output, None, loss.from_logits is not False
    axis = axis if by_class else None
    if scores.logits is not None and scores.activation == ("Softmax" if by_class else "Sigmoid"):
        return scores.logits, axis, True
    return output, axis, scores.are_logarithms


@dataclass(frozen=True, eq=False)
class LossHead:
    """An output of the model with the loss on it, for targets of one form."""

    output: ir.Value
    declared: Loss
    form: TargetForm
    loss: Loss
    prediction: ir.Value
    target: ir.Value
    inputs: tuple[ir.Value, ...]
    scores: Scores

    @cached_property
    def name(self) -> str:
        """Name of the output."""
        return str(self.output.name)

    @cached_property
    def target_name(self) -> str:
        """Name of the targets in the step graph."""
        return str(self.target.name)

    @cached_property
    def spec(self) -> TensorSpec:
        """Type and shape of targets that the loss requires."""
        spec = replace(tensor_spec(self.target), may_miss=self.form.missing)
        if hint := self.declared.shape_hint:
            return replace(spec, hint=hint, size_hint=hint)
        if len(self.loss.target_kinds) < 2 or spec.dtype.kind == "f":
            return spec
        hint = ' For distributions over classes, say targets="values".'
        return replace(spec, hint=hint, size_hint=self._axis_hint())

    def _axis_hint(self) -> str:
        """Name the class axis, where the logits leave a choice."""
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

    @cached_property
    def compared(self) -> dict[int, int]:
        """Axes of the targets whose sizes only a step can check, with the axes of the prediction that have them."""
        known = dimensions(self.prediction) or ()
        symbols = [f"axis {axis}" for axis in range(len(known))]
        sizes = [size if isinstance(size, int) else name for size, name in zip(known, symbols, strict=True)]
        free = ir.Value(name=self.prediction.name, type=self.prediction.type, shape=ir.Shape(sizes))
        wanted = self.loss.target_shape(wrapped(free), self.form.kind) or ()
        inputs = [shape for value in self.inputs if (shape := dimensions(value))]
        first, later = {shape[0] for shape in inputs}, {size for shape in inputs for size in shape[1:]}
        return {
            axis: symbols.index(size)
            for axis, (size, own) in enumerate(zip(wanted, dimensions(self.target) or (), strict=True))
            if size in symbols and own != REAL_ROWS and (own is None or own not in (later if axis else first))
        }

    def checked(self, target: Value, prediction: Value) -> Value:
        """Emit the targets, refusing in the step other sizes than those of the prediction, which might broadcast."""
        if not self.compared:
            return target
        op = target.op
        if getattr(self.loss, "chunk", None) is not None and (head := find_head(prediction.ir)) is not None:
            rows = op.wrap(head.rows[0])  # the logits themselves are computed in chunks
            prediction = rows if rows.rank == prediction.rank else prediction
        sizes = [
            op.Shape(prediction, start=other, end=other + 1)
            if (other := self.compared.get(axis)) is not None
            else op.Shape(target, start=axis, end=axis + 1)
            for axis in range(len(dimensions(self.target) or ()))
        ]
        return require_shape(
            target,
            op.Concat(*sizes, axis=0) if len(sizes) > 1 else sizes[0],
            f"{self.target_name!r} does not have the sizes of the prediction {self.prediction.name!r}.",
            may_differ=len(self.compared),
        )

    def check_batch_axis(self, axis: int | None) -> None:
        """Refuse data sets for a model whose output, and so its targets, have the batch on another axis than 0."""
        shape, own = dimensions(self.prediction), dimensions(self.target)
        if not axis or shape is None or own is None:
            return
        if isinstance(self.loss, ClassLoss) and len(own) == len(shape) - 1:
            moved = axis - (self._class_axis < axis)
        else:
            moved = axis if own == shape else 0  # other targets have a form of their own, examples first
        if moved:
            raise DataError(
                f"The output {self.prediction.name!r} has the batch on axis {axis}, and so have its targets, but data "
                "are cut into batches along axis 0; transpose the output in the model, or give whole batches to "
                "train_step."
            )

    def adapt(self, targets: np.ndarray, labels: Sequence[str] | None = None) -> np.ndarray:
        """Convert targets from other common layouts to the loss's; see :mod:`onnxtrain.data.labels`."""
        shape = self._logits
        if shape is None or not isinstance(self.declared, LossByExample):
            return targets
        if self.declared.equal_labels:
            return as_groups(targets)
        missing: int | None = getattr(self.declared, "ignore_index", None)
        if self.declared.predicts == "classes" or len(self.declared.target_kinds) > 1:
            targets, rank = as_classes(targets, shape, self._class_axis, missing), len(shape) - 1
        else:
            targets, rank = as_numbers(targets, shape), -1  # numbers are values
        if labels is not None and are_labels(targets, labels, rank):
            return to_indices(targets, labels, np.nan if self.asks else missing)
        return targets

    @cached_property
    def _logits(self) -> tuple[Dimension, ...] | None:
        return dimensions(self.prediction)

    @cached_property
    def _class_axis(self) -> int:
        return self._whole_loss.metric_input(wrapped(self.prediction), wrapped(self.target)).axis

    @property
    def classes(self) -> int | None:
        """Number of classes of targets that are labels; ``None`` where it is not known."""
        return 2 if self.asks else self.declared.classes(wrapped(self.prediction))

    @property
    def asks(self) -> bool:
        """True where targets answer yes-or-no questions, as two labels do."""
        return self.declared.predicts == "binary" and "indices" not in self.declared.target_kinds

    @property
    def take_labels(self) -> bool:
        """True where targets may be class labels, whose order counts."""
        return self.asks or ("indices" in self.declared.target_kinds and not self.declared.equal_labels)

    def learn_labels(self, targets: np.ndarray, orders: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """Return the text labels of targets in the order of their classes."""
        labels, shape = learn_labels(targets, None if self.asks else self.classes, orders), self._logits or (1,)
        if self.declared.ordered and not is_order_known(labels, orders):
            raise DataError(
                f"the targets are the labels {some_labels(labels)}, whose order the loss {self.declared.name} learns; "
                f"set it first, trainer.labels = [lowest, ..., highest], or give numbers, 0 to {len(labels) - 1}."
            ).about("targets", got=labels)
        if self.asks and (len(labels) > 2 or (targets.ndim < len(shape) and shape[-1] != 1)):
            one = "one yes-or-no question, which two labels answer"
            asked = one if shape[-1] == 1 or len(shape) < 2 else f"{shape[-1]} yes-or-no questions per example"
            raise DataError(
                f"the targets are the labels {some_labels(labels)}, but the loss {self.declared.name} asks {asked}; "
                f"give the model {len(labels)} classes (--new-head {len(labels)}) and the loss softmax_cross_entropy."
            ).about("targets", got=labels, wanted=2)
        return labels

    def form_of(self, targets: np.ndarray, sizes: Mapping[str, int]) -> TargetForm:
        """Return the form of targets."""
        form = self.declared.form_of(wrapped(self.prediction), targets.dtype, targets.shape, sizes, self.form)
        if self.hold_ignored(targets):
            return replace(form, missing=True) if targets.dtype.kind == "f" else replace(form, ignoring=True)
        return form

    def form_of_data(self, targets: np.ndarray | None, sizes: Mapping[str, int], *, whole: bool) -> TargetForm:
        """Return the form of the targets of a dataset, given all of them or the first ones."""
        form = self.form if targets is None else self.form_of(targets, sizes)
        if form.kind != "indices" or whole or self._ignored is None:
            return form
        return replace(form, ignoring=True)  # later batches may contain ignored labels

    def are_classes(self, targets: np.ndarray) -> bool:
        """Return whether all targets are valid class labels: none to ignore, none to refuse."""
        return self._end is not None and none_negative_below(targets, self._end)

    @cached_property
    def _end(self) -> int | None:
        return self.classes if self.form.kind == "indices" else None

    def hold_ignored(self, targets: np.ndarray) -> bool:
        """Return whether targets contain ignored labels, or missing values, that the current loss does not handle."""
        if targets.dtype.kind == "f":
            return self.declared.elementwise and not self.form.missing and bool(np.isnan(targets).any())
        if self.form.ignoring or self._ignored is None or targets.dtype.kind not in "iu":
            return False
        return bool((targets == np.int64(self._ignored)).any())  # a Python int would have to fit the targets' type

    def check_some_counted(self, labels: np.ndarray, what: str) -> None:
        """Refuse data whose labels are all ignored."""
        loss = self._whole_loss
        are_labels = labels.dtype.kind in "iu" and self.form.kind == "indices"
        if are_labels and isinstance(loss, ClassLoss) and loss.ignores_all(labels):
            raise DataError(no_labels_left(what, loss))

    @property
    def _ignored(self) -> int | None:
        index = getattr(self.declared, "ignore_index", None)
        return index if isinstance(index, IgnoredWherePresent) else None

    @property
    def _whole_loss(self) -> Loss:
        """The loss with its ignored label, whether or not the data contain it: for checks and metrics."""
        return self.declared.with_form(replace(self.form, ignoring=True))

    @cached_property
    def check(self) -> TargetCheck | None:
        """Check of the targets' values."""
        return self._whole_loss.target_check(wrapped(self.prediction), self.form.kind)

    def metrics(self, metrics: Sequence[Any]) -> list[NamedMetric]:
        """Resolve metrics given by name, as functions or as objects, for the predictions of this loss."""
        from onnxtrain.metrics.choice import metric_for_loss  # imports all metrics

        return [metric_for_loss(self.metric_input, metric) for metric in metrics]

    @cached_property
    def metric_input(self) -> MetricInput:
        """Meaning of predictions and targets for metrics."""
        metric_input = self._whole_loss.metric_input(wrapped(self.prediction), wrapped(self.target))
        return metric_input._replace(probabilities=self.loss.from_logits is False)

    @property
    def scaled(self) -> bool:
        """True where the weight of a batch is not proportional to its number of examples, or the loss is a sum."""
        counted = self.form.kind == "indices" and self.loss.counts_labels
        return self.loss.reduction == "sum" or counted or self.form.missing

    def label_weight(self, targets: np.ndarray) -> float:
        """Return the weight of the targets of a batch, up to a factor common to all batches."""
        return float(targets.size - count_missing(targets)) if self.form.missing else self.loss.label_weight(targets)

    def with_form(self, model: ir.Model, form: TargetForm) -> LossHead:
        """Return the head for targets of another form."""
        if form == self.form:
            return self
        gathered = self.prediction if self.declared.gathers else None
        return head_of(model, self.output, self.declared, form, self.target_name, self.scores, gathered)

    @property
    def assumes_logits(self) -> bool:
        """True where the output is taken for logits, although neither the loss nor the nodes say so."""
        assumed = self.declared.from_logits is None and self.loss.from_logits is True
        return assumed and self.prediction is self.output and self.scores.kind in (None, "independent", "distribution")

    def doubts(self, scores: np.ndarray) -> list[str]:
        """Return a hint about scores of a batch that are taken for logits, but look like probabilities."""
        loss = self.loss
        inside = scores.size and bool((scores >= 0).all() and (scores <= 1).all() and scores.any())
        if not self.assumes_logits or not inside:
            return []
        if by_class := loss.probabilities == "distribution":
            axis = getattr(loss, "axis", None)
            sums = scores.astype(np.float64).sum(self._class_axis if axis is None else axis)
            if not (np.abs(sums - 1) <= 2e-2).all():  # also of 8 bits
                return []
        found = "rows of values from 0 to 1 that sum to 1" if by_class else "values from 0 to 1"
        return [
            f"The output {self.name!r} holds {found}, but its nodes do not prove that they are probabilities: the loss "
            f"{loss.name} takes them as logits. If they are probabilities, give the loss from_logits=False, as in "
            f"'{loss.name}(from_logits=False)'; from_logits=True keeps them as logits without this hint."
        ]

    def build(self, op: Builder, weights: Value | None) -> LossTerms:
        """Emit the loss, with weights of examples if given."""
        loss, prediction = self.loss, op.wrap(self.prediction)
        target = self.checked(op.wrap(self.target), prediction)
        if not isinstance(loss, LossByExample):
            return loss.build(op, prediction, target)
        weights = None if weights is None else op.cast(weights, prediction.dtype)
        if not self.form.missing:
            return loss.build(op, prediction, target, *([] if weights is None else [weights]))
        present = op.Not(op.IsNaN(target)).with_shape(target.shape)
        mask = op.cast(present, prediction.dtype).with_shape(target.shape)
        factors = mask if weights is None else weighted(op, mask, weights)
        terms = loss.build(op, prediction, op.Where(present, target, op.ones_like(target)), factors)
        whole = op.ReduceSum(op.cast(present, ir.DataType.INT64), keepdims=0)  # a sum of 16-bit ones ends at 2048
        count = op.cast(whole, prediction.dtype).with_shape(())
        return terms._replace(loss=(terms.loss * (terms.weight / op.Max(count, 1.0))).with_shape(()), weight=count)


def no_labels_left(what: str, loss: Loss) -> str:
    """Return the sentence of an error for data whose labels are all ignored."""
    index, first = getattr(loss, "ignore_index", None), isinstance(loss, NextToken)
    besides = "; the first label of a row, which has no prediction before it, does not count" if first else ""
    return (
        f"{what} has no label that the loss {loss.name} compares with a prediction: all are {index}, which is ignored"
        f"{besides}."
    )


def target_input(loss: Loss, prediction: ir.Value, kind: TargetKind, name: str) -> ir.Value:
    """Create the input for the targets of a loss."""
    given = wrapped(prediction)
    shape = loss.target_shape(given, kind)
    if shape is None:
        raise OptionError(f"The rank of {prediction.name!r} is not known; declare its shape in the model.")
    return ir.Value(name=name, type=ir.TensorType(loss.target_dtype(given, kind)), shape=ir.Shape(shape))


def wrapped(value: ir.Value, opset: int = 18) -> Value:
    """Wrap a value for code that reads only its type and shape."""
    return Builder(ir.Graph([], [], nodes=[]), opset).wrap(value)


Metrics = Any
"""Metrics by name, in a text or a list, or as functions; a mapping by output for several losses."""


def head_of(
    model: ir.Model,
    output: ir.Value,
    declared: Loss,
    form: TargetForm,
    name: str,
    scores: Scores,
    gathered: ir.Value | None = None,
) -> LossHead:
    """Build the head of an output for targets of a form."""
    if declared.gathers:
        inner, axis, from_logits = gathered or declared.gather(model, output), None, None
    else:
        inner, axis, from_logits = _read_by(declared.with_form(form), output, scores)
    if axis is None and form.kind == "indices" and isinstance(declared, ClassLoss):
        axis = declared.axis_of_graph(wrapped(inner))
    if axis is not None and form.axis is None:
        form = replace(form, axis=axis)
    loss = declared.with_form(form)
    if isinstance(loss, ScoreLoss) and loss.probabilities is not None:
        loss = replace(loss, from_logits=from_logits)
    return LossHead(
        output=output,
        declared=declared,
        form=form,
        loss=loss,
        prediction=inner,
        target=target_input(loss, inner, form.kind, name),
        inputs=tuple(model.graph.inputs),
        scores=scores,
    )


def are_none(metrics: Metrics) -> bool:
    """Return whether no metric is requested."""
    return metrics is None or (isinstance(metrics, str | list | tuple | Mapping) and not metrics)


def check_numbers(metrics: Sequence[HeadMetric]) -> None:
    """Refuse metrics whose value is not a number, where a row of numbers is written."""
    for name, _, metric in metrics:
        if not metric.number:
            raise OptionError(
                f"The metric {name} is a table, which a row of numbers cannot hold; measure it after the training: "
                f"evaluate(data, metrics={metric.name!r})."
            ).about(name)


class HeadMetric(NamedTuple):
    """A metric of an output."""

    name: str
    head: LossHead
    metric: NamedMetric


def metrics_of_heads(heads: Sequence[LossHead], metrics: Metrics) -> list[HeadMetric]:
    """Resolve metrics for the predictions of their outputs."""
    from onnxtrain.metrics.choice import listed

    if isinstance(metrics, list) and metrics and all(isinstance(metric, HeadMetric) for metric in metrics):
        return metrics
    known = {head.name: head for head in heads}
    if not isinstance(metrics, Mapping):
        metrics = listed(metrics)
        if len(heads) > 1 and metrics:
            raise OptionError(
                f"metrics is {metrics!r}, but several outputs have losses; give metrics by output: "
                f"metrics={{{next(iter(known))!r}: {metrics[0]!r}}}."
            )
        metrics = {heads[0].name: metrics}
    found: list[HeadMetric] = []
    for output, given in metrics.items():
        if output not in known:
            raise OptionError(f"metrics has the output {output!r}, but outputs with losses are {', '.join(known)}.")
        head = known[output]
        for metric in head.metrics(listed(given)):
            name = f"{output}_{metric.name}" if len(heads) > 1 else metric.name
            found.append(HeadMetric(name, head, of_present(metric) if head.form.missing else metric))
    taken = {"loss", *(f"{name}_loss" for name in known if len(heads) > 1)}
    for each in found:
        if each.name in taken:
            raise OptionError(
                f"Two values would be called {each.name!r}; leave one of the metrics out, or give its function another "
                "name (__name__)."
            ).about(each.name)
        taken.add(each.name)
    return found
