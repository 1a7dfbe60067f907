"""What is minimised: a loss on the prediction of a model, whose parameters are known."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.expand import is_expanded
from onnxtrain.autodiff.missing import missing_rules, missing_rules_message
from onnxtrain.autodiff.path import Forward, Route
from onnxtrain.errors import GradientError, OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.collection import collection_paused
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.adaptation import Adapted
from onnxtrain.training.data import Dataset, TensorSpec
from onnxtrain.training.few_bits import set_accuracy
from onnxtrain.training.groups import overlapping, update_rules
from onnxtrain.training.hidden_weights import hidden_weights
from onnxtrain.training.hints import Hint, find_hints
from onnxtrain.training.loss import Loss, LossByExample, TargetForm, examples
from onnxtrain.training.masks import choose_tensors
from onnxtrain.training.metrics import Measure
from onnxtrain.training.parameters import Initializer, parameter_table
from onnxtrain.training.partial import FixedBatch, on_real_rows
from onnxtrain.training.prediction import before_activation, named_output, sums_to_one
from onnxtrain.training.specification import Specification
from onnxtrain.training.targets import Targets, target_input, tensor_spec, wrapped
from onnxtrain.training.ties import Copy, choose_copies, compute_copies, find_copies
from onnxtrain.training.training_modes import Layers, Modes, find_layers, set_modes
from onnxtrain.training.weights import product_weights
from onnxtrain.training_info.recipe import LossTerms, Names, Recipe, UpdateRule


@dataclass(frozen=True)
class Objective:
    """A model with the loss that it is trained on. Its graph is never changed: what builds on it takes a copy.

    Attributes:
        model: Working copy of the main graph in the modes of the training, with shapes.
        prediction: What the loss is built on (or the output that is the loss).
        output: The model's output that the loss is for: the prediction, or what a final activation makes of it.
        targets: The loss and its targets; ``None`` where an output of the model is the loss.
        names: What the step graph calls its own inputs and results.
        statistics: Initializers of running statistics, to the values that replace them.
        layers: Batch normalization and dropout, as the file has them.
        modes: How they are run.
        copies: Initializers that are computed from others, since they are copies of them.
        table: All initializers, trainable or not.
        adapted: What was added to the model, to be trained beside its weights.
        weights: The input for one weight per example; ``None`` where all count alike.
    """

    model: ir.Model
    prediction: ir.Value
    output: ir.Value
    targets: Targets | None = None
    names: Names = field(default_factory=Names)
    statistics: dict[str, str] = field(default_factory=dict)
    layers: Layers = field(default_factory=Layers)
    modes: Modes = field(default_factory=Modes)
    copies: Sequence[Copy] = ()
    table: Sequence[Initializer] = ()
    adapted: Adapted | None = None
    weights: ir.Value | None = None

    @property
    def loss(self) -> Loss | None:
        """The loss for targets of the form; ``None`` where an output of the model is the loss."""
        return None if self.targets is None else self.targets.loss

    @property
    def form(self) -> TargetForm | None:
        """What targets are taken for; ``None`` where there are none."""
        return None if self.targets is None else self.targets.form

    @property
    def inputs(self) -> list[TensorSpec]:
        """What data for the model's inputs must be."""
        return [tensor_spec(value) for value in self.model.graph.inputs]

    @property
    def target_spec(self) -> TensorSpec | None:
        """What targets must be; ``None`` where the loss needs none."""
        return None if self.targets is None else self.targets.spec

    @property
    def fixed_batch(self) -> FixedBatch | None:
        """The batch size that the model was exported with; ``None`` where it takes any."""
        return FixedBatch.of(self.model.graph)

    @property
    def parameters(self) -> list[str]:
        """Names of what is trained."""
        return [row.name for row in self.table if row.trainable]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what is trained."""
        return {row.name: row.shape for row in self.table if row.trainable}

    @cached_property
    def product_weights(self) -> list[str]:
        """Names of the parameters that are weights of products: what is pruned and sparsified by default."""
        return product_weights(self.model, self.parameters)

    def optimizers(self, specification: Specification) -> list[Optimizer]:
        """The update rules of all parameters."""
        return [specification.optimizer, *(rule.optimizer for rule in self.rules(specification).values())]

    def hints(self, specification: Specification) -> list[Hint]:
        """What is worth knowing about the model before it is trained; the values of the file are read."""
        file = specification.model
        tied = {copy.original for copy in self.copies}  # on request
        found = find_hints(
            self.model,
            [name for name in self.parameters if name not in tied],
            self.layers,
            find_copies(file, self.parameters),
            batch_norm=self.modes.batch_norm,
            dropout=self.modes.dropout,
        )
        overlaps = overlapping(specification.groups, self.table, self.model)
        return found + [Hint(text, surprising=False) for text in overlaps]

    def on_real_rows(self, rows: int) -> Objective:
        """The same with the loss on as many examples as there are targets, for a model of a fixed batch size.

        Args:
            rows: How many real examples there are, for an error's sentence.

        Raises:
            DataError: Padding cannot be left out of this loss.
        """
        assert self.fixed_batch is not None
        targets = on_real_rows(self.model, self.prediction, self.targets, self.fixed_batch, rows)
        weights = self.weights
        if weights is not None:
            count = ir.Shape((dimensions(targets.value) or ())[:1])
            weights = ir.Value(name=weights.name, type=weights.type, shape=count)
        return replace(self, targets=targets, weights=weights)

    def with_form(self, form: TargetForm | None) -> Objective:
        """The same for targets of another form."""
        if form is None or form == self.form or self.targets is None:
            return self
        return _with_targets(self, self.targets.declared, form)

    def weighting(self, weighted: bool) -> Objective:
        """The same with, or without, one weight per example.

        Raises:
            OptionError: The loss takes none.
        """
        if weighted == (self.weights is not None):
            return self
        if not weighted:
            return replace(self, weights=None)
        loss = self.loss
        if not isinstance(loss, LossByExample):
            shown = f"output:{self.prediction.name}" if loss is None else loss.name
            raise OptionError(
                f"sample_weight is given, but the loss {shown} has no terms by example that weights could multiply; "
                "leave it out, or take a loss by its name."
            )
        size = (dimensions(self.prediction) or (None,))[0]
        kind = ir.TensorType(wrapped(self.prediction).dtype)
        return replace(self, weights=ir.Value(name=self.names.weights, type=kind, shape=ir.Shape((size,))))

    def sparsified(self, patterns: Sequence[str] | None) -> list[str]:
        """The parameters whose sparsity an optimizer promotes, where it does.

        Raises:
            OptionError: A pattern matches no parameter.
        """
        return choose_tensors(self.shapes, patterns, "sparsify", self.product_weights)

    def recipe(self, specification: Specification) -> Recipe:
        """All that the training model is made from, with a graph of its own, which whoever builds it uses up.

        Raises:
            OptionError: There is nothing to train; the message says why.
        """
        if not self.parameters:
            reasons = "; ".join(f"{row.name!r}: {row.reason}" for row in self.table[:5])
            reasons = "; ".join(filter(None, (reasons or "it has no initializers", hidden_weights(self.model))))
            raise OptionError(f"The model has no trainable parameter: {reasons}.")
        own = self.copy()
        return Recipe(
            model=own.model,
            build_loss=own.build_loss,
            target=None if own.targets is None else own.targets.value,
            parameters=self.parameters,
            optimizer=specification.optimizer,
            clipping=specification.clipping,
            micro_batches=specification.accumulate > 1 or specification.divided,
            alone=specification.accumulate == 1,
            cleared=not specification.divided,
            statistics=self.statistics,
            masks=specification.masks,
            sparsified=self.sparsified(specification.sparsify),
            names=self.names,
            options=specification.gradients,
            weights=own.weights,
            rules=self.rules(specification),
        )

    def rules(self, specification: Specification) -> dict[str, UpdateRule]:
        """How the parameters of groups are updated.

        Raises:
            OptionError: A group matches nothing, or has a setting that the optimizer has not.
        """
        return update_rules(specification.groups, specification.optimizer, self.table, self.model)

    def resolve_metrics(self, metrics: str | Sequence[Any]) -> list[Measure]:
        """Metrics by name or as functions, told how to read this model's predictions.

        Raises:
            OptionError: There is no such metric, it is for other predictions, or there are no targets to compare with.
        """
        if not metrics:
            return []
        if self.targets is None:
            raise OptionError(
                "metrics compare predictions with targets, which this loss does not take; leave them out."
            )
        return self.targets.metrics(metrics)

    def validate(self, dataset: Dataset, *, labels: bool) -> None:
        """Refuse NaN, infinity and, where the dataset has targets, what the loss has no use for.

        Raises:
            DataError: The data holds such a value.
        """
        dataset.validate(check=self.targets.check if labels and self.targets is not None else None)

    def copy(self) -> Objective:
        """The same on a graph of its own, to build on."""
        model = self.model.clone()
        values = _values(model.graph)

        def own(value: ir.Value) -> ir.Value:
            return values[str(value.name)]

        targets = self.targets
        if targets is not None:
            old = targets.value
            fresh = ir.Value(name=old.name, type=old.type, shape=old.shape)
            inputs = tuple(model.graph.inputs)
            targets = replace(targets, prediction=own(targets.prediction), value=fresh, inputs=inputs)
        weights = self.weights
        if weights is not None:
            weights = ir.Value(name=weights.name, type=weights.type, shape=weights.shape)
        prediction, output = own(self.prediction), own(self.output)
        return replace(self, model=model, prediction=prediction, output=output, targets=targets, weights=weights)

    def build_loss(self, op: Builder) -> LossTerms:
        """Emit the loss beside the model, into the graph of this objective: a copy's."""
        prediction = op.wrap(self.prediction)
        targets = self.targets
        if targets is None:
            scalar = prediction if prediction.rank == 0 else op.reshape(prediction, op.ints()).with_shape(())
            return LossTerms(scalar, _batch_size(op, self.model.graph, prediction))
        if targets.from_probabilities:
            tiny = op.scalar(np.finfo(prediction.dtype.numpy()).tiny, prediction)
            prediction = op.Log(op.Max(prediction, tiny)).with_shape(prediction.shape)
        loss, target = targets.loss, op.wrap(targets.value)
        if self.weights is None or not isinstance(loss, LossByExample):
            return loss.build(op, prediction, target)
        return loss.build(op, prediction, target, op.wrap(self.weights))


@collection_paused()
def prepare(
    specification: Specification,
    *,
    modes: Modes | None = None,
    copies: Sequence[Copy] | None = None,
    table: Sequence[Initializer] | None = None,
    ignoring: bool = True,
    differentiable: bool = False,
) -> Objective:
    """The objective of a specification.

    Args:
        specification: What is trained.
        modes: Batch normalization and dropout, where not those of the specification.
        copies: Initializers that are copies of others, where these have been found before.
        table: The initializers, where they have been sorted before; then their values are not read.
        ignoring: Whether labels that are ignored where present are provided for, before data tell.
        differentiable: Whether to find out that there are gradients.

    Raises:
        OptionError: An unknown loss or output, a pattern that matches nothing.
        GradientError: Operators between parameters and prediction have no gradient; all are listed.
    """
    file, loss = specification.model, specification.loss
    training = modes is None
    modes = specification.modes if modes is None else modes
    copies = choose_copies(file, specification.tie) if copies is None else copies
    model = infer_shapes(file.training_model())
    set_accuracy(model, specification.options.accuracy_level)
    layers = find_layers(model)
    compute_copies(model, copies)
    statistics = set_modes(model, modes)
    adapted = None
    if specification.lora is not None:
        output_name, seed = specification.output, specification.seed
        adapted = specification.lora.attach(model, file, output=output_name, seed=seed, training=training)
    if isinstance(loss, str):
        output = _loss_output(model.graph, loss)
    else:
        output = named_output(model.graph, specification.output)
    objective = Objective(
        model=model,
        prediction=output,
        output=output,
        names=Names.beside(model.graph),
        statistics=statistics,
        layers=layers,
        modes=modes,
        copies=copies,
        table=table or (),
        adapted=adapted,
    )
    if not isinstance(loss, str):
        form = specification.form
        if form is None:
            first = loss.first_form(wrapped(output, model.opset_imports[""]), specification.targets)
            form = replace(first, ignoring=ignoring)
        objective = _with_targets(objective, loss, form)
    if table is None:
        return replace(objective, table=_table(objective, specification, differentiable=differentiable))
    return objective


def of_model(model: ir.Model) -> Objective:
    """A model without a loss: for predictions only."""
    output = model.graph.outputs[0]
    return Objective(model, output, output, names=Names.beside(model.graph))


def _with_targets(objective: Objective, declared: Loss, form: TargetForm) -> Objective:
    """The objective with a loss of its output and a target."""
    graph, found = objective.model.graph, objective.output
    inner, axis = before_activation(found, declared.with_form(form))
    if axis is not None and form.axis is None:
        form = replace(form, axis=axis)
    loss = declared.with_form(form)
    labelled = any(not is_float(value) for value in graph.outputs)
    targets = Targets(
        declared=declared,
        form=form,
        loss=loss,
        prediction=inner,
        value=target_input(loss, inner, form.kind, objective.names.target),
        inputs=tuple(graph.inputs),
        from_probabilities=labelled and inner is found and "Softmax" in loss.trains_through and sums_to_one(found),
    )
    return replace(objective, prediction=inner, targets=targets)


def _table(objective: Objective, specification: Specification, *, differentiable: bool) -> list[Initializer]:
    """Sort the initializers; where the search expands functions, on a copy, since the main graph keeps them."""
    copy, straight_through = objective.model, specification.straight_through
    xs = tuple(value for value in copy.graph.initializers.values() if is_float(value))
    if not is_expanded(Forward.of(copy, straight_through=straight_through), Route((objective.prediction,), xs)):
        copy = copy.clone()
    graph = copy.graph
    name = str(objective.prediction.name)
    rows = parameter_table(
        copy,
        _values(graph)[name],
        train=_trained(objective.adapted, specification.train),
        freeze=specification.freeze,
        straight_through=straight_through,
    )
    if differentiable:
        trained = [graph.initializers[row.name] for row in rows if row.trainable]
        forward = Forward.of(copy, straight_through=straight_through)
        if missing := missing_rules(forward, _values(graph)[name], trained):
            raise GradientError(missing_rules_message(missing, graph.opset_imports))
    return rows + [_copied_row(objective.model.graph, tied) for tied in objective.copies]


def _trained(adapted: Adapted | None, train: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The patterns of what is trained: where something was added to the model, that first."""
    return train if adapted is None else (*map(glob.escape, adapted.parameters), *(train or ()))


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


def _values(graph: ir.Graph) -> dict[str, ir.Value]:
    """The values of a graph by name."""
    values = {str(output.name): output for node in graph for output in node.outputs}
    return values | {str(value.name): value for value in (*graph.inputs, *graph.initializers.values())}


def _batch_size(op: Builder, graph: ir.Graph, like: Value) -> Value:
    for value in graph.inputs:
        shape = dimensions(value)
        if shape:
            return op.cast(examples(op, op.wrap(value)), like.dtype)
    return op.scalar(1, like)
