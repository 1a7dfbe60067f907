"""What is minimised: a loss on the prediction of a model, whose parameters are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.config import TrainingConfig
from onnxtrain.data import Batch, Dataset, TensorSpec
from onnxtrain.data.conversion import to_numpy
from onnxtrain.data.target_checks import check_weights
from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.declared_shapes import declared_otherwise
from onnxtrain.ir.value import dimensions
from onnxtrain.losses.base import Loss, LossByExample, examples, reduced
from onnxtrain.losses.heads import Head, HeadMetric, Metrics, are_none, metrics_of_heads
from onnxtrain.losses.joint_loss import Forms, JointLoss
from onnxtrain.losses.partial_batches import FixedBatch, on_real_rows
from onnxtrain.losses.targets import Targets, tensor_spec, wrapped
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.advice.hints import Hint, find_hints
from onnxtrain.training.working_copy.adaptation import Adapted
from onnxtrain.training.working_copy.training_modes import Layers, Modes
from onnxtrain.training_info.recipe import LossTerms, Names, Recipe, UpdateRule, free_names
from onnxtrain.training_info.rounding import Rounding
from onnxtrain.weights.groups import group_hints, merged_hints, update_rules
from onnxtrain.weights.masks import KEEP, choose_tensors, zero_masks
from onnxtrain.weights.of_products import product_weights
from onnxtrain.weights.parameters import Initializer
from onnxtrain.weights.stored import Stored
from onnxtrain.weights.ties import Copy, find_copies

_PRUNED_SIZE = 32
"""Elements of weights with zeros from which a model counts as pruned: matrices written by hand are smaller."""


@dataclass(frozen=True, eq=False)
class Objective:
    """A model with the loss that it is trained on. Its graph is never changed: what builds on it takes a copy.

    Attributes:
        model: Working copy of the main graph in the modes of the training, with shapes.
        prediction: What the loss is built on (or the output that is the loss).
        output: The model's output that the loss is for: the prediction, or what a final activation makes of it.
        targets: The loss and its targets; ``None`` where an output of the model is the loss.
        others: The other outputs with losses, where there are several, and their targets.
        names: What the step graph calls its own inputs and results.
        statistics: Initializers of running statistics, to the values that replace them.
        layers: Batch normalization and dropout, as the file has them.
        dropped: Biases that the exporter left out of the file.
        modes: How they are run.
        copies: Initializers that are computed from others, since they are copies of them.
        table: All initializers, trainable or not.
        adapted: What was added to the model, to be trained beside its weights.
        weights: The input for one weight per example; ``None`` where all count alike.
        scales: Inputs that scale losses of micro-batches, by the output; see :meth:`scaled`.
        stored: What the file holds in another form than it is trained in.
        wide: Parameters that are held in bfloat16, to the values that have their numbers in float32.
    """

    model: ir.Model
    prediction: ir.Value
    output: ir.Value
    targets: Targets | None = None
    names: Names = field(default_factory=Names)
    statistics: dict[str, str] = field(default_factory=dict)
    layers: Layers = field(default_factory=Layers)
    dropped: tuple[str, ...] = ()
    modes: Modes = field(default_factory=Modes)
    copies: Sequence[Copy] = ()
    table: Sequence[Initializer] = ()
    adapted: Adapted | None = None
    weights: ir.Value | None = None
    scales: Mapping[str, ir.Value] = field(default_factory=dict)
    others: Sequence[Head] = ()
    stored: Sequence[Stored] = ()
    wide: Mapping[str, str] = field(default_factory=dict)

    @property
    def heads(self) -> list[Head]:
        """All outputs with losses on targets."""
        return [] if self.targets is None else [Head(self.output, self.prediction, self.targets), *self.others]

    @property
    def part_names(self) -> list[str]:
        """What a step calls the losses that the loss is the sum of; none where there is one."""
        names = [f"{head.name}_loss" for head in self.heads] if self.others else []
        return free_names(self.model.graph, names)

    def with_heads(self, heads: Sequence[Head]) -> Objective:
        """The same with other losses."""
        first, *others = heads
        return replace(self, output=first.output, prediction=first.prediction, targets=first.targets, others=others)

    @property
    def loss(self) -> Loss | JointLoss | None:
        """The loss for targets of the form; ``None`` where an output of the model is the loss."""
        if self.others:
            return JointLoss(tuple((head.name, head.targets.loss) for head in self.heads))
        return None if self.targets is None else self.targets.loss

    @property
    def form(self) -> Forms | None:
        """What targets are taken for, those of each loss; ``None`` where there are none."""
        if self.others:
            return tuple(head.targets.form for head in self.heads)
        return None if self.targets is None else self.targets.form

    @cached_property
    def inputs(self) -> list[TensorSpec]:
        """Types, shapes and names of the model's inputs."""
        return [tensor_spec(value) for value in self.model.graph.inputs]

    @cached_property
    def batched(self) -> frozenset[str]:
        """Names of the inputs and targets with one row per example, in a model of a fixed batch size."""
        fixed = self.fixed_batch
        specs = [*self.inputs, *(head.targets.spec for head in self.heads)]
        return frozenset(
            spec.name for spec in specs if fixed is not None and spec.shape and spec.shape[0] == fixed.size
        )

    def for_any_rows(self, spec: TensorSpec) -> TensorSpec:
        """Return the specification of an array without its batch size where batches are padded."""
        if spec.name not in self.batched:
            return spec
        assert spec.shape is not None
        return replace(spec, shape=(None, *spec.shape[1:]))

    def accept(self, dataset: Dataset, weights: Any = None) -> Dataset:
        """Convert a dataset to the targets and weights that the losses read, and check its values.

        Raises:
            DataError: They do not fit, or hold values that a loss cannot take.
        """
        if self.targets is not None:
            dataset = self.expected(dataset)
        if weights is not None:
            dataset = self.weighted(dataset, weights)
        self.validate(dataset, labels=self.targets is not None)
        return dataset

    def expected(self, dataset: Dataset) -> Dataset:
        """A dataset whose targets are checked against, and converted to, what the losses need."""
        if not self.others:
            return dataset.expecting(None if self.targets is None else self.targets.spec)
        for head in self.heads:
            dataset = dataset.expecting(head.targets.spec, head.name)
        return dataset

    def weighted(self, dataset: Dataset, weights: Any) -> Dataset:
        """A dataset with one weight per example: an array, or the name of one that it has."""
        assert self.weights is not None
        given = weights if isinstance(weights, str) else check_weights(to_numpy(weights, "sample_weight"))
        return dataset.with_weights(given, tensor_spec(self.weights))

    def targets_of(self, batch: Batch) -> dict[str, np.ndarray]:
        """The targets of a batch by the names of the step graph."""
        if self.others:
            return {head.targets.name: batch.inputs[head.name] for head in self.heads if head.name in batch.inputs}
        return {} if batch.targets is None or self.targets is None else {self.targets.name: batch.targets}

    def inputs_of(self, batch: Batch) -> dict[str, np.ndarray]:
        """What a batch has beside its targets."""
        names = {head.name for head in self.heads} if self.others else set()
        return {name: array for name, array in batch.inputs.items() if name not in names}

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

    @property
    def own_weights(self) -> list[str]:
        """The weights of linear layers, convolutions and the like that the file itself has and that are trained."""
        added = set() if self.adapted is None else set(self.adapted.parameters)
        return [name for name in self.product_weights if name not in added]

    def optimizers(self, config: TrainingConfig) -> list[Optimizer]:
        """The update rules of all parameters."""
        return [config.optimizer, *(rule.optimizer for rule in self.rules(config).values())]

    def hints(self, config: TrainingConfig) -> list[Hint]:
        """What is worth knowing about the model before it is trained; the values of the file are read."""
        file = config.model
        tied = {copy.original for copy in self.copies}  # on request
        found = find_hints(
            self.model,
            [name for name in self.parameters if name not in tied],
            self.layers,
            find_copies(file, self.parameters),
            batch_norm=self.modes.batch_norm,
            dropout=self.modes.dropout,
            undecided=[row.name for row in self.table if row.undecided],
            dropped=self.dropped,
            quantized=not (config.qat or config.straight_through or config.lora is not None),
        )
        texts = group_hints(config.groups, self.table, self.model)
        choices = {"train": config.train, "freeze": config.freeze}
        choices |= {repr(group): group.patterns for group in config.groups}
        merged = merged_hints(choices, self.table, self.model)
        otherwise = declared_otherwise(file.proto.graph, self.model.graph)
        surprising = [Hint(text, surprising=True) for text in (*merged, *otherwise, *self._zeros(config))]
        return found + [Hint(text, surprising=False) for text in texts] + surprising

    def _zeros(self, config: TrainingConfig) -> list[str]:
        """Name the pruned weights that a training without masks makes dense."""
        if config.masks or config.qat or any(optimizer.promotes_sparsity for optimizer in self.optimizers(config)):
            return []
        found = zero_masks(self.own_weights, config.model.value)
        size = sum(mask.size for mask in found.values())
        if size < _PRUNED_SIZE:
            return []
        zeros = size - sum(int(np.count_nonzero(mask)) for mask in found.values())
        listed = ", ".join(list(found)[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        return [
            f"{zeros:,} of {size:,} elements of {listed} are zero, as after pruning, and training changes them; "
            f"masks={KEEP!r} keeps them zero."
        ]

    def on_real_rows(self, rows: int) -> Objective:
        """The same with the loss on as many examples as there are targets, for a model of a fixed batch size.

        Args:
            rows: How many real examples there are, for an error's sentence.

        Raises:
            DataError: Padding cannot be left out of this loss.
        """
        assert self.fixed_batch is not None
        found = on_real_rows(self.model, self.prediction, self.targets, self.fixed_batch, rows)
        others = [
            head._replace(targets=on_real_rows(self.model, head.prediction, head.targets, self.fixed_batch, rows))
            for head in self.others
        ]
        weights = self.weights
        if weights is not None:
            count = ir.Shape((dimensions(found.value) or ())[:1])
            weights = ir.Value(name=weights.name, type=weights.type, shape=count)
        return replace(self, targets=found, others=others, weights=weights)

    def with_form(self, form: Forms | None) -> Objective:
        """The same for targets of another form."""
        if form is None or form == self.form or self.targets is None:
            return self
        forms = form if isinstance(form, tuple) else (form,)
        return self.with_heads([head.with_form(self.model, own) for head, own in zip(self.heads, forms, strict=True)])

    def weighting(self, weighted: bool) -> Objective:
        """The same with, or without, one weight per example.

        Raises:
            OptionError: The loss takes none.
        """
        if weighted == (self.weights is not None):
            return self
        if not weighted:
            return replace(self, weights=None)
        losses: list[Loss | None] = [head.targets.loss for head in self.heads] or [None]
        for loss in losses:
            if isinstance(loss, LossByExample):
                continue
            shown = f"output:{self.prediction.name}" if loss is None else loss.name
            raise OptionError(
                f"sample_weight is given, but the loss {shown} has no terms by example that weights could multiply; "
                "leave it out, or take a loss by its name."
            )
        size = (dimensions(self.prediction) or (None,))[0]
        kind = ir.TensorType(wrapped(self.prediction).dtype)
        return replace(self, weights=ir.Value(name=self.names.weights, type=kind, shape=ir.Shape((size,))))

    def scaled(self) -> Objective:
        """The same with an input that scales each of several losses whose terms are not as many in each example.

        Micro-batches of several losses are weighted by their examples. A mean over labels that count, or a sum beside
        means, adds up to that of the whole batch where it is scaled by (examples / weight) of the whole batch.
        """
        if not self.others or all(head.targets.loss.reduction == "sum" for head in self.heads):
            return self
        scaled = [head.name for head in self.heads if head.scaled]
        names = free_names(self.model.graph, [f"{name}_scale" for name in scaled])
        kind = ir.TensorType(ir.DataType.FLOAT)
        inputs = [ir.Value(name=name, type=kind, shape=ir.Shape(())) for name in names]
        return replace(self, scales=dict(zip(scaled, inputs, strict=True)))

    def label_weights(self, feeds: Mapping[str, np.ndarray]) -> list[float]:
        """The number of examples of a micro-batch, and the weight of each loss that is scaled; sums need none."""
        scaled = [head.targets for head in self.heads if head.name in self.scales]
        return [
            float(len(feeds[self.heads[0].targets.name])),
            *(0.0 if own.loss.reduction == "sum" else own.loss.label_weight(feeds[own.name]) for own in scaled),
        ]

    def scale_feeds(self, totals: Sequence[float]) -> dict[str, np.ndarray]:
        """The scales of the losses for what :meth:`label_weights` gives for the whole batch."""
        rows, *weights = totals
        sums = {head.name: head.targets.loss.reduction == "sum" for head in self.heads}
        return {
            str(value.name): np.asarray(rows if sums[name] else rows / weight if weight else 0.0, np.float32)
            for (name, value), weight in zip(self.scales.items(), weights, strict=True)
        }

    def sparsified(self, patterns: Sequence[str] | None) -> list[str]:
        """The parameters whose sparsity an optimizer promotes, where it does.

        Raises:
            OptionError: A pattern matches no parameter.
        """
        return choose_tensors(self.shapes, patterns, "sparsify", self.product_weights)

    def recipe(self, config: TrainingConfig) -> Recipe:
        """All that the training model is made from, with a graph of its own, which whoever builds it uses up.

        Raises:
            OptionError: There is nothing to train; the message says why.
        """
        if not self.parameters:
            from onnxtrain.weights.embedded_weights import hidden_weights  # for the message only

            reasons = "; ".join(f"{row.name!r}: {row.reason}" for row in self.table[:5])
            reasons = "; ".join(filter(None, (reasons or "it has no initializers", hidden_weights(self.model))))
            raise OptionError(f"The model has no trainable parameter: {reasons}.")
        micro_batches = config.accumulate > 1 or config.divided
        reductions = {head.targets.loss.reduction for head in self.heads}
        if micro_batches and len(reductions) > 1 and not self.scales:
            raise OptionError(
                "A training model adds up micro-batches of losses that are all means or all sums, but one loss is a "
                "mean and another a sum; give them one reduction."
            )
        own = self.copy()
        return Recipe(
            model=own.model,
            build_loss=own.build_loss,
            targets=[*(head.targets.value for head in own.heads), *own.scales.values()],
            parameters=self.parameters,
            optimizer=config.optimizer,
            clipping=config.clipping,
            micro_batches=micro_batches,
            alone=config.accumulate == 1,
            cleared=not config.divided,
            statistics=self.statistics,
            synchronized=config.synchronized,
            masks=config.masks,
            sparsified=self.sparsified(config.sparsify),
            names=self.names,
            options=config.gradients,
            weights=own.weights,
            rules=self.rules(config),
            averaging=config.ema,
            rounding=(None if config.state_dtype is None else Rounding(config.state_dtype, config.seed)),
            wide=self.wide,
            seed=config.seed,
        )

    def rules(self, config: TrainingConfig) -> dict[str, UpdateRule]:
        """How the parameters of groups are updated.

        Raises:
            OptionError: A group matches nothing, or has a setting that the optimizer has not.
        """
        return update_rules(config.groups, config.optimizer, self.table, self.model)

    def resolve_metrics(self, metrics: Metrics) -> list[HeadMetric]:
        """Metrics by name or as functions, told how to read this model's predictions; by output where it has several.

        Raises:
            OptionError: There is no such metric, it is for other predictions, or there are no targets to compare with.
        """
        if are_none(metrics):
            return []
        if self.targets is None:
            raise OptionError(
                "metrics compare predictions with targets, which this loss does not take; leave them out."
            )
        return metrics_of_heads(self.heads, metrics)

    def validate(self, dataset: Dataset, *, labels: bool) -> None:
        """Refuse NaN, infinity and, where the dataset has targets, what the loss has no use for.

        Raises:
            DataError: The data holds such a value.
        """
        if self.others:
            checks = {head.name: check for head in self.heads if (check := head.targets.check) is not None}
            dataset.validate(checks=checks if labels else {})
            return
        dataset.validate(check=self.targets.check if labels and self.targets is not None else None)

    def copy(self) -> Objective:
        """The same on a graph of its own, to build on."""
        model = self.model.clone()
        values = graph_values(model.graph)

        def own(value: ir.Value) -> ir.Value:
            return values[str(value.name)]

        def own_targets(targets: Targets) -> Targets:
            old = targets.value
            fresh = ir.Value(name=old.name, type=old.type, shape=old.shape)
            inputs = tuple(model.graph.inputs)
            return replace(targets, prediction=own(targets.prediction), value=fresh, inputs=inputs)

        targets = None if self.targets is None else own_targets(self.targets)
        others = [Head(own(head.output), own(head.prediction), own_targets(head.targets)) for head in self.others]
        weights = self.weights
        if weights is not None:
            weights = ir.Value(name=weights.name, type=weights.type, shape=weights.shape)
        prediction, output = own(self.prediction), own(self.output)
        found = replace(self, model=model, prediction=prediction, output=output, targets=targets, weights=weights)
        scales = {
            name: ir.Value(name=value.name, type=value.type, shape=value.shape) for name, value in self.scales.items()
        }
        return replace(found, others=others, scales=scales)

    def build_loss(self, op: Builder) -> LossTerms:
        """Emit the loss beside the model, into the graph of this objective: a copy's."""
        names = self.part_names
        terms = self.build_losses(op)
        if not self.others:
            return terms[0]
        like = op.wrap(self.prediction)
        count = op.dimension(op.wrap(self.heads[0].targets.value), 0)
        rows = op.cast(op.reshape(count, []), like.dtype).with_shape(())
        for index, head in enumerate(self.heads):
            if head.name in self.scales:
                own, scale = terms[index], op.cast(op.wrap(self.scales[head.name]), like.dtype)
                whole = own.loss if own.sums else own.loss * own.weight
                terms[index] = own._replace(loss=(op.cast(whole, like.dtype) * scale / rows).with_shape(()), sums=False)
        factors = [head.targets.loss.weight for head in self.heads]
        factored = [
            own.loss if factor == 1.0 else own.loss * factor for own, factor in zip(terms, factors, strict=True)
        ]
        total = op.sum_of([op.cast(value, like.dtype) for value in factored]).with_shape(())
        parts = {name: own.loss for name, own in zip(names, terms, strict=True)}
        return LossTerms(total, rows, all(own.sums for own in terms), parts)

    def build_losses(self, op: Builder) -> list[LossTerms]:
        """Emit the losses beside the model: the only one with its factor, or several as they are."""
        prediction = op.wrap(self.prediction)
        if self.targets is None:
            scalar = prediction if prediction.rank == 0 else op.reshape(prediction, op.ints()).with_shape(())
            return [LossTerms(scalar, _batch_size(op, self.model.graph, prediction))]
        weights = None if self.weights is None else op.wrap(self.weights)
        terms = [reduced(op, head.targets.loss, head.build(op, weights)) for head in self.heads]
        factor = self.targets.loss.weight
        if self.others or factor == 1.0:
            return terms
        return [terms[0]._replace(loss=(terms[0].loss * factor).with_shape(()))]


def of_model(model: ir.Model) -> Objective:
    """A model without a loss: for predictions only."""
    output = model.graph.outputs[0]
    return Objective(model, output, output, names=Names.beside(model.graph))


def graph_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """The values of a graph by name."""
    values = {str(output.name): output for node in graph for output in node.outputs}
    return values | {str(value.name): value for value in (*graph.inputs, *graph.initializers.values())}


def _batch_size(op: Builder, graph: ir.Graph, like: Value) -> Value:
    for value in graph.inputs:
        shape = dimensions(value)
        if shape:
            return op.cast(examples(op, op.wrap(value)), like.dtype)
    return op.scalar(1, like)
