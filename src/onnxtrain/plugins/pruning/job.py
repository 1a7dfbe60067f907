"""Pruning job: train, cut, fine-tune."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from onnxtrain.data.opening import Source
from onnxtrain.errors import OptionError
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.operators import Optimizer
from onnxtrain.operators.arithmetic import Tensor
from onnxtrain.operators.measures import measure as find_measure
from onnxtrain.operators.sparsity import Layer
from onnxtrain.parameters.layouts import product_layouts
from onnxtrain.parameters.masks import choose_tensors
from onnxtrain.plugins.pruning.fresh import fresh_values
from onnxtrain.plugins.pruning.options import PruneOptions
from onnxtrain.plugins.pruning.phases import Phases, Watch, metric_of
from onnxtrain.plugins.pruning.recipe import Stage, choose_stages, dense_epochs
from onnxtrain.plugins.pruning.record import LayerRow, Point
from onnxtrain.plugins.pruning.report import PruneResult
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
from onnxtrain.training.callbacks.progress import Display
from onnxtrain.training.config import Options
from onnxtrain.training.trainer import Trainer

_CURVE = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Sparsities at which the accuracy curve is measured."""


class PruningWarning(UserWarning):
    """A cut removed all weights of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Plan(PruneOptions):
    """The options of a pruning, with its update rules chosen."""

    optimizer: Optimizer
    fine_tune_optimizer: Optimizer
    seed: int
    slower: bool = True

    def __post_init__(self) -> None:
        methods, allocations = ("ssgd", "magnitude", "random"), ("uniform", "global", "flops")
        for name, allowed in (("method", methods), ("allocation", allocations)):
            if getattr(self, name) not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise OptionError(f"{name} is {getattr(self, name)!r}; it needs to be one of {listed}.")
        if self.n_m is not None:
            self._check_n_m(*self.n_m)
        elif (self.sparsity is None) == (self.accuracy_drop is None):
            raise OptionError("Pruning needs either sparsity= or accuracy_drop=, not both and not none.")
        if self.sparsity is not None:
            check_sparsity(self.sparsity)
        if self.accuracy_drop is not None and not 0 <= self.accuracy_drop < 1:
            raise OptionError(f"accuracy_drop is {self.accuracy_drop}; it needs a fraction of at least 0 and below 1.")
        for name, least in (("epochs", 0), ("fine_tune_epochs", 0), ("rounds", 1)):
            if (given := getattr(self, name)) is not None and given < least:
                raise OptionError(f"{name} is {given}; it needs a number of at least {least}.")
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

    def form(self) -> Form:
        """Return the form of the cuts, without the layouts of the tensors."""
        return Form(self.block, self.n_m, self.allocation)

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
        plan: Plan,
        model: str | os.PathLike[str] | onnx.ModelProto,
        loss: LossLike,
        target: str | None,
        options: Options,
        say: Callable[[str], None],
        display: Display,
    ) -> None:
        self.plan, self.target, self.say, self._display = plan, target, say, display
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
        self.form = replace(plan.form(), held=dict(self.trainer.masks))
        if self.form.needs_layouts:
            self.form = replace(self.form, layouts=product_layouts(objective.model, self.names))
        if plan.accuracy_drop is not None and metric_of(self.trainer) != "accuracy":
            raise OptionError("accuracy_drop= needs a loss of a classifier; for this loss give sparsity=.")
        self.probes: list[Probe] = []
        self.points: list[Point] = []
        self.curve: list[Point] = []
        self.reference: float | None = None
        self.max_scales: dict[str, float | None] = {}
        self.cut: Cut | None = None
        self.stage = Stage(None, 0, 1, 0)

    def run(self, data: Source, validation: Source | float | None) -> PruneResult:
        """Train, cut, fine-tune, and return the result."""
        plan, trainer = self.plan, self.trainer
        self.phases = phases = Phases(
            trainer,
            data,
            validation,
            plan,
            target=self.target,
            slower=plan.slower,
            say=self.say,
            display=self._display,
        )
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
        metric = phases.metric
        self.say(f"result: {metric} {after:.4f} at {self._cut().sparsity:.2%} zeros")
        tuned = self.stage.fine_tune_epochs > 0 and plan.method != "random"
        return PruneResult(
            method=plan.method,
            optimizer=repr(plan.optimizer),
            allocation=plan.allocation,
            block=plan.block,
            n_m=plan.n_m,
            metric=metric,
            measured_on=phases.measured_on,
            accuracy_before=before,
            accuracy_trained=trained,
            accuracy_after=after,
            layers=tuple(self._row(name) for name in self.names),
            points=tuple(self.points),
            curve=tuple(self.curve),
            probes=tuple(self.probes),
            masks=self._cut().masks,
            given=given,
            values=self.trainer.initializers(),
            file=self.trainer.config.model,
            names=self.trainer.data_names,
            shortfall=phases.shortfall(after, (trained,) if plan.fresh else (before, trained), plan) if tuned else "",
        )

    def _run_stages(self) -> float:
        """Train, cut and fine-tune, stage by stage; return the accuracy before the last cut."""
        plan = self.plan
        stages = choose_stages(
            plan.final_sparsity,
            zeros=_zeros(self._weights()),
            examples=self.phases.examples,
            epochs=plan.epochs,
            rounds=plan.rounds,
            fine_tune_epochs=plan.fine_tune_epochs,
        )
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
            trained = phases.train(
                self.trainer, "dense training", optimizer=self.plan.optimizer.plain(), epochs=epochs, schedule=None
            )
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
            self.trainer = self.phases.train(
                self.trainer,
                "training",
                optimizer=self.plan.optimizer,
                epochs=stage.epochs,
                schedule=self.plan.schedule,
                callbacks=cutting,
                seed=seed,
            )
        done = cutters[-1]
        self.points += done.points
        self.curve += done.curve
        self.probes += done.probes
        return done.accuracy

    def _fine_tuned(self, enough: float | None = None) -> Trainer:
        """Return a trainer in which the remaining weights were trained with the plain rule."""
        plan = self.plan
        return self.phases.train(
            self.trainer,
            "fine-tuning",
            optimizer=plan.fine_tune_optimizer,
            epochs=self.stage.fine_tune_epochs,
            schedule=plan.fine_tune_schedule,
            enough=enough,
            seed=self.trainer.config.seed + 1,
        )

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
        self.say(f"the given model without training is better after the cut: {self.phases.metric} {alone:.4f}")
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
        layer_of, cap = _scaling(self.plan.optimizer)
        sparsified = self.trainer.objective.sparsified(self.trainer.config.sparsify)
        for name in self.names:
            promoted = layer_of is not None and name in sparsified
            scale = None
            if promoted and layer_of is not None:
                block = self.form.layouts[name].block(*self.plan.block) if self.plan.block != (1, 1) else ()
                scale = layer_of(self.trainer.parameters[name], block).scale(cap).data
            self.max_scales[name] = None if scale is None else float(np.max(np.asarray(scale), initial=0.0))

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


def _scaling(optimizer: Optimizer) -> tuple[Callable[[np.ndarray, Sequence[int]], Layer] | None, float]:
    """Return the function that computes a layer's sparsity weights (None without promotion), and the scale's cap."""
    if not optimizer.promotes_sparsity:
        return None, 0.0
    source: Any = optimizer.sparsity_modifier or optimizer
    found = find_measure(source.measure, reweighting=source.reweighting, epsilon=source.epsilon, p=source.p)
    return (lambda array, block: Layer.of(Tensor(array), found, block)), float(source.max_scale)


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
        job.say(
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
