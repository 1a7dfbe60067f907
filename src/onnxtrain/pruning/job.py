"""Pruning job: train, cut, fine-tune."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx

from onnxtrain.callbacks import Callback, TrainingState
from onnxtrain.callbacks.progress import Display, Progress, StepsOf
from onnxtrain.config import Options
from onnxtrain.data import split_validation
from onnxtrain.errors import OptionError
from onnxtrain.losses import BinaryCrossEntropy, Distillation, SoftmaxCrossEntropy
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.operators import Optimizer
from onnxtrain.operators.arithmetic import Tensor
from onnxtrain.operators.measures import measure as find_measure
from onnxtrain.operators.sparsity import Layer
from onnxtrain.pruning.fresh import fresh_values
from onnxtrain.pruning.recipe import Stage, choose_batch_size, choose_schedule, choose_stages
from onnxtrain.pruning.record import LayerRow, Point
from onnxtrain.pruning.report import PruneResult
from onnxtrain.pruning.thresholds import (
    Allocation,
    Cut,
    Form,
    Probe,
    check_sparsity,
    cubic,
    magnitude_cut,
    random_cut,
    search,
)
from onnxtrain.schedules import Schedule
from onnxtrain.trained_model import Source
from onnxtrain.trainer import Trainer
from onnxtrain.weights.layouts import product_layouts
from onnxtrain.weights.masks import choose_tensors

Method = Literal["ssgd", "magnitude", "random"]

_CURVE = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Sparsities at which the accuracy curve is measured."""


class PruningWarning(UserWarning):
    """A cut removed all weights of a tensor."""


@dataclass(frozen=True)
class Plan:
    """Settings of a pruning; the arguments of :func:`prune`.

    Raises:
        OptionError: An argument is outside its range, or two contradict each other.
    """

    method: Method
    sparsity: float | None
    accuracy_drop: float | None
    allocation: Allocation
    block: tuple[int, int]
    n_m: tuple[int, int] | None
    optimizer: Optimizer
    fine_tune_optimizer: Optimizer
    tensors: str | Sequence[str] | None
    epochs: int | None
    fine_tune_epochs: int | None
    rounds: int | None
    fresh: bool
    batch_size: int | None
    schedule: str | Schedule | None
    fine_tune_schedule: str | Schedule | None
    seed: int

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


def metric_of(trainer: Trainer) -> str:
    """Return the metric of a pruning: the accuracy of a classifier, or the loss."""
    classifies = isinstance(trainer._objective.loss, (SoftmaxCrossEntropy, BinaryCrossEntropy, Distillation))
    return "accuracy" if classifies else "loss"


class Job:
    """One pruning.

    Args:
        plan: The settings.
        model: The model.
        loss: The loss.
        target: Name of the target array.
        options: Further arguments of the trainers.
        say: Called with a line after every epoch and cut.
        display: Shows the steps.
    """

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
        self.shown = Progress(StepsOf(display))
        self.plan, self.target, self.say = plan, target, say
        self.trainer = Trainer(model, loss=loss, optimizer=plan.optimizer, **options)
        objective = self.trainer._objective
        self.names = choose_tensors(objective.shapes, plan.tensors, "tensors", objective.matmul_weights)
        if plan.tensors is not None and "sparsify" not in options:
            # Sparsity is promoted in the pruned tensors only.
            self.trainer._change(replace(self.trainer.config, sparsify=tuple(self.names)))
        if not self.names:
            raise OptionError(
                "The model has nothing to prune: no parameter that is trained has rank 2 or more and is the weight "
                "of a product, a convolution, a recurrent layer or an embedding; "
                "choose others with tensors=."
            )
        self.form = plan.form()
        if self.form.needs_layouts:
            self.form = replace(self.form, layouts=product_layouts(objective.model, self.names))
        self.metric = metric_of(self.trainer)
        if plan.accuracy_drop is not None and self.metric != "accuracy":
            raise OptionError("accuracy_drop= needs a loss of a classifier; for this loss give sparsity=.")
        self.probes: list[Probe] = []
        self.points: list[Point] = []
        self.curve: list[Point] = []
        self.reference: float | None = None
        self.max_scales: dict[str, float | None] = {}
        self.cut: Cut | None = None
        self.stage = Stage(None, 0, 1, 0)
        self.batch_size = plan.batch_size or 0
        self.steps: int | None = None  # of an epoch

    def run(self, data: Source, validation: Source | float | None) -> PruneResult:
        """Train, cut, fine-tune, and return the result."""
        plan, trainer = self.plan, self.trainer
        measured_on = "training data" if validation is None else "validation data"
        if isinstance(validation, float):
            parts = split_validation(trainer._open(data, target=self.target), validation, plan.seed)
            data, validation = parts.train, parts.validation
        self.measured: Source = data if validation is None else validation
        before = self.measure(trainer)
        given = self._weights()
        if plan.fresh:
            for name, value in fresh_values(trainer._objective.model.clone(), trainer.parameters, plan.seed).items():
                trainer.parameters[name] = value
        once = hasattr(data, "__next__")  # a generator, which opening would use up
        opened = None if once else trainer._open(data, target=self.target)
        examples = None if opened is None else opened.size
        self.batch_size = plan.batch_size or choose_batch_size(examples)
        self.steps = None if opened is None else opened.batch_count(self.batch_size)
        trained = self._run_stages(data, examples)
        after = self.measure(self.trainer)
        self.say(f"result: {self.metric} {after:.4f} at {self._cut().sparsity:.2%} zeros")
        return PruneResult(
            method=plan.method,
            optimizer=repr(plan.optimizer),
            allocation=plan.allocation,
            block=plan.block,
            n_m=plan.n_m,
            metric=self.metric,
            measured_on=measured_on,
            accuracy_before=before,
            accuracy_trained=trained,
            accuracy_after=after,
            layers=tuple(self._row(name) for name in self.names),
            points=tuple(self.points),
            curve=tuple(self.curve),
            probes=tuple(self.probes),
            masks=self._cut().masks,
            given=given,
            values={name: np.array(array) for name, array in self.trainer._initializers().items()},
            file=self.trainer._file,
            names=self.trainer._names,
        )

    def measure(self, trainer: Trainer) -> float:
        """Return the accuracy of a trainer's model, or the loss if it does not classify."""
        metrics = ["accuracy"] if self.metric == "accuracy" else []
        return float(trainer.evaluate(self.measured, target=self.target, metrics=metrics)[self.metric])

    def _run_stages(self, data: Source, examples: int | None) -> float:
        """Train, cut and fine-tune, stage by stage; return the accuracy before the last cut."""
        plan = self.plan
        stages = choose_stages(
            plan.final_sparsity,
            zeros=_zeros(self._weights()),
            examples=examples,
            epochs=plan.epochs,
            rounds=plan.rounds,
            fine_tune_epochs=plan.fine_tune_epochs,
        )
        trained = float("nan")
        for index, stage in enumerate(stages):
            if index:
                self.trainer = self.trainer._rebuilt(optimizer=plan.optimizer, seed=self.trainer.config.seed + 1)
            self.stage = stage
            trained = self._train(data, stage)
            self._fine_tune(data, stage)
        return trained

    def _train(self, data: Source, stage: Stage) -> float:
        """Train and cut; return the accuracy before the last cut."""
        plan, cutter = self.plan, _Cutter(self)
        if stage.epochs == 0:
            cutter.cut(1)
        else:
            self.trainer.fit(
                data,
                target=self.target,
                epochs=stage.epochs,
                batch_size=self.batch_size,
                schedule=plan.schedule or self._schedule(stage.epochs, falling=False),
                callbacks=[cutter, self.shown],
            )
        return cutter.accuracy

    def _fine_tune(self, data: Source, stage: Stage) -> None:
        """Train the remaining weights with the plain rule, in a new trainer with fresh optimizer states."""
        plan, trained = self.plan, self.trainer
        if stage.fine_tune_epochs == 0:
            return
        self.trainer = trained._rebuilt(optimizer=plan.fine_tune_optimizer, seed=trained.config.seed + 1)
        self.trainer.fit(
            data,
            target=self.target,
            epochs=stage.fine_tune_epochs,
            batch_size=self.batch_size,
            schedule=plan.fine_tune_schedule or self._schedule(stage.fine_tune_epochs, falling=True),
            callbacks=[_Lines(self, "fine-tuning"), self.shown],
        )

    def _schedule(self, epochs: int, *, falling: bool) -> str:
        return choose_schedule(None if self.steps is None else epochs * self.steps, falling=falling)

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
            return self.measure(self.trainer)
        finally:
            for name, array in weights.items():
                self.trainer.parameters[name] = array

    def note_scales(self) -> None:
        """Record the largest step scale of every tensor before a cut."""
        layer_of, cap = _scaling(self.plan.optimizer)
        for name in self.names:
            promoted = layer_of is not None and name in self.trainer._sparsified
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


class _Lines(Callback):
    """Print a line after every epoch."""

    def __init__(self, job: Job, phase: str) -> None:
        self.job, self.phase = job, phase

    def on_epoch_end(self, state: TrainingState) -> None:
        self.job.say(f"{self.phase}: epoch {state.epoch} of {state.epochs}, loss {state.loss:.4f}")


class _Cutter(_Lines):
    """Cut at the ends of epochs, spread evenly over the training."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, "training")
        self.first = _zeros(job._weights())
        self.done = 0
        self.accuracy = float("nan")

    def on_epoch_end(self, state: TrainingState) -> None:
        super().on_epoch_end(state)
        stage = self.job.stage
        due = state.epoch * stage.rounds // stage.epochs
        if due > self.done:
            self.cut(due)
            self.done = due

    def cut(self, part: int) -> None:
        """Make cut number ``part`` of the plan's rounds."""
        job, plan, stage = self.job, self.job.plan, self.job.stage
        weights = job._weights()
        self.accuracy = job.measure(job.trainer)
        job.note_scales()
        zeros = _zeros(weights)
        if part == stage.rounds and plan.n_m is None and stage.sparsity == plan.final_sparsity:
            for sparsity in (zeros, *(s for s in _CURVE if s > zeros)):
                cut = plan.cut(weights, sparsity, job.form)
                job.curve.append(Point(cut.sparsity, job.accuracy_of(weights, cut)))
        if stage.sparsity is not None:
            wanted = cubic(stage.sparsity, part, stage.rounds, first=min(self.first, stage.sparsity))
            cut = plan.cut(weights, wanted if plan.n_m is not None else max(zeros, wanted), job.form)
        else:
            cut = self._search(weights, zeros)
        job.apply(cut)
        accuracy = job.measure(job.trainer)
        job.points.append(Point(cut.sparsity, accuracy))
        job.say(
            f"cut {part} of {stage.rounds}: {cut.sparsity:.2%} zeros, "
            f"{job.metric} {self.accuracy:.4f} before, {accuracy:.4f} after"
        )

    def _search(self, weights: Mapping[str, np.ndarray], zeros: float) -> Cut:
        job, plan = self.job, self.job.plan
        assert plan.accuracy_drop is not None
        if job.reference is None:
            job.reference = self.accuracy
        cut, probes = search(
            lambda sparsity: plan.cut(weights, sparsity, job.form),
            lambda cut: job.accuracy_of(weights, cut),
            bound=job.reference - plan.accuracy_drop,
            size=sum(array.size for array in weights.values()),
            least=zeros,
        )
        job.probes += probes
        return cut
