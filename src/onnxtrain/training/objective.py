"""The training objective: a loss on the working copy of a model whose parameters are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxtrain.data import Batch, Dataset, TensorSpec
from onnxtrain.data.conversion import time_first, to_numpy
from onnxtrain.data.data_names import DataNames
from onnxtrain.data.labels import count_missing
from onnxtrain.data.model_inputs import FixedBatch, tensor_spec
from onnxtrain.editing.working_copy.attention import numbers_documents, separate_documents
from onnxtrain.editing.working_copy.training_modes import LayerCounts, Modes
from onnxtrain.errors import DataError, OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import DOCUMENTS, dimensions
from onnxtrain.losses.base import ClassLoss, Forms, JointLoss, Loss, LossByExample, examples, reduced
from onnxtrain.losses.heads import (
    HeadMetric,
    LossHead,
    Metrics,
    are_none,
    is_float_tensor,
    metrics_of_heads,
    wrapped,
)
from onnxtrain.losses.partial_batches import batch_axes, on_real_rows
from onnxtrain.lowering.training_info.recipe import Block, LossTerms, Names, StepSpec, UpdateRule, free_names
from onnxtrain.lowering.training_info.rounding import Rounding
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.parameters.groups import update_rules
from onnxtrain.parameters.layouts import product_layouts
from onnxtrain.parameters.masks import choose_tensors, matmul_weights
from onnxtrain.parameters.stored import Stored
from onnxtrain.parameters.ties import Copy
from onnxtrain.parameters.trainable import Initializer, untrainable
from onnxtrain.training.advice.unreached import Unreached
from onnxtrain.training.config import TrainingConfig

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Attached


@dataclass(frozen=True, eq=False)
class Objective:
    """A model with the loss that it is trained on. Its graph never changes; builders take a :meth:`copy`."""

    model: ir.Model
    output: ir.Value
    heads: Sequence[LossHead] = ()
    names: Names = field(default_factory=Names)
    statistics: dict[str, str] = field(default_factory=dict)
    layers: LayerCounts = field(default_factory=LayerCounts)
    dropped: tuple[str, ...] = ()
    unstopped: tuple[str, ...] = ()
    modes: Modes = field(default_factory=Modes)
    copies: Sequence[Copy] = ()
    table: Sequence[Initializer] = ()
    adapted: Attached | None = None
    weights: ir.Value | None = None
    scales: Mapping[str, ir.Value] = field(default_factory=dict)
    stored: Sequence[Stored] = ()
    wide: Mapping[str, str] = field(default_factory=dict)

    @property
    def prediction(self) -> ir.Value:
        """Prediction that the first loss reads, or the output that is the loss."""
        return self.heads[0].prediction if self.heads else self.output

    @property
    def several(self) -> bool:
        """True where several outputs have losses."""
        return len(self.heads) > 1

    @property
    def part_names(self) -> list[str]:
        """Names of the losses of several outputs in the results of a step; empty for one loss."""
        return free_names(self.model.graph, [f"{head.name}_loss" for head in self.heads] if self.several else [])

    def with_heads(self, heads: Sequence[LossHead]) -> Objective:
        """Return the same objective with other losses."""
        return replace(self, output=heads[0].output, heads=heads)

    @property
    def loss(self) -> Loss | JointLoss | None:
        """The loss for targets of the form; ``None`` where an output of the model is the loss."""
        if self.several:
            return JointLoss(tuple((head.name, head.loss) for head in self.heads))
        return self.heads[0].loss if self.heads else None

    @property
    def forms(self) -> Forms:
        """The form of the targets of each loss."""
        return tuple(head.form for head in self.heads)

    @cached_property
    def output_names(self) -> list[str]:
        """Names of the outputs that have losses on targets."""
        return [head.name for head in self.heads]

    @cached_property
    def targets(self) -> list[tuple[str | None, LossHead]]:
        """The heads with the names of their targets in data: ``None`` for the only target, else that of the output."""
        return [(head.name if self.several else None, head) for head in self.heads]

    @cached_property
    def inputs(self) -> list[TensorSpec]:
        """Types, shapes and names of the model's inputs."""
        return [tensor_spec(value) for value in self.model.graph.inputs]

    @property
    def weights_spec(self) -> TensorSpec | None:
        """Type, shape and name of the weights of examples; ``None`` without them."""
        return None if self.weights is None else tensor_spec(self.weights)

    @cached_property
    def time_first(self) -> TensorSpec | None:
        """The first input whose first axis is time; ``None`` without one."""
        return time_first(self.inputs)

    @cached_property
    def common(self) -> frozenset[str]:
        """Names of the inputs with one value for all examples."""
        return frozenset(spec.name for spec in self.inputs if spec.common)

    def some_rows(self, feeds: Mapping[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
        """Return some rows of the arrays of a step; those with one value for all examples stay."""
        if self.time_first is not None:
            self.time_first.check_cut("train without accumulate, in one process")
        return {name: array if not array.ndim or name in self.common else array[rows] for name, array in feeds.items()}

    @cached_property
    def batched(self) -> frozenset[str]:
        """Names of the inputs and targets with one row per example, in a model of a fixed batch size."""
        fixed = self.fixed_batch
        specs = [*self.inputs, *(head.spec for head in self.heads)]
        return frozenset(
            spec.name for spec in specs if fixed is not None and spec.shape and spec.shape[0] == fixed.size
        )

    def for_any_rows(self, spec: TensorSpec) -> TensorSpec:
        """Return the specification of an array without its batch size where batches are padded."""
        if spec.name not in self.batched:
            return spec
        assert spec.shape is not None
        return replace(spec, shape=(None, *spec.shape[1:]))

    def check_batch_axes(self) -> None:
        """Refuse data sets for a model whose outputs alone have the batch on another axis than 0."""
        if not self.heads or self.time_first is not None:
            return  # arrays for inputs with time first are not cut
        axes = batch_axes(self.model, [head.prediction for head in self.heads])
        for head in self.heads:
            head.check_batch_axis(axes.get(str(head.prediction.name)))

    def reading(
        self, dataset: Dataset, labels: Sequence[Sequence[str] | None], weights: Any, *, weighted: bool
    ) -> tuple[Objective, Dataset]:
        """Return the objective for the form of a dataset's targets, and the dataset as its losses read it, checked."""
        forms, hints = [], [*dataset.hints]
        for (name, head), own_labels in zip(self.targets, labels, strict=True):
            raw = dataset.values(name)
            whole = raw is not None and raw.ndim > 0 and len(raw) == dataset.size  # else they are the first ones
            if raw is not None and (missing := count_missing(raw)):
                count = f"{missing:,} of {raw.size:,}" if whole else "some"
                shown = f"{dataset.name}: {count} targets{f' of {name!r}' if name else ''}"
                hints.append(f"{shown} are missing (NaN or empty); the loss leaves them out.")
                if whole and missing == raw.size:
                    raise DataError(f"{shown} are missing (NaN or empty), so that there is nothing to learn from.")
            dataset = dataset.adapting(partial(head.adapt, labels=own_labels), name)
            forms.append(head.form_of_data(dataset.values(name), dataset.sizes, whole=whole))
        own = self.with_forms(tuple(forms)).weighting(weighted)
        for name, head in own.targets:
            dataset = dataset.expecting(head.spec, name)
        if weights is not None:
            assert own.weights_spec is not None
            given = weights if isinstance(weights, str) else to_numpy(weights, "sample_weight")
            dataset = dataset.with_weights(given, own.weights_spec)
        dataset.hints = hints
        dataset.validate({name: check for name, head in own.targets if (check := head.check) is not None})
        return own, dataset

    def check_some_counted(self, dataset: Dataset) -> None:
        """Refuse data whose labels are all ignored by the only loss."""
        labels = dataset.targets if len(self.heads) == 1 else None
        if labels is not None and labels.ndim and len(labels) == dataset.size:  # else they are the first examples'
            self.heads[0].check_some_counted(labels, dataset.name)

    def feeds(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the arrays of a batch by their names in the step graph."""
        found = dict(batch.inputs)
        for name, head in self.targets:
            array = batch.targets if name is None else found.pop(name, None)
            if array is not None:
                found[head.target_name] = array
        return found

    def ignores_all(self, batch: Batch) -> bool:
        """Return whether the only loss ignores all labels of a batch."""
        if len(self.heads) != 1 or batch.targets is None or self.heads[0].form.kind != "indices":
            return False
        loss = self.heads[0].loss
        return isinstance(loss, ClassLoss) and loss.ignores_all(batch.targets)

    def inputs_of(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the arrays of a batch without its targets."""
        names = {name for name, _ in self.targets}
        return {name: array for name, array in batch.inputs.items() if name not in names}

    @property
    def predictions(self) -> list[str]:
        """Names of the values that the losses read."""
        return [str(head.prediction.name) for head in self.heads] or [str(self.prediction.name)]

    @property
    def only_output(self) -> str | None:
        """Name of the output that the only loss reads; ``None`` where there are several losses, or none on targets."""
        return self.heads[0].name if len(self.heads) == 1 else None

    @property
    def chosen_output(self) -> str | None:
        """The only output with a loss where it is not the first floating one; else ``None``."""
        first = next((value.name for value in self.model.graph.outputs if is_float_tensor(value)), None)
        return None if self.only_output == first else self.only_output

    def own_names(self, names: DataNames) -> DataNames:
        """Return names of data with the labels of the outputs that have losses."""
        first = next((value.name for value in self.model.graph.outputs if is_float_tensor(value)), None)
        return names.of_outputs(self.output_names, first)

    @property
    def fixed_batch(self) -> FixedBatch | None:
        """The fixed batch size of the model; ``None`` where it is dynamic."""
        return FixedBatch.of(self.model.graph)

    @property
    def parameters(self) -> list[str]:
        """Names of the trainable parameters."""
        return [row.name for row in self.table if row.trainable]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trainable parameters by name."""
        return {row.name: row.shape for row in self.table if row.trainable}

    @cached_property
    def matmul_weights(self) -> list[str]:
        """Names of the weights of linear, convolutional, recurrent and embedding layers: pruned by default."""
        return matmul_weights(self.model, self.parameters)

    @property
    def own_weights(self) -> list[str]:
        """Trained weights of linear layers, convolutions and the like that the file itself has."""
        added = set() if self.adapted is None else set(self.adapted.parameters)
        return [name for name in self.matmul_weights if name not in added]

    def optimizers(self, config: TrainingConfig) -> list[Optimizer]:
        """Return the update rules of all parameters."""
        return [config.optimizer, *(rule.optimizer for rule in self.rules(config).values())]

    def on_real_rows(self, rows: int) -> Objective:
        """Return the objective whose loss counts only the rows that have targets, for a model of a fixed batch size."""
        fixed = self.fixed_batch
        assert fixed is not None
        if not self.heads:
            raise DataError(
                f"The model takes batches of {fixed.size} examples and computes its loss itself "
                f"(output:{self.output.name}), so that padding would be part of it; {rows} examples are left for the "
                f"last batch: give a multiple of {fixed.size} or export the model with a dynamic batch axis."
            )
        heads = [on_real_rows(self.model, head, fixed, rows) for head in self.heads]
        weights = self.weights
        if weights is not None:
            count = ir.Shape((dimensions(heads[0].target) or ())[:1])
            weights = ir.Value(name=weights.name, type=weights.type, shape=count)
        return replace(self, heads=heads, weights=weights)

    def with_forms(self, forms: Forms | None) -> Objective:
        """Return the objective for targets of other forms."""
        if forms is None or forms == self.forms:
            return self
        return self.with_heads([head.with_form(self.model, own) for head, own in zip(self.heads, forms, strict=True)])

    @cached_property
    def packed(self) -> bool:
        """True where the mask or the positions keep the documents of packed rows apart."""
        return any(value.meta.get(DOCUMENTS) for value in self.model.graph.inputs)

    def packing(self, packed: bool = True) -> Objective:
        """Return the objective for packed rows of documents, which takes unpacked rows, too."""
        if not packed or self.packed or not numbers_documents(self.model.graph):
            return self
        own = self.copy()
        separate_documents(own.model)
        return own

    def weighting(self, weighted: bool) -> Objective:
        """Return the objective with, or without, one weight per example."""
        if weighted == (self.weights is not None):
            return self
        if not weighted:
            return replace(self, weights=None)
        losses: list[Loss | None] = [head.loss for head in self.heads] or [None]
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
        """Add a scale input to each of several losses whose number of terms differs between examples."""
        if not self.several or all(head.loss.reduction == "sum" for head in self.heads):
            return self
        scaled = [head.name for head in self.heads if head.scaled]
        names = free_names(self.model.graph, [f"{name}_scale" for name in scaled])
        kind = ir.TensorType(ir.DataType.FLOAT)
        inputs = [ir.Value(name=name, type=kind, shape=ir.Shape(())) for name in names]
        return replace(self, scales=dict(zip(scaled, inputs, strict=True)))

    def label_weights(self, feeds: Mapping[str, np.ndarray]) -> list[float]:
        """Return the number of examples of a micro-batch, and the weight of each scaled loss (0 for sums)."""
        scaled = [head for head in self.heads if head.name in self.scales]
        return [
            float(len(feeds[self.heads[0].target_name])),
            *(0.0 if own.loss.reduction == "sum" else own.label_weight(feeds[own.target_name]) for own in scaled),
        ]

    def scale_feeds(self, totals: Sequence[float]) -> dict[str, np.ndarray]:
        """Return the scale inputs for the totals of :meth:`label_weights` over the whole batch."""
        rows, *weights = totals
        sums = {head.name: head.loss.reduction == "sum" for head in self.heads}
        return {
            str(value.name): np.asarray(rows if sums[name] else rows / weight if weight else 0.0, np.float32)
            for (name, value), weight in zip(self.scales.items(), weights, strict=True)
        }

    def sparsified(self, patterns: Sequence[str] | None) -> list[str]:
        """Return the names of the parameters whose sparsity an optimizer promotes."""
        return choose_tensors(self.shapes, patterns, "sparsify", self.matmul_weights)

    def _blocks(self, config: TrainingConfig) -> dict[str, Block]:
        """Return the parameters whose sparsity is promoted, with the form of their blocks."""
        names, rules = self.sparsified(config.sparsify), self.rules(config)
        blocks = {rule.optimizer.promoted_block for rule in rules.values()} or {config.optimizer.promoted_block}
        if blocks == {(1, 1)}:
            return dict.fromkeys(names, ())
        layouts = product_layouts(self.model, names)
        wanted = {name: (rules[name].optimizer if name in rules else config.optimizer).promoted_block for name in names}
        return {name: layouts[name].block(*wanted[name]) if wanted[name] != (1, 1) else () for name in names}

    def step_spec(self, config: TrainingConfig) -> StepSpec:
        """Return the specification of a training step, on a copy of the graph, which the builder may change."""
        if not self.parameters:
            reasons = "; ".join(f"{row.name!r}: {row.reason}" for row in self.table[:5])
            reasons = "; ".join(
                filter(None, (reasons or "it has no initializers", untrainable(self.model, config.model.proto)))
            )
            unreached = Unreached(self.model, self.table, train=config.train, freeze=config.freeze)
            told = [hint.text for hint in unreached.stopped(self.predictions)]
            raise OptionError(" ".join([f"The model has no trainable parameter: {reasons}.", *told]))
        micro_batches = config.accumulate > 1 or config.divided
        reductions = {head.loss.reduction for head in self.heads}
        if micro_batches and len(reductions) > 1 and not self.scales:
            raise OptionError(
                "A training model adds up micro-batches of losses that are all means or all sums, but one loss is a "
                "mean and another a sum; give them one reduction."
            )
        own = self.copy()
        return StepSpec(
            model=own.model,
            build_loss=own.build_loss,
            targets=[*(head.target for head in own.heads), *own.scales.values()],
            parameters=self.parameters,
            optimizer=config.optimizer,
            clipping=config.clipping,
            micro_batches=micro_batches,
            alone=config.accumulate == 1,
            cleared=not config.divided,
            statistics=self.statistics,
            synchronized=config.synchronized,
            masks=config.masks,
            sparsified=self._blocks(config),
            names=self.names,
            options=config.gradients,
            weights=own.weights,
            rules=self.rules(config),
            averaging=config.ema,
            rounding=(None if config.precision.states is None else Rounding(config.precision.states, config.seed)),
            wide=self.wide,
            seed=config.seed,
            held=config.held,
        )

    def rules(self, config: TrainingConfig) -> dict[str, UpdateRule]:
        """Return the update rules of the parameters of groups, and of adapters with rates of their own."""
        rules = update_rules(config.groups, config.optimizer, self.table, self.model)
        for name, factor in ({} if self.adapted is None else self.adapted.rate_scales).items():
            rule = rules.get(name, UpdateRule(config.optimizer))
            rules[name] = rule._replace(rate_scale=rule.rate_scale * factor)
        for name, count in config.missed.items():
            rules[name] = rules.get(name, UpdateRule(config.optimizer))._replace(missed=count)
        return rules

    def resolve_metrics(self, metrics: Metrics) -> list[HeadMetric]:
        """Return metrics that read this model's predictions, from names or functions; by output if it has several."""
        if are_none(metrics):
            metrics = self.heads[0].loss.own_metrics if len(self.heads) == 1 else ()
        if are_none(metrics):
            return []
        if not self.heads:
            raise OptionError(
                "metrics compare predictions with targets, which this loss does not take; leave them out."
            )
        return metrics_of_heads(self.heads, metrics)

    def copy(self) -> Objective:
        """Return the objective on a clone of its graph."""
        model = self.model.clone()
        values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)

        def own(value: ir.Value) -> ir.Value:
            return values[str(value.name)]

        def input_like(value: ir.Value) -> ir.Value:
            return ir.Value(name=value.name, type=value.type, shape=value.shape)

        heads = [
            replace(
                head,
                output=own(head.output),
                prediction=own(head.prediction),
                target=input_like(head.target),
                inputs=tuple(model.graph.inputs),
                scores=head.scores.with_values(own),
            )
            for head in self.heads
        ]
        return replace(
            self,
            model=model,
            output=own(self.output),
            heads=heads,
            weights=None if self.weights is None else input_like(self.weights),
            scales={name: input_like(value) for name, value in self.scales.items()},
        )

    def build_loss(self, op: Builder) -> LossTerms:
        """Emit the loss into the graph of this objective, which is a copy."""
        names = self.part_names
        terms = self.build_losses(op)
        if not self.several:
            return terms[0]
        like = op.wrap(self.prediction)
        count = op.dimension(op.wrap(self.heads[0].target), 0)
        rows = op.cast(op.reshape(count, []), like.dtype).with_shape(())
        for index, head in enumerate(self.heads):
            if head.name in self.scales:
                own, scale = terms[index], op.cast(op.wrap(self.scales[head.name]), like.dtype)
                whole = own.loss if own.sums else own.loss * own.weight
                terms[index] = own._replace(loss=(op.cast(whole, like.dtype) * scale / rows).with_shape(()), sums=False)
        factors = [head.loss.weight for head in self.heads]
        factored = [
            own.loss if factor == 1.0 else own.loss * factor for own, factor in zip(terms, factors, strict=True)
        ]
        total = op.sum_of([op.cast(value, like.dtype) for value in factored]).with_shape(())
        parts = {name: own.loss for name, own in zip(names, terms, strict=True)}
        return LossTerms(total, rows, all(own.sums for own in terms), parts)

    def build_losses(self, op: Builder) -> list[LossTerms]:
        """Emit the losses: a single one with its factor, or several without."""
        prediction = op.wrap(self.prediction)
        if not self.heads:
            scalar = prediction if prediction.rank == 0 else op.reshape(prediction, op.ints()).with_shape(())
            return [LossTerms(scalar, _batch_size(op, self.model.graph, prediction))]
        weights = None if self.weights is None else op.wrap(self.weights)
        terms = [reduced(head.loss, head.build(op, weights)) for head in self.heads]
        factor = self.heads[0].loss.weight
        if self.several or factor == 1.0:
            return terms
        return [terms[0]._replace(loss=(terms[0].loss * factor).with_shape(()))]


def of_model(model: ir.Model) -> Objective:
    """Return the objective of a model without a loss, for predictions."""
    output = model.graph.outputs[0]
    return Objective(model, output, names=Names.beside(model.graph))


def _batch_size(op: Builder, graph: ir.Graph, like: Value) -> Value:
    for value in graph.inputs:
        shape = dimensions(value)
        if shape:
            return op.cast(examples(op, op.wrap(value)), like.dtype)
    return op.scalar(1, like)
