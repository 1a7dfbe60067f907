"""Pruning job: train, cut, fine-tune."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.data.opening import Source
from onnxtrain.errors import OptionError
from onnxtrain.graph.layers import Layer, layers
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.operators.arithmetic import Tensor
from onnxtrain.operators.measures import measure as find_measure
from onnxtrain.operators.sparsity import Layer as SparsityLayer
from onnxtrain.parameters.layouts import product_layouts
from onnxtrain.parameters.masks import choose_tensors, matmul_weights
from onnxtrain.parameters.readers import read_through_identity
from onnxtrain.plugins.pruning.options import Allocation, Plan
from onnxtrain.plugins.pruning.phases import Phases, Watch
from onnxtrain.plugins.pruning.recipe import Stage, dense_epochs
from onnxtrain.plugins.pruning.report import LayerRow, Point, PruneResult
from onnxtrain.plugins.pruning.thresholds import (
    FINE_TUNED,
    Cut,
    Form,
    Probe,
    check_sparsity,
    cubic,
    magnitude_cut,
    random_cut,
    search,
)
from onnxtrain.training.callbacks import Callback, TrainingState
from onnxtrain.training.config import Options
from onnxtrain.training.trainer import Trainer

_CURVE = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Sparsities at which the accuracy curve is measured."""


class PruningWarning(UserWarning):
    """A cut removed all weights of a tensor."""


@dataclass(frozen=True, kw_only=True)
class WeightPlan(Plan):
    """The options of a pruning of single weights or blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_one_of("allocation", get_args(Allocation))
        if self.n_m is not None:
            self._check_n_m(*self.n_m)
        elif (self.sparsity is None) == (self.accuracy_drop is None):
            raise OptionError("Pruning needs either sparsity= or accuracy_drop=, not both and not none.")
        if self.sparsity is not None:
            check_sparsity(self.sparsity)
        if self.accuracy_drop is not None and not 0 <= self.accuracy_drop < 1:
            raise OptionError(f"accuracy_drop is {self.accuracy_drop}; it needs a fraction of at least 0 and below 1.")
        if self.accuracy_drop is not None and self.validation is None:
            raise OptionError("accuracy_drop= is measured on validation data, which is missing; give validation=.")
        if self.rounds is not None and self.epochs is not None and self.rounds > max(self.epochs, 1):
            raise OptionError(
                f"rounds is {self.rounds}, but there are {self.epochs} epochs to cut after; give at least as many."
            )

    def _check_n_m(self, n: int, m: int) -> None:
        if not 1 <= n < m:
            raise OptionError(f"n_m is {self.n_m}; it needs n of at least 1 and a larger m, such as (2, 4).")
        if self.block != (1, 1):
            raise OptionError(f"n_m={self.n_m} and block={self.block} are two forms of sparsity; give one of them.")
        if self.accuracy_drop is not None or self.sparsity not in (None, 1 - n / m):
            raise OptionError(
                f"n_m={self.n_m} removes {1 - n / m:.2%} of the weights, so it takes no accuracy_drop= and no other "
                "sparsity=; leave them out."
            )
        if self.allocation != "global":
            raise OptionError(
                f"n_m={self.n_m} gives every tensor the same sparsity; allocation={self.allocation!r} changes nothing: "
                "leave it out."
            )

    @property
    def final_sparsity(self) -> float | None:
        """The sparsity of the last cut; ``None`` where a search finds it."""
        return self.sparsity if self.n_m is None else 1 - self.n_m[0] / self.n_m[1]

    def cut(self, weights: Mapping[str, np.ndarray], sparsity: float, form: Form) -> Cut:
        """Compute the cut at a sparsity."""
        if self.method == "random":
            # The same scores at every sparsity: a deeper cut removes a superset.
            return random_cut(weights, sparsity, form, generator=np.random.default_rng(self.seed))
        return magnitude_cut(weights, sparsity, form)


class Job:
    """One pruning."""

    def __init__(
        self,
        plan: WeightPlan,
        model: str | os.PathLike[str] | onnx.ModelProto,
        data: Source,
        loss: LossLike,
        options: Options,
    ) -> None:
        self.plan = plan
        self.trainer = Trainer(model, loss=loss, optimizer=plan.optimizer, **options)
        objective = self.trainer.objective
        self.names = choose_tensors(objective.shapes, plan.tensors, "tensors", objective.matmul_weights)
        if plan.tensors is not None and "sparsify" not in options:
            # Sparsity is promoted in the pruned tensors only.
            self.trainer.change_settings(sparsify=tuple(self.names))
        if not self.names:
            raise OptionError(
                "The model has nothing to prune: no parameter that is trained has rank 2 or more and is the weight "
                "of a product, a convolution, a recurrent layer or an embedding; "
                "choose others with tensors=."
            )
        self.form = Form(plan.block, plan.n_m, plan.allocation, held=dict(self.trainer.masks))
        if self.form.needs_layouts:
            self.form = replace(self.form, layouts=product_layouts(objective.model, self.names))
        if plan.save is not None and plan.storage == "dense":
            self.trainer.config.model.check_writable(plan.save)
        self.phases = Phases(self.trainer, data, plan)
        if plan.accuracy_drop is not None and self.phases.metric != "accuracy":
            raise OptionError("accuracy_drop= needs a loss of a classifier; for this loss give sparsity=.")
        self.probes: list[Probe] = []
        self.points: list[Point] = []
        self.curve: list[Point] = []
        self.reference: float | None = None
        self.max_scales: dict[str, float] = {}
        self.cut: Cut | None = None
        self.stage = Stage(None, 0, 1, 0)

    def run(self) -> PruneResult:
        """Train, cut, fine-tune, and return the result."""
        plan, trainer, phases = self.plan, self.trainer, self.phases
        before = phases.measure(trainer)
        given = self._weights()
        whole = trainer.get_weights()
        if plan.fresh:
            for name, value in fresh_values(trainer.objective.model.clone(), trainer.parameters, plan.seed).items():
                trainer.parameters[name] = value
        trained = self._run_stages()
        after = phases.measure(self.trainer)
        if not plan.fresh and plan.epochs != 0:
            after = self._or_cut_alone(given, whole, after)
        phases.say(f"result: {phases.metric} {after:.4f} at {self._cut().sparsity:.2%} zeros")
        tuned = self.stage.fine_tune_epochs > 0 and plan.method != "random"
        reached = (trained,) if plan.fresh else (before, trained)
        return phases.result(
            before,
            trained,
            after,
            layers=tuple(self._row(name) for name in self.names),
            points=tuple(self.points),
            curve=tuple(self.curve),
            probes=tuple(self.probes),
            masks=self._cut().masks,
            given=given,
            values=self.trainer.initializers(),
            file=self.trainer.config.model,
            names=self.trainer.data_names,
            shortfall=phases.shortfall(after, *reached) if tuned else "",
        )

    def _run_stages(self) -> float:
        """Train, cut and fine-tune, stage by stage; return the accuracy before the last cut."""
        plan = self.plan
        stages = self.phases.stages(plan.final_sparsity, zeros=_zeros(self._weights()))
        if len(stages) > 1:
            self._train_densely()
        trained = float("nan")
        for index, stage in enumerate(stages):
            self.stage = stage
            trained = self._train(stage, self.trainer.config.seed + (index > 0))
            if plan.accuracy_drop is not None and stage.fine_tune_epochs:
                self._deepen()
            self.trainer = self._fine_tuned()
        return trained

    def _train_densely(self) -> None:
        """Train a model that has learned nothing before the first cut, which one epoch shows."""
        phases, before = self.phases, self.phases.measure(self.trainer)
        for epochs in (1, dense_epochs(phases.examples)):
            trained = phases.train(self.trainer, "dense training", epochs)
            if not phases.is_lost(before, phases.measure(trained)):
                return
        self.trainer = trained

    def _train(self, stage: Stage, seed: int) -> float:
        """Train and cut; return the accuracy before the last cut."""
        cutters: list[_Cutter] = []

        def cutting(trainer: Trainer, watch: Watch) -> Sequence[Callback]:
            self.trainer = trainer
            cutters.append(_Cutter(self, watch))
            return cutters[-1:]

        if stage.epochs == 0:
            cutters.append(_Cutter(self, None))
            cutters[0].cut(1)
        else:
            self.trainer = self.phases.train(self.trainer, "training", stage.epochs, callbacks=cutting, seed=seed)
        done = cutters[-1]
        self.points += done.points
        self.curve += done.curve
        self.probes += done.probes
        return done.accuracy

    def _fine_tuned(self, enough: float | None = None) -> Trainer:
        """Return a trainer in which the remaining weights were trained with the plain rule."""
        seed = self.trainer.config.seed + 1
        return self.phases.train(self.trainer, "fine-tuning", self.stage.fine_tune_epochs, enough=enough, seed=seed)

    def _deepen(self) -> None:
        """Cut and fine-tune further, as long as the fine-tuned model stays within the allowed drop."""
        plan = self.plan
        assert plan.accuracy_drop is not None
        assert self.reference is not None
        bound = self.reference - plan.accuracy_drop
        size = sum(array.size for array in self._weights().values())
        best, kept = self.trainer, self._cut()

        def tuned(cut: Cut) -> float:
            self.trainer = best.rebuilt()
            self.apply(cut)
            self.trainer = self._fine_tuned(enough=bound)
            return self.phases.measure(self.trainer)

        def accept(cut: Cut) -> None:
            nonlocal best, kept
            best, kept = self.trainer, self._cut()

        _, probes = search(
            lambda sparsity: plan.cut(
                {name: np.array(best.parameters[name]) for name in self.names}, sparsity, self.form
            ),
            tuned,
            bound=bound,
            size=size,
            least=kept.sparsity,
            steps=FINE_TUNED,
            accept=accept,
        )
        self.trainer, self.cut = best, kept
        self.probes += probes

    def _or_cut_alone(self, given: dict[str, np.ndarray], whole: dict[str, np.ndarray], after: float) -> float:
        """Take the cut of the given model where that is better than the trained one; return the accuracy."""
        cut = self.plan.cut(given, self._cut().sparsity, self.form)
        if cut.emptied:
            return after
        tuned = self.trainer
        self.trainer = tuned.rebuilt()
        self.trainer.set_masks({**tuned.masks, **cut.masks})
        self.trainer.set_weights({**whole, **{name: np.where(cut.masks[name], given[name], 0) for name in given}})
        alone = self.phases.measure(self.trainer)
        if not self.phases.is_better(alone, after):
            self.trainer = tuned
            return after
        self.phases.say(f"the given model without training is better after the cut: {self.phases.metric} {alone:.4f}")
        self.cut = cut
        return alone

    def _weights(self) -> dict[str, np.ndarray]:
        return {name: np.array(self.trainer.parameters[name]) for name in self.names}

    def _cut(self) -> Cut:
        assert self.cut is not None
        return self.cut

    def apply(self, cut: Cut) -> None:
        """Set the masks of a cut."""
        for name in cut.emptied:
            warnings.warn(
                f"The cut to {cut.sparsity:.2%} zeros leaves nothing of {name!r}, so that the model may be constant; "
                "lower the sparsity, leave the tensor out with tensors=, or use allocation='uniform'.",
                PruningWarning,
                stacklevel=2,
            )
        held = self.trainer.masks  # of earlier cuts, or of a file whose zeros are kept
        masks = {name: mask & held[name] if name in held else mask for name, mask in cut.masks.items()}
        self.cut = replace(cut, masks=masks)
        self.trainer.set_masks({**held, **masks})

    def accuracy_of(self, weights: Mapping[str, np.ndarray], cut: Cut) -> float:
        """Return the accuracy after a cut, without fine-tuning; restore the weights afterwards."""
        try:
            for name, mask in cut.masks.items():
                self.trainer.parameters[name] = np.where(mask, weights[name], np.zeros_like(weights[name]))
            return self.phases.measure(self.trainer)
        finally:
            for name, array in weights.items():
                self.trainer.parameters[name] = array

    def note_scales(self) -> None:
        """Record the largest step scale of every tensor before a cut."""
        rule: Any = self.plan.optimizer
        if not rule.promotes_sparsity:
            return
        source = rule.sparsity_modifier or rule
        found = find_measure(source.measure, reweighting=source.reweighting, epsilon=source.epsilon, p=source.p)
        sparsified = self.trainer.objective.sparsified(self.trainer.config.sparsify)
        for name in self.names:
            if name in sparsified:
                block = self.form.layouts[name].block(*self.plan.block) if self.plan.block != (1, 1) else ()
                layer = SparsityLayer.of(Tensor(self.trainer.parameters[name]), found, block)
                scale = np.asarray(layer.scale(float(source.max_scale)).data)
                self.max_scales[name] = float(np.max(scale, initial=0.0))

    def _row(self, name: str) -> LayerRow:
        array = self.trainer.parameters[name]
        return LayerRow(
            name=name,
            shape=array.shape,
            size=array.size,
            non_zeros=int(np.count_nonzero(array)),
            threshold=self._cut().thresholds[name],
            max_scale=self.max_scales.get(name),
        )


def _zeros(weights: Mapping[str, np.ndarray]) -> float:
    return 1 - sum(int(np.count_nonzero(w)) for w in weights.values()) / sum(w.size for w in weights.values())


class _Cutter(Callback):
    """Cut at the ends of epochs, spread evenly over the training."""

    def __init__(self, job: Job, watch: Watch | None) -> None:
        self.job, self._watch = job, watch
        self.first = _zeros(job._weights())
        self.done = 0
        self.accuracy = float("nan")
        self.points: list[Point] = []
        self.curve: list[Point] = []
        self.probes: list[Probe] = []

    def on_epoch_end(self, state: TrainingState) -> None:
        """Make the cut that is due."""
        stage = self.job.stage
        due = state.epoch * stage.rounds // stage.epochs
        if due > self.done and not state.stop:
            self.cut(due)
            self.done = due

    def cut(self, part: int) -> None:
        """Make cut number ``part`` of the plan's rounds."""
        job, plan, stage = self.job, self.job.plan, self.job.stage
        weights, metric = job._weights(), job.phases.metric
        self.accuracy = job.phases.measure(job.trainer) if self._watch is None else self._watch.value
        job.note_scales()
        zeros = _zeros(weights)
        if part == stage.rounds and plan.n_m is None and stage.sparsity == plan.final_sparsity:
            for sparsity in (zeros, *(s for s in _CURVE if s > zeros)):
                cut = plan.cut(weights, sparsity, job.form)
                self.curve.append(Point(cut.sparsity, job.accuracy_of(weights, cut)))
        if stage.sparsity is not None:
            wanted = cubic(stage.sparsity, part, stage.rounds, first=min(self.first, stage.sparsity))
            cut = plan.cut(weights, wanted if plan.n_m is not None else max(zeros, wanted), job.form)
        else:
            cut = self._search(weights, zeros)
        job.apply(cut)
        accuracy = job.phases.measure(job.trainer)
        if self._watch is not None:
            self._watch.note_cut(accuracy)
        self.points.append(Point(cut.sparsity, accuracy))
        job.phases.say(
            f"cut {part} of {stage.rounds}: {cut.sparsity:.2%} zeros, "
            f"{metric} {self.accuracy:.4f} before, {accuracy:.4f} after"
        )

    def _search(self, weights: Mapping[str, np.ndarray], zeros: float) -> Cut:
        job, plan = self.job, self.job.plan
        assert plan.accuracy_drop is not None
        if job.reference is None or self.done == 0:
            job.reference = self.accuracy
        cut, probes = search(
            lambda sparsity: plan.cut(weights, sparsity, job.form),
            lambda cut: job.accuracy_of(weights, cut),
            bound=job.reference - plan.accuracy_drop,
            size=sum(array.size for array in weights.values()),
            least=zeros,
        )
        self.probes += probes
        return cut


def fresh_values(model: ir.Model, parameters: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Sample new initial values of parameters.

    Source: K. He, X. Zhang, S. Ren, J. Sun, "Delving Deep into Rectifiers", ICCV 2015.
    """
    generator = np.random.default_rng(seed)
    names = [name for name in parameters if name in model.graph.initializers]
    weights = set(matmul_weights(model, names))
    found = {str(layer.weight.name): layer for layer in layers(model.graph)}
    values = {}
    for name, array in parameters.items():
        readers = read_through_identity(model.graph.initializers[name]) if name in names else []
        node, index = next(iter(readers), (None, 0))
        if array.ndim >= 2 and (name in weights or sum(size > 1 for size in array.shape) > 1 or node is None):
            deviation = math.sqrt(2 / max(_fan_in(found.get(name), node, array.shape), 1))
            values[name] = (deviation * generator.standard_normal(array.shape)).astype(array.dtype)
        else:
            values[name] = np.full(array.shape, 1.0 if _scales(node, index) else 0.0, dtype=array.dtype)
    return values


def _scales(node: ir.Node | None, index: int) -> bool:
    if node is None:
        return False
    return node.op_type == "Mul" or (index == 1 and node.op_type.endswith("Normalization"))


def _fan_in(layer: Layer | None, node: ir.Node | None, shape: tuple[int, ...]) -> int:
    """Return the fan-in of a weight: the number of inputs that an output sums over."""
    if layer is not None and layer.inputs is not None:
        convolves = layer.form.channels == 1
        return math.prod(size for axis, size in enumerate(shape) if axis == layer.inputs or (convolves and axis > 1))
    return shape[-1] if node is not None and node.op_type in ("LSTM", "GRU", "RNN") else shape[-2]
