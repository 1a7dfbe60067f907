"""An output of a model with the loss that is built on it; a model may have several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import is_float
from onnxtrain.training.losses.base import Loss, LossByExample, TargetForm
from onnxtrain.training.losses.class_loss import ClassLoss
from onnxtrain.training.losses.prediction import before_activation, sums_to_one
from onnxtrain.training.losses.targets import Targets, target_input, wrapped
from onnxtrain.training.metrics.base import Collector, Measure
from onnxtrain.training_info.recipe import LossTerms

Metrics = str | Sequence[Any] | Mapping[str, Any]
"""Metrics by name or as functions; by output where several have losses."""


class Head(NamedTuple):
    """An output with a loss on targets.

    Attributes:
        output: The model's output.
        prediction: What the loss is built on: the output, or what a final activation makes it of.
        targets: The loss and its targets.
    """

    output: ir.Value
    prediction: ir.Value
    targets: Targets

    @property
    def name(self) -> str:
        """The name of the output."""
        return str(self.output.name)

    def with_form(self, model: ir.Model, form: TargetForm) -> Head:
        """The same for targets of another form."""
        if form == self.targets.form:
            return self
        return head_of(model, self.output, self.targets.declared, form, self.targets.name)

    def build(self, op: Builder, weights: Value | None) -> LossTerms:
        """Emit the loss, with the weights of examples where there are any."""
        targets, prediction = self.targets, op.wrap(self.prediction)
        if targets.from_probabilities:
            tiny = op.scalar(np.finfo(prediction.dtype.numpy()).tiny, prediction)
            prediction = op.Log(op.Max(prediction, tiny)).with_shape(prediction.shape)
        loss, target = targets.loss, op.wrap(targets.value)
        if weights is None or not isinstance(loss, LossByExample):
            return loss.build(op, prediction, target)
        return loss.build(op, prediction, target, op.cast(weights, prediction.dtype))


def head_of(model: ir.Model, output: ir.Value, declared: Loss, form: TargetForm, name: str) -> Head:
    """An output with a loss for targets of a form, which the step graph calls by this name."""
    graph = model.graph
    inner, axis = before_activation(output, declared.with_form(form))
    if axis is None and form.kind == "indices" and isinstance(declared, ClassLoss):
        axis = declared.only_class_axis(wrapped(inner))
    if axis is not None and form.axis is None:
        form = replace(form, axis=axis)
    loss = declared.with_form(form)
    labelled = any(not is_float(value) for value in graph.outputs)
    targets = Targets(
        declared=declared,
        form=form,
        loss=loss,
        prediction=inner,
        value=target_input(loss, inner, form.kind, name),
        inputs=tuple(graph.inputs),
        from_probabilities=labelled and inner is output and "Softmax" in loss.trains_through and sums_to_one(output),
    )
    return Head(output, inner, targets)


class OutputMeasure(NamedTuple):
    """A metric of one of several outputs."""

    output: str
    measure: Measure

    @property
    def name(self) -> str:
        """The output's and the metric's."""
        return f"{self.output}_{self.measure.name}"

    @property
    def of_output(self) -> bool:
        """Whether it reads the model's output rather than what the loss is built on."""
        return self.measure.of_output

    def start(self) -> Collector:
        """What collects a data set."""
        return self.measure.start()


def metrics_of_heads(heads: Sequence[Head], metrics: Metrics) -> list[Measure]:
    """Metrics by output.

    Raises:
        OptionError: It is not said whose they are, or there is no such output with a loss.
    """
    known = {head.name: head for head in heads}
    if not isinstance(metrics, Mapping):
        listed: list[Any] = [metrics] if isinstance(metrics, str) else list(metrics)
        if all(isinstance(metric, OutputMeasure) for metric in listed):
            return listed
        raise OptionError(
            f"metrics is {metrics!r}, but several outputs have losses; say whose they are: "
            f"metrics={{{next(iter(known))!r}: {listed[0]!r}}}."
        )
    found: list[Measure] = []
    for output, given in metrics.items():
        if output not in known:
            raise OptionError(f"metrics has the output {output!r}, but those with losses are {', '.join(known)}.")
        found += [OutputMeasure(output, measure) for measure in known[output].targets.metrics(given)]
    return found
