"""Temperature scaling: divide the logits of a classifier by one number, so that its probabilities are calibrated."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.data.conversion import Array
from onnxtrain.data.naming import TargetNames
from onnxtrain.editing.working import Model, Working
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.builder import Builder
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.metrics.base import LossMetric, MetricInput, NamedMetric, extended
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.inference.forward import evaluate
from onnxtrain.training.trainer import Trainer

_PASSING = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Log", "Cast"})
"""Operators between the activation of a classifier and its output."""

_OF_CLASSES = ("Softmax", "LogSoftmax")

_LOWEST = 1e-6
"""Least temperature: below it, no held-out example is wrong."""


@dataclass(frozen=True)
class Calibrated:
    """A model whose logits are divided by a temperature.

    Attributes:
        temperature: What the logits are divided by: above 1 for a model that was too sure.
        loss: The cross-entropy of the held-out data before.
        calibrated_loss: The cross-entropy after.
        model: The model with the division.
    """

    temperature: float
    loss: float
    calibrated_loss: float
    model: onnx.ModelProto

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model."""
        ModelFile.load(self.model).save(path, {})


@checks_arguments
def calibrate(
    model: Model | Trainer,
    data: Any,
    y: Any = None,
    *,
    target: TargetNames | None = None,
    loss: LossLike = "softmax_cross_entropy",
) -> Calibrated:
    """Fit the temperature of a classifier on held-out data; return a model whose logits are divided by it.

    The temperature minimizes the cross-entropy; predicted classes stay the same. Logits are the output, or what the
    Softmax or Sigmoid before it reads; both are divided where both are outputs.

    Args:
        model: A path, a loaded model or a trainer; it is not changed.
        data: Held-out data in any form that ``fit`` takes; with ``y`` the inputs alone.
        y: The labels, where ``data`` has none.
        target: The name of the labels in a table, as in ``fit``.
        loss: The loss of a model; a trainer has its own. ``"binary_cross_entropy"`` for yes-or-no questions.

    Raises:
        OptionError: The output has no logits of classes, or no temperature is best: the logits are NaN, say nothing
            about the labels, or are right on all held-out data.

    Example:
        >>> import onnxtrain
        >>> x, y = onnxtrain.examples.points()
        >>> model = onnxtrain.examples.mlp((4, 16, 3))
        >>> trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.01)")
        >>> history = trainer.fit(x[:100], y[:100], epochs=20, progress=False)
        >>> calibrated = onnxtrain.calibrate(trainer, x[100:], y[100:])
        >>> calibrated.calibrated_loss <= calibrated.loss
        True
    """
    source = data if y is None else (data, y)
    measure = [LossMetric(_scaling)]
    if isinstance(model, Trainer):
        found = model.evaluate(source, target=target, metrics=measure)
        heads = model.objective.heads
        name, proto = model.objective.only_output, model.model()
        if len(heads) != 1:
            raise OptionError("calibrate needs one loss on classes; make a trainer with the loss of one output.")
    else:
        found = evaluate(model, source, target=target, loss=loss, metrics=measure)
        name, proto = None, model
    if not isinstance(found["temperature"], tuple):
        raise OptionError("The logits of the held-out data are NaN; no temperature calibrates them.")
    temperature, before, after, activations = found["temperature"]
    return Calibrated(temperature, before, after, _divided(proto, name, temperature, activations))


def _scaling(given: MetricInput) -> NamedMetric:
    """Return the metric that fits the temperature to the logits of all examples."""
    if given.predicts not in ("classes", "binary") or given.probabilities or given.later:
        raise OptionError(f"calibrate needs logits of classes, which the loss {given.loss} does not read.")

    def rows(y_true: Array, y_pred: Array) -> list[tuple[Array, Array]]:
        """Return the logits [M, C] of what counts, and their labels as distributions."""
        scores = y_pred.astype(np.float64)
        if given.predicts == "binary":
            scores, yes = scores.reshape(-1, 1), y_true.reshape(-1, 1).astype(np.float64)
            return [(np.concatenate([np.zeros_like(scores), scores], 1), np.concatenate([1 - yes, yes], 1))]
        scores = np.moveaxis(scores, given.axis, -1)
        count = scores.shape[-1]
        if y_true.ndim == y_pred.ndim and y_true.dtype.kind == "f":
            return [(scores.reshape(-1, count), np.moveaxis(y_true, given.axis, -1).reshape(-1, count))]
        labels = y_true.reshape(-1)
        kept = labels != given.ignore_index
        return [(scores.reshape(-1, count)[kept], np.eye(count)[labels[kept]])]

    def fit(parts: list[tuple[Array, Array]]) -> tuple[float, float, float, Mapping[str, int | None]]:
        scores, targets = (np.concatenate(each) for each in zip(*parts, strict=True))
        temperature = _best(scores, targets)
        after = _entropy(scores / temperature, targets)
        classes = given.predicts == "classes"
        activations: Mapping[str, int | None] = dict.fromkeys(_OF_CLASSES, given.axis) if classes else {"Sigmoid": None}
        return temperature, _entropy(scores, targets), after, activations

    return NamedMetric("temperature", rows, extended, fit, number=False, counted=given.counted)


def _entropy(scores: Array, targets: Array) -> float:
    """Cross-entropy of logits [M, C] and distributions [M, C]."""
    shifted = scores - scores.max(1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(1)) * targets.sum(1) - (shifted * targets).sum(1)).mean())


def _best(scores: Array, targets: Array) -> float:
    """Minimize the cross-entropy of scores / T, which is convex in 1 / T, by Newton steps between bounds."""
    factor, low, high = 1.0, 0.0, math.inf
    for _ in range(200):
        shares = np.exp(factor * (scores - scores.max(1, keepdims=True)))
        shares /= shares.sum(1, keepdims=True)
        means = (shares * scores).sum(1)
        slope = float((means * targets.sum(1) - (scores * targets).sum(1)).mean())
        curve = float((((shares * scores**2).sum(1) - means**2) * targets.sum(1)).mean())
        low, high = (low, factor) if slope > 0 else (factor, high)
        step = factor - slope / curve if curve > 0 else math.nan
        if not low < step < high:
            step = 2 * factor if high == math.inf else (low + high) / 2
        if abs(step - factor) <= 1e-12 * factor or not _LOWEST < step < 1 / _LOWEST:
            break
        factor = step
    if not _LOWEST * 2 < factor < 0.5 / _LOWEST:
        reason = "say nothing about the labels" if factor < 1 else "are right for all held-out data"
        raise OptionError(f"The logits {reason}, so that no temperature is best; give data on which some are wrong.")
    return 1 / factor


def _divided(
    model: Model, output: str | None, temperature: float, activations: Mapping[str, int | None]
) -> onnx.ModelProto:
    """Return the model with its logits divided by a temperature, in front of activations and as outputs."""
    working = Working(model)
    end = working.output(output)
    node = end.producer()
    while node is not None and node.op_type in _PASSING and node.inputs[0] is not None and not node.domain:
        node = node.inputs[0].producer()

    def activates(reader: ir.Node) -> bool:
        """Return whether a node makes the probabilities that the loss reads, along its class axis."""
        axis, logits = activations.get(reader.op_type), reader.inputs[0]
        rank = 0 if logits is None or logits.shape is None else len(logits.shape)
        along = axis is None or not rank or reader.attributes.get_int("axis", -1) % rank == axis % rank
        return reader.op_type in activations and along

    activated = node is not None and activates(node)
    value = node.inputs[0] if node is not None and activated else end
    assert value is not None
    assert value.dtype is not None
    op = Builder(working.graph, working.opset)
    number = np.asarray(temperature).astype(value.dtype.numpy())
    divisor = working.initializer(working.free_name("temperature"), number, value.dtype)
    readers = [reader for reader in value.consumers() if activates(reader)]
    scaled = op.Div(op.wrap(value), op.wrap(divisor)).ir
    scaled.type, scaled.shape = value.type, value.shape
    for reader in readers:  # of one model, whether its output is logits, probabilities or both
        reader.replace_input_with(0, scaled)
    if value.is_graph_output():
        name, value.name = value.name, working.free_name(f"{value.name}_uncalibrated")
        scaled.name = name
        working.graph.outputs[list(working.graph.outputs).index(value)] = scaled
    working.graph.sort()
    return working.finish()
