"""An output of a model with the loss that is built on it; a model may have several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.value import is_float
from onnxtrain.losses.base import Loss, LossByExample, TargetForm
from onnxtrain.losses.class_loss import ClassLoss
from onnxtrain.losses.prediction import before_activation, sums_to_one
from onnxtrain.losses.targets import Targets, target_input, wrapped
from onnxtrain.metrics.base import NamedMetric
from onnxtrain.training_info.recipe import LossTerms

Metrics = Any
"""Metrics by name, in a text or a list, or as functions; by output where several have losses."""


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

    @property
    def scaled(self) -> bool:
        """Whether the weight of a batch is not its number of examples times a constant, among losses that are means."""
        loss = self.targets.loss
        return loss.reduction == "sum" or (self.targets.form.kind == "indices" and loss.counts_labels)

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


def are_none(metrics: Metrics) -> bool:
    """Return whether no metric is asked for."""
    return metrics is None or (isinstance(metrics, str | list | tuple | Mapping) and not metrics)


def check_numbers(metrics: Sequence[HeadMetric]) -> None:
    """Refuse metrics whose value is no number, where a row of numbers is written.

    Raises:
        OptionError: One is a table.
    """
    for name, _, metric in metrics:
        if not metric.number:
            raise OptionError(
                f"The metric {name} is a table, which a row of numbers cannot hold; measure it after the training: "
                f"evaluate(data, metrics={metric.name!r})."
            )


class HeadMetric(NamedTuple):
    """A metric of an output.

    Attributes:
        name: The name of its value in results.
        head: The output.
        metric: The metric.
    """

    name: str
    head: Head
    metric: NamedMetric


def metrics_of_heads(heads: Sequence[Head], metrics: Metrics) -> list[HeadMetric]:
    """Metrics by output, told how to read its predictions.

    Raises:
        OptionError: There is no such metric, it is not said whose it is, there is no such output with a loss, or two
            values have one name.
    """
    from onnxtrain.metrics.choice import listed

    if isinstance(metrics, list) and metrics and all(isinstance(metric, HeadMetric) for metric in metrics):
        return metrics
    known = {head.name: head for head in heads}
    if not isinstance(metrics, Mapping):
        metrics = listed(metrics)
        if len(heads) > 1 and metrics:
            raise OptionError(
                f"metrics is {metrics!r}, but several outputs have losses; say whose they are: "
                f"metrics={{{next(iter(known))!r}: {metrics[0]!r}}}."
            )
        metrics = {heads[0].name: metrics}
    found: list[HeadMetric] = []
    for output, given in metrics.items():
        if output not in known:
            raise OptionError(f"metrics has the output {output!r}, but those with losses are {', '.join(known)}.")
        head = known[output]
        for metric in head.targets.metrics(listed(given)):
            name = f"{output}_{metric.name}" if len(heads) > 1 else metric.name
            found.append(HeadMetric(name, head, metric))
    taken = {"loss", *(f"{name}_loss" for name in known if len(heads) > 1)}
    for each in found:
        if each.name in taken:
            raise OptionError(
                f"Two values would be called {each.name!r}; leave one of the metrics out, or give its function another "
                "name (__name__)."
            )
        taken.add(each.name)
    return found
