"""What is trained: a model made ready for a loss: prediction, target, modes, parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.model.file import ModelFile
from onnxtrain.model.modes import train_batch_norm, train_dropout
from onnxtrain.model.parameters import Initializer, parameter_table
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.data import Dataset, TensorSpec
from onnxtrain.training.losses import (
    LOSSES,
    BinaryCrossEntropy,
    CustomLoss,
    Loss,
    LossTerms,
    SoftmaxCrossEntropy,
    TargetKind,
    examples,
)
from onnxtrain.training.metrics import NamedMetric, resolve_metric
from onnxtrain.training.model_loss import ModelLoss
from onnxtrain.training_info.recipe import Clipping, Names, Recipe

LossLike = str | Loss | Callable[[Builder, Value, Value], Value] | os.PathLike[str]


@dataclass(frozen=True)
class Modes:
    """How layers that behave differently in training are run.

    Attributes:
        batch_norm: "frozen" as the graph has it, or "train": batch statistics, running ones written back.
        dropout: Whether Dropout nodes drop.
        seed: Seed of the dropout masks.
    """

    batch_norm: str = "frozen"
    dropout: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_norm not in ("frozen", "train"):
            raise OptionError(f"batch_norm is {self.batch_norm!r}; it is 'frozen' or 'train'.")


@dataclass
class Subject:
    """A model with the loss that it is trained on.

    Attributes:
        model: Working copy of the main graph in training mode, with shapes.
        loss: The loss; ``None`` where an output of the model is the loss.
        prediction: What the loss is built on (or the output that is the loss).
        target: The algorithm's input for targets, or ``None``.
        table: All initializers, trainable or not.
        statistics: Initializers of running statistics, to the values that replace them.
        from_probabilities: Whether the prediction holds probabilities where the loss takes logits.
        options: How gradients are built.
    """

    model: ir.Model
    loss: Loss | None
    prediction: ir.Value
    target: ir.Value | None
    table: list[Initializer]
    statistics: dict[str, str] = field(default_factory=dict)
    from_probabilities: bool = False
    options: GradientOptions = field(default_factory=GradientOptions)

    @property
    def parameters(self) -> list[str]:
        """Names of what is trained."""
        return [row.name for row in self.table if row.trainable]

    def recipe(self, optimizer: Optimizer, clipping: Clipping, *, accumulate: bool) -> Recipe:
        """All that the training model of this subject is made from.

        Raises:
            OptionError: There is nothing to train; the message says why.
        """
        if not self.parameters:
            reasons = "; ".join(f"{row.name!r}: {row.reason}" for row in self.table[:5])
            raise OptionError(f"The model has no trainable parameter: {reasons or 'it has no initializers'}.")
        names = Names.beside(self.model.graph)
        if self.target is not None:
            self.target.name = names.target
        return Recipe(
            model=self.model,
            build_loss=self.build_loss,
            target=self.target,
            parameters=self.parameters,
            optimizer=optimizer,
            clipping=clipping,
            accumulate=accumulate,
            statistics=self.statistics,
            names=names,
            options=self.options,
        )

    @property
    def target_spec(self) -> TensorSpec | None:
        """What targets must be; ``None`` where the loss needs none."""
        if self.target is None:
            return None
        spec = tensor_spec(self.target)
        if self.loss is None or len(self.loss.target_kinds) < 2 or spec.dtype.kind == "f":
            return spec
        return replace(spec, hint=' For distributions over classes, say targets="values".')

    def kind_of(self, dataset: Dataset) -> TargetKind | None:
        """What the targets of a dataset are; ``None`` where it does not tell, or the loss takes one kind only."""
        targets = dataset.targets
        return None if targets is None else self.target_kind(targets.dtype, targets.ndim)

    def target_kind(self, dtype: np.dtype[Any], rank: int) -> TargetKind | None:
        """What targets of this type and rank are; ``None`` where the loss takes one kind only."""
        if self.loss is None or len(self.loss.target_kinds) < 2:
            return None
        one_hot = self.prediction.shape is not None and rank == len(self.prediction.shape)
        return "values" if dtype.kind == "f" or one_hot else "indices"

    def validate(self, dataset: Dataset, *, labels: bool) -> None:
        """Refuse NaN, infinity and, where the dataset has targets, labels that name no class.

        Raises:
            DataError: The data holds such a value.
        """
        loss, target = self.loss, self.target
        if not labels or loss is None or target is None or target.dtype is None or not target.dtype.is_integer():
            dataset.validate()
            return
        prediction = Builder(ir.Graph([], [], nodes=[]), 18).wrap(self.prediction)
        dataset.validate(classes=loss.classes(prediction), ignore_index=getattr(loss, "ignore_index", None))

    def resolve_metrics(self, metrics: Sequence[Any]) -> list[NamedMetric]:
        """Metrics by name or as functions, told how to read this model's predictions.

        Predictions are logits where the loss takes logits: a single one says yes above 0, not above 0.5. Classes
        lie on the loss's class axis, and labels that it ignores do not count.

        Raises:
            OptionError: There is no such metric, or there are no targets to compare with.
        """
        if metrics and self.target is None:
            raise OptionError(
                "metrics compare predictions with targets, which this loss does not take; leave them out."
            )
        options: dict[str, dict[str, Any]] = {}
        if isinstance(self.loss, BinaryCrossEntropy):
            options["accuracy"] = {"threshold": 0.0}
        elif isinstance(self.loss, SoftmaxCrossEntropy):
            prediction = Builder(ir.Graph([], [], nodes=[]), 18).wrap(self.prediction)
            reading = {"axis": self.loss.class_axis(prediction), "ignore_index": self.loss.ignore_index}
            options = {"accuracy": reading, "softmax_cross_entropy": reading}
        return [resolve_metric(m, **(options.get(m, {}) if isinstance(m, str) else {})) for m in metrics]

    def build_loss(self, op: Builder) -> LossTerms:
        """Emit the loss beside the model."""
        prediction = op.wrap(self.prediction)
        if self.loss is None:
            scalar = prediction if prediction.rank == 0 else op.reshape(prediction, op.ints()).with_shape(())
            return LossTerms(scalar, _batch_size(op, self.model.graph, prediction))
        assert self.target is not None
        if self.from_probabilities:
            tiny = op.scalar(np.finfo(prediction.dtype.numpy()).tiny, prediction)
            prediction = op.Log(op.Max(prediction, tiny)).with_shape(prediction.shape)
        return self.loss.build(op, prediction, op.wrap(self.target))


def _batch_size(op: Builder, graph: ir.Graph, like: Value) -> Value:
    for value in graph.inputs:
        shape = dimensions(value)
        if shape:
            return op.cast(examples(op, op.wrap(value)), like.dtype)
    return op.scalar(1, like)


def resolve_loss(loss: LossLike) -> Loss | str:
    """The loss object for what a user gives; ``"output:NAME"`` gives the name of the output.

    Raises:
        OptionError: There is no such loss.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, (str, os.PathLike)):
        text = str(loss)
        if text.startswith("output:"):
            return text.removeprefix("output:")
        if text in LOSSES:
            return LOSSES[text]()
        if text.endswith(".onnx"):
            return ModelLoss(Path(text))
        raise OptionError(
            f"There is no loss {text!r}; use {', '.join(LOSSES)}, output:NAME for a scalar output of the model, "
            "or the path of an ONNX model of (prediction, target)."
        )
    if callable(loss):
        return CustomLoss(loss)
    raise OptionError(f"A loss is a name, a Loss, a path or a function, not a {type(loss).__name__}.")


def prepare(
    file: ModelFile,
    loss: LossLike,
    *,
    output: str | None = None,
    target_kind: TargetKind | None = None,
    target_name: str = "target",
    modes: Modes | None = None,
    train: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    options: GradientOptions | None = None,
    table: list[Initializer] | None = None,
) -> Subject:
    """Make a model ready for training on a loss.

    Args:
        file: The user's model.
        loss: What to minimise.
        output: Name of the output that the loss is built on; by default the first floating one.
        target_kind: Class indices or values; by default what the loss prefers.
        target_name: Name of the target input.
        modes: Batch normalization and dropout.
        train: Patterns of what to train.
        freeze: Patterns of what not to train.
        options: How gradients are built.
        table: The initializers, where they have been sorted before; then their values are not read.

    Raises:
        OptionError: An unknown loss or output, a pattern that matches nothing, nothing to train.
    """
    modes = modes or Modes()
    model = infer_shapes(file.training_model())
    statistics = train_batch_norm(model) if modes.batch_norm == "train" else {}
    if modes.dropout:
        train_dropout(model, modes.seed)
    if statistics or modes.dropout:
        infer_shapes(model)
    resolved = resolve_loss(loss)
    if isinstance(resolved, str):
        prediction = _loss_output(model.graph, resolved)
        subject = Subject(model, None, prediction, None, [], statistics)
    else:
        prediction, probabilities = _prediction(model.graph, resolved, output)
        kind = target_kind or resolved.target_kinds[0]
        if kind not in resolved.target_kinds:
            raise OptionError(f"The loss {resolved.name} takes targets as {resolved.target_kinds[0]}, not {kind}.")
        target = _target(resolved, prediction, kind, target_name)
        subject = Subject(model, resolved, prediction, target, [], statistics, probabilities)
    subject.options = options or GradientOptions()
    subject.table = _table(subject, train, freeze) if table is None else table
    return subject


def _table(
    subject: Subject, train: str | Sequence[str] | None, freeze: str | Sequence[str] | None
) -> list[Initializer]:
    """Sort the initializers on a copy: the search expands functions, and the main graph keeps them."""
    copy = subject.model.clone()
    values = {output.name: output for node in copy.graph for output in node.outputs}
    values |= {value.name: value for value in copy.graph.inputs}
    return parameter_table(
        copy,
        values[subject.prediction.name],
        train=train,
        freeze=freeze,
        straight_through=subject.options.straight_through,
    )


def _loss_output(graph: ir.Graph, name: str) -> ir.Value:
    outputs = {value.name: value for value in graph.outputs}
    if name not in outputs:
        raise OptionError(f"loss='output:{name}', but the model's outputs are {', '.join(map(str, outputs))}.")
    value = outputs[name]
    shape = dimensions(value)
    if not is_float(value) or (shape is not None and any(size != 1 for size in shape)):
        raise OptionError(f"loss='output:{name}' needs a floating scalar, but {name!r} has shape {shape}.")
    return value


def _prediction(graph: ir.Graph, loss: Loss, name: str | None) -> tuple[ir.Value, bool]:
    """The value that the loss is built on, and whether it holds probabilities without their logits."""
    outputs = list(graph.outputs)
    if name is not None:
        found = [value for value in outputs if value.name == name]
        if not found:
            raise OptionError(f"output={name!r}, but the outputs are {', '.join(str(v.name) for v in outputs)}.")
    else:
        found = [value for value in outputs if is_float(value)]
    if not found or not is_float(found[0]):
        raise OptionError("The model has no floating output to build a loss on; name one with output=.")
    inner = _before_activation(found[0], loss)
    labelled = any(not is_float(value) for value in outputs)
    probabilities = labelled and inner is found[0] and "Softmax" in loss.trains_through and _sums_to_one(found[0])
    return inner, probabilities


def _sums_to_one(value: ir.Value) -> bool:
    """Whether a classifier's output is built as probabilities: (1 - p, p), or normalized."""
    producer = value.producer()
    while producer is not None and producer.op_type in ("Identity", "Cast", "Reshape"):
        source = producer.inputs[0]
        producer = None if source is None else source.producer()
    return producer is not None and producer.op_type in ("Concat", "Normalizer", "Div")


def _before_activation(value: ir.Value, loss: Loss) -> ir.Value:
    """What stands before a final activation that the loss contains: the logits."""
    producer = value.producer()
    if producer is None or not producer.inputs or producer.inputs[0] is None or producer.domain:
        return value
    source = producer.inputs[0]
    if producer.op_type == "Identity" or (producer.op_type == "Cast" and source.dtype == value.dtype):
        inner = _before_activation(source, loss)
        return value if inner is source else inner
    if producer.op_type not in loss.trains_through:
        return value
    if producer.op_type in ("Softmax", "LogSoftmax"):
        rank = None if source.shape is None else len(source.shape)
        axis = producer.attributes["axis"].as_int() if "axis" in producer.attributes else -1
        classes = getattr(loss, "axis", None)
        wanted = (2 if rank == 3 else 1) if classes is None else classes
        if rank is None or axis % rank != wanted % rank:
            return value
    return source


def _target(loss: Loss, prediction: ir.Value, kind: TargetKind, name: str) -> ir.Value:
    scratch = Builder(ir.Graph([], [], nodes=[]), 18)
    wrapped = scratch.wrap(prediction)
    shape = loss.target_shape(wrapped, kind)
    if shape is None:
        raise OptionError(f"The rank of {prediction.name!r} is not known; declare its shape in the model.")
    return ir.Value(
        name=name,
        type=ir.TensorType(loss.target_dtype(wrapped, kind)),
        shape=ir.Shape(shape),
    )


def tensor_spec(value: ir.Value) -> TensorSpec:
    """What data for an input must be.

    Raises:
        OptionError: The input is no tensor.
    """
    if value.dtype is None or not value.name:
        raise OptionError(f"The input {value.name!r} has no tensor type; only tensors can be fed.")
    return TensorSpec(value.name, value.dtype.numpy(), dimensions(value))
