"""What is trained: a model made ready for a loss: prediction, target, modes, parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.expand import is_expanded
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.autodiff.path import Forward, Route
from onnxtrain.errors import DataError, OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.model.file import ModelFile
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.data import Dataset, TargetCheck, TensorSpec
from onnxtrain.training.hidden_weights import hidden_weights
from onnxtrain.training.hints import Hint, find_hints
from onnxtrain.training.loss import IgnoredWherePresent, Loss, TargetForm, TargetKind, examples
from onnxtrain.training.loss_choice import LossLike, resolve_loss
from onnxtrain.training.losses import CustomLoss, SoftmaxCrossEntropy
from onnxtrain.training.metrics import NamedMetric
from onnxtrain.training.parameters import Initializer, parameter_table
from onnxtrain.training.prediction import before_activation, named_output, sums_to_one
from onnxtrain.training.ties import Copy, compute_copies, find_copies
from onnxtrain.training.training_modes import (
    Layers,
    expand_calls_of_layers,
    find_layers,
    set_inference,
    train_batch_norm,
    train_dropout,
)
from onnxtrain.training.weights import product_weights
from onnxtrain.training_info.recipe import Clipping, LossTerms, Names, Recipe


@dataclass(frozen=True)
class Modes:
    """How layers that behave differently in training are run.

    Attributes:
        batch_norm: "frozen" for running statistics as the file has them, or "train": batch statistics, running ones
            written back.
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
        loss: The loss for targets of the form; ``None`` where an output of the model is the loss.
        prediction: What the loss is built on (or the output that is the loss).
        target: The algorithm's input for targets, or ``None``.
        table: All initializers, trainable or not.
        statistics: Initializers of running statistics, to the values that replace them.
        from_probabilities: Whether the prediction holds probabilities where the loss takes logits.
        options: How gradients are built.
        layers: Batch normalization and dropout, as the file has them.
        modes: How they are run.
        copies: Initializers that are computed from others, since they are copies of them.
        declared: The loss as it was given, which still leaves the form of the targets open.
        form: What targets are taken for; ``None`` where there are none.
        output: The model's output that the loss is for: the prediction, or what a final activation makes of it.
    """

    model: ir.Model
    loss: Loss | None
    prediction: ir.Value
    target: ir.Value | None
    table: list[Initializer]
    statistics: dict[str, str] = field(default_factory=dict)
    from_probabilities: bool = False
    options: GradientOptions = field(default_factory=GradientOptions)
    layers: Layers = field(default_factory=Layers)
    modes: Modes = field(default_factory=Modes)
    copies: Sequence[Copy] = ()
    declared: Loss | None = None
    form: TargetForm | None = None
    output: ir.Value | None = None

    def __post_init__(self) -> None:
        # The graph is used up by the session that is built from it.
        self.inputs = tuple(self.model.graph.inputs)

    @property
    def parameters(self) -> list[str]:
        """Names of what is trained."""
        return [row.name for row in self.table if row.trainable]

    @property
    def weights(self) -> list[str]:
        """Names of the parameters that are weights of products: what is pruned and sparsified by default."""
        return product_weights(self.model, self.parameters)

    def hints(self, file: ModelFile) -> list[Hint]:
        """What is worth knowing about the model before it is trained; the values of the file are read."""
        tied = {copy.original for copy in self.copies}  # on request
        return find_hints(
            self.model,
            [name for name in self.parameters if name not in tied],
            self.layers,
            find_copies(file, self.parameters),
            batch_norm=self.modes.batch_norm,
            dropout=self.modes.dropout,
        )

    def recipe(self, optimizer: Optimizer, clipping: Clipping, *, accumulate: bool) -> Recipe:
        """All that the training model of this subject is made from.

        Raises:
            OptionError: There is nothing to train; the message says why.
        """
        if not self.parameters:
            reasons = "; ".join(f"{row.name!r}: {row.reason}" for row in self.table[:5])
            reasons = "; ".join(filter(None, (reasons or "it has no initializers", hidden_weights(self.model))))
            raise OptionError(f"The model has no trainable parameter: {reasons}.")
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
            sparsified=self.weights,
            names=names,
            options=self.options,
        )

    @property
    def target_spec(self) -> TensorSpec | None:
        """What targets must be; ``None`` where the loss needs none."""
        if self.target is None:
            return None
        spec = tensor_spec(self.target)
        if isinstance(self.declared, CustomLoss) and self.declared.shape is None:
            hint = " Targets of another shape are declared by CustomLoss(function, shape=..., dtype=...)."
            return replace(spec, hint=hint, size_hint=hint)
        if self.loss is None or len(self.loss.target_kinds) < 2 or spec.dtype.kind == "f":
            return spec
        hint = ' For distributions over classes, say targets="values".'
        return replace(spec, hint=hint, size_hint=self._axis_hint())

    def _axis_hint(self) -> str:
        """Which axis of the logits labels are without, where there is a choice."""
        shape, axis = dimensions(self.prediction), None if self.form is None else self.form.axis
        loss = self.loss
        if axis is None and isinstance(loss, SoftmaxCrossEntropy):
            axis = loss.class_axis(_wrapped(self.prediction))
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
        axes = () if self.target is None else dimensions(self.target) or ()
        axis = next((axis for axis, size in enumerate(axes) if size in batches), 0)
        if axis and axes[0] not in batches:
            raise DataError(
                f"The output {self.prediction.name!r} has the batch on axis {axis}, and so have its targets, but data "
                "are cut into batches along axis 0; transpose the output in the model, or give whole batches to "
                "train_step."
            )

    def form_of(self, targets: np.ndarray, sizes: Mapping[str, int]) -> TargetForm | None:
        """What targets are; ``None`` where the loss takes none.

        Args:
            targets: All targets, examples first.
            sizes: What the symbols of the inputs' shapes stand for.
        """
        if self.declared is None or self.form is None:
            return self.form
        form = self.declared.form_of(_wrapped(self.prediction), targets.dtype, targets.shape, sizes, self.form)
        return replace(form, ignoring=True) if self.holds_ignored(targets) else form

    def form_of_dataset(self, dataset: Dataset) -> TargetForm | None:
        """What the targets of a dataset are, as far as it tells before it is read."""
        targets = dataset.targets
        form = self.form if targets is None else self.form_of(targets, dataset.sizes)
        if form is None or form.kind != "indices" or dataset.size is not None or self._ignored is None:
            return form
        return replace(form, ignoring=True)  # batches that nobody has seen may hold such labels

    def holds_ignored(self, targets: np.ndarray) -> bool:
        """Whether there are labels to ignore, for which the loss is not built so far."""
        if self.form is None or self.form.ignoring or self._ignored is None or targets.dtype.kind not in "iu":
            return False
        return bool((targets == self._ignored).any())

    @property
    def _ignored(self) -> int | None:
        """The label that is ignored where data hold it."""
        index = getattr(self.declared, "ignore_index", None)
        return index if isinstance(index, IgnoredWherePresent) else None

    @property
    def _whole_loss(self) -> Loss | None:
        """The loss with all that it ignores, where data hold it or not: for checks and metrics."""
        if self.declared is None or self.form is None:
            return self.loss
        return self.declared.with_form(replace(self.form, ignoring=True))

    @property
    def target_check(self) -> TargetCheck | None:
        """The check of the values of targets."""
        loss = self._whole_loss
        if loss is None or self.form is None:
            return None
        return loss.target_check(_wrapped(self.prediction), self.form.kind)

    def validate(self, dataset: Dataset, *, labels: bool) -> None:
        """Refuse NaN, infinity and, where the dataset has targets, what the loss has no use for.

        Raises:
            DataError: The data holds such a value.
        """
        dataset.validate(check=self.target_check if labels else None)

    def resolve_metrics(self, metrics: Sequence[Any]) -> list[NamedMetric]:
        """Metrics by name or as functions, told how to read this model's predictions.

        The loss says what predictions are; a metric for others is refused. Functions of a user's own get the
        model's output.

        Raises:
            OptionError: There is no such metric, it is for other predictions, or there are no targets to compare with.
        """
        if not metrics:
            return []
        loss = self._whole_loss
        if self.target is None or loss is None:
            raise OptionError(
                "metrics compare predictions with targets, which this loss does not take; leave them out."
            )
        reading = loss.reading(_wrapped(self.prediction), _wrapped(self.target))
        reading = replace(reading, probabilities=self.from_probabilities)
        return [metric if isinstance(metric, NamedMetric) else reading.metric(metric) for metric in metrics]

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


def _wrapped(value: ir.Value, opset: int = 18) -> Value:
    """A value for what only looks at its type and shape."""
    return Builder(ir.Graph([], [], nodes=[]), opset).wrap(value)


def prepare(
    file: ModelFile,
    loss: LossLike,
    *,
    output: str | None = None,
    target_kind: TargetKind | None = None,
    form: TargetForm | None = None,
    ignoring: bool = True,
    target_name: str = "target",
    modes: Modes | None = None,
    train: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    options: GradientOptions | None = None,
    table: list[Initializer] | None = None,
    copies: Sequence[Copy] = (),
) -> Subject:
    """Make a model ready for training on a loss.

    Args:
        file: The user's model.
        loss: What to minimise.
        output: Name of the output that the loss is built on; by default the first floating one.
        target_kind: Class indices or values; by default what the loss prefers.
        form: What targets are, where data have told; wins over ``target_kind``.
        ignoring: Whether labels that are ignored where present are provided for, before data tell.
        target_name: Name of the target input.
        modes: Batch normalization and dropout.
        train: Patterns of what to train.
        freeze: Patterns of what not to train.
        options: How gradients are built.
        table: The initializers, where they have been sorted before; then their values are not read.
        copies: Initializers to compute from others, since they are copies of them.

    Raises:
        OptionError: An unknown loss or output, a pattern that matches nothing, nothing to train.
    """
    modes = modes or Modes()
    model = infer_shapes(file.training_model())
    layers = find_layers(model)
    compute_copies(model, copies)
    statistics = _set_modes(model, modes)
    resolved = resolve_loss(loss)
    if isinstance(resolved, str):
        prediction = _loss_output(model.graph, resolved)
        subject = Subject(model, None, prediction, None, [], statistics)
    else:
        subject = _with_targets(model, resolved, form, target_kind, output, target_name, ignoring=ignoring)
        subject.statistics = statistics
    subject.options = options or GradientOptions()
    subject.layers, subject.modes, subject.copies = layers, modes, copies
    subject.table = _table(subject, train, freeze) if table is None else table
    return subject


def _set_modes(model: ir.Model, modes: Modes) -> dict[str, str]:
    """Run the layers of a working copy in these modes, in place; returns the statistics and what replaces them."""
    training = modes.batch_norm == "train" or modes.dropout
    nodes = list(model.graph)
    if training:
        expand_calls_of_layers(model)
    set_inference(model)
    statistics = train_batch_norm(model) if modes.batch_norm == "train" else {}
    if modes.dropout:
        train_dropout(model, modes.seed)
    if training and (statistics or list(model.graph) != nodes):
        infer_shapes(model)
    return statistics


def _with_targets(
    model: ir.Model,
    declared: Loss,
    form: TargetForm | None,
    kind: TargetKind | None,
    output: str | None,
    name: str,
    *,
    ignoring: bool,
) -> Subject:
    """The model with a loss of a prediction and a target."""
    found = named_output(model.graph, output)
    if form is None:
        first = declared.first_form(_wrapped(found, model.opset_imports[""]), kind)
        form = replace(first, ignoring=ignoring)
    inner, axis = before_activation(found, declared.with_form(form))
    if axis is not None and form.axis is None:
        form = replace(form, axis=axis)
    loss = declared.with_form(form)
    labelled = any(not is_float(value) for value in model.graph.outputs)
    probabilities = labelled and inner is found and "Softmax" in loss.trains_through and sums_to_one(found)
    target = _target(loss, inner, form.kind, name)
    return Subject(
        *(model, loss, inner, target, []), from_probabilities=probabilities, declared=declared, form=form, output=found
    )


def _table(
    subject: Subject, train: str | Sequence[str] | None, freeze: str | Sequence[str] | None
) -> list[Initializer]:
    """Sort the initializers; where the search expands functions, on a copy, since the main graph keeps them."""
    model, loss = subject.model, subject.prediction
    forward = Forward.of(model, straight_through=subject.options.straight_through)
    xs = tuple(value for value in model.graph.initializers.values() if is_float(value))
    copy = model if is_expanded(forward, Route((loss,), xs)) else model.clone()
    values = {output.name: output for node in copy.graph for output in node.outputs}
    values |= {value.name: value for value in copy.graph.inputs}
    rows = parameter_table(
        copy,
        values[subject.prediction.name],
        train=train,
        freeze=freeze,
        straight_through=subject.options.straight_through,
    )
    return rows + [_copied_row(subject.model.graph, copy) for copy in subject.copies]


def _copied_row(graph: ir.Graph, copy: Copy) -> Initializer:
    value = next(output for node in graph for output in node.outputs if output.name == copy.name)
    shape = tuple(size for size in dimensions(value) or () if isinstance(size, int))
    assert value.dtype is not None
    uses = tuple(dict.fromkeys(node.op_type for node in value.consumers()))
    reason = f"tied to {copy.original}"
    return Initializer(copy.name, shape, value.dtype.name.lower(), int(np.prod(shape)), False, reason, uses)


def _loss_output(graph: ir.Graph, name: str) -> ir.Value:
    outputs = {value.name: value for value in graph.outputs}
    if name not in outputs:
        raise OptionError(f"loss='output:{name}', but the model's outputs are {', '.join(map(str, outputs))}.")
    value = outputs[name]
    shape = dimensions(value)
    if not is_float(value) or (shape is not None and any(size != 1 for size in shape)):
        raise OptionError(f"loss='output:{name}' needs a floating scalar, but {name!r} has shape {shape}.")
    return value


def _target(loss: Loss, prediction: ir.Value, kind: TargetKind, name: str) -> ir.Value:
    wrapped = _wrapped(prediction)
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
