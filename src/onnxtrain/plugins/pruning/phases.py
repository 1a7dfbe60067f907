"""The trainings of a pruning: they keep the best point seen, and start again more slowly where they do harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from onnxtrain.data import split_validation
from onnxtrain.data.opening import Source
from onnxtrain.errors import NumericalError
from onnxtrain.errors.hints import Hint, warn_of
from onnxtrain.losses import BinaryCrossEntropy, Distillation, SoftmaxCrossEntropy
from onnxtrain.plugins.pruning.options import Plan
from onnxtrain.plugins.pruning.recipe import Stage, choose_batch_size, choose_schedule, choose_stages
from onnxtrain.plugins.pruning.report import PruneResult
from onnxtrain.training.callbacks import Callback, TrainingState
from onnxtrain.training.callbacks.progress import Display, Progress, StepsOf
from onnxtrain.training.loop import examples_per_step, fixed_batch_hints
from onnxtrain.training.trainer import Trainer

Phase = Literal["dense training", "training", "fine-tuning"]

_SLOWEST: Final = 27
"""Largest divisor of the default learning rate, which each training that does harm divides by three."""

_MOST_LOST: Final = 0.1
"""Accuracy that a model may lose: a training that loses more starts again, a pruning that loses more has failed."""

_HOPELESS: Final = 0.4
"""Fraction of its accuracy that a model may lose in a pruning whose epochs or update rules the user chose."""


def _readable_again(data: Any) -> Any:
    return list(data) if hasattr(data, "__next__") else data


class Phases:
    """The data of a pruning, and the trainings on them."""

    def __init__(self, trainer: Trainer, data: Source, plan: Plan) -> None:
        classifies = isinstance(trainer.objective.loss, (SoftmaxCrossEntropy, BinaryCrossEntropy, Distillation))
        self.plan, self.metric = plan, "accuracy" if classifies else "loss"
        data, validation = _readable_again(data), _readable_again(plan.validation)
        self.measured_on = "training data" if validation is None else "validation data"
        if isinstance(validation, float):
            parts = split_validation(trainer.open_data(data, target=plan.target), validation, plan.seed)
            data, validation = parts.train, parts.validation
        self._data, self._measured = data, data if validation is None else validation
        self.opened = trainer.open_data(data, target=plan.target)
        self.examples = self.opened.size
        wanted = plan.batch_size or choose_batch_size(self.examples)
        warn_of(Hint(text, surprising=True) for text in fixed_batch_hints(trainer.executor, self.opened, wanted))
        self.batch_size = examples_per_step(trainer.executor, self.opened, wanted)  # which needs no hint again
        shown = plan.progress
        display = shown if isinstance(shown, Display) else Display()
        self.say = display.note if shown is None or isinstance(shown, Display) else shown
        self._divisor, self._shown = 1, Progress(StepsOf(display))

    def stages(self, sparsity: float | None, *, zeros: float = 0.0) -> list[Stage]:
        """Return the stages of the pruning of a model with a fraction of zeros."""
        plan = self.plan
        return choose_stages(
            sparsity,
            zeros=zeros,
            examples=self.examples,
            epochs=plan.epochs,
            rounds=plan.rounds,
            fine_tune_epochs=plan.fine_tune_epochs,
        )

    def result(self, before: float, trained: float, after: float, **found: Any) -> PruneResult:
        """Return the result of the pruning from the accuracies as given, before the last cut, and at the end."""
        plan = self.plan
        return PruneResult(
            method=plan.method,
            optimizer=repr(plan.optimizer),
            allocation=plan.allocation,
            block=plan.block,
            n_m=plan.n_m,
            metric=self.metric,
            measured_on=self.measured_on,
            accuracy_before=before,
            accuracy_trained=trained,
            accuracy_after=after,
            **found,
        )

    def measure(self, trainer: Trainer) -> float:
        """Return the accuracy of a trainer's model, or the loss if it does not classify."""
        metrics = ["accuracy"] if self.metric == "accuracy" else []
        return float(trainer.evaluate(self._measured, target=self.plan.target, metrics=metrics)[self.metric])

    def is_better(self, one: float, other: float) -> bool:
        """Return whether the first of two results is better."""
        return one > other if self.metric == "accuracy" else one < other

    def is_lost(self, value: float, best: float, *, hopelessly: bool = False) -> bool:
        """Return whether a result is so much worse than another that the model has lost what it had learned."""
        if self.metric == "accuracy":
            most = _HOPELESS * best if hopelessly else _MOST_LOST
        else:
            most = (3 if hopelessly else 1) * abs(best)
        return not np.isfinite(value) or (self.is_better(best, value) and abs(best - value) > most)

    def shortfall(self, after: float, *reached: float) -> str:
        """Return a sentence about a result that lost what the model had reached; "" for a good one."""
        plan, best = self.plan, (max if self.metric == "accuracy" else min)(reached)
        own = not plan.slower or any(given is not None for given in (plan.epochs, plan.fine_tune_epochs, plan.rounds))
        if not self.is_lost(after, best, hopelessly=own):
            return ""
        return (
            f"The pruned model has the {self.metric} {after:.4f}, but {best:.4f} was reached before the cut, and "
            "fine-tuning did not make up for it; remove less, or fine-tune longer or at another learning rate."
        )

    def train(
        self,
        start: Trainer,
        phase: Phase,
        epochs: int,
        *,
        callbacks: Callable[[Trainer, Watch], Sequence[Callback]] = lambda trainer, watch: (),
        enough: float | None = None,
        **changes: Any,
    ) -> Trainer:
        """Return a new trainer that has trained from the weights of another one.

        Where the default optimizer diverges, or loses what the model had learned, the training starts again at a third
        of the learning rate.
        """
        if not epochs:
            return start
        plan = self.plan
        optimizer, schedule = {
            "dense training": (plan.optimizer.plain(), None),
            "training": (plan.optimizer, plan.schedule),
            "fine-tuning": (plan.fine_tune_optimizer, plan.fine_tune_schedule),
        }[phase]
        first, weights, tunes = self.measure(start), start.get_weights(), phase != "training"
        batches = self.opened.batch_count(self.batch_size)
        chosen = schedule or choose_schedule(None if batches is None else epochs * batches, falling=tunes)
        while True:
            may_slow = plan.slower and self._divisor < _SLOWEST
            rate = optimizer.learning_rate / self._divisor
            rule = replace(optimizer, learning_rate=rate) if self._divisor > 1 else optimizer
            trainer = start.rebuilt(optimizer=rule, **changes)
            trainer.set_weights(weights)
            watch = Watch(self, trainer, phase, first, weights if tunes else None, stops=may_slow, enough=enough)
            try:
                trainer.fit(
                    self._data,
                    target=plan.target,
                    epochs=epochs,
                    batch_size=self.batch_size,
                    schedule=chosen,
                    callbacks=[watch, *callbacks(trainer, watch), self._shown],
                )
            except NumericalError:
                if not may_slow and not tunes:
                    raise
                watch.lost = may_slow
            if not watch.lost:
                if watch.weights is not None:
                    trainer.set_weights(watch.weights)
                return trainer
            self._divisor *= 3
            self.say(
                f"the {phase} diverged; it starts again with a learning rate of "
                f"{optimizer.learning_rate / self._divisor:.2g}"
            )


class Watch(Callback):
    """Measure after every epoch, remember the best point of a fine-tuning, and stop a training that does harm.

    Attributes:
        value: The result after the last epoch, or after the cut that followed it.
        best: The best result so far, less what cuts took.
        weights: The weights of the best point of a fine-tuning; ``None`` for a training.
        lost: True if the training has lost what the model had learned.
    """

    def __init__(
        self,
        phases: Phases,
        trainer: Trainer,
        phase: str,
        first: float,
        weights: dict[str, np.ndarray] | None,
        *,
        stops: bool,
        enough: float | None,
    ) -> None:
        self._phases, self._trainer, self._phase, self._stops, self._enough = phases, trainer, phase, stops, enough
        self.value, self.best, self.weights, self.lost = first, first, weights, False
        self._first, self._low = first, False

    def note_cut(self, value: float) -> None:
        """Expect less by what a cut took, from now on."""
        self.best, self._first = self.best + value - self.value, self._first + value - self.value
        self.value = value

    def on_epoch_end(self, state: TrainingState) -> None:
        """Measure, print a line, and decide."""
        phases = self._phases
        phases.say(f"{self._phase}: epoch {state.epoch} of {state.epochs}, loss {state.loss:.4f}")
        self.value = phases.measure(self._trainer)
        if not phases.is_better(self.best, self.value) and np.isfinite(self.value):
            self.best = self.value
            if self.weights is not None:
                self.weights = self._trainer.get_weights()
        low = phases.is_lost(self.value, self.best)
        if phases.metric == "loss":  # of a model that had learned nothing, a loss may double and fall again
            low = low and phases.is_better(self._first, self.value)
        if low and self._stops and (self._low or state.epoch == state.epochs):
            self.lost = True
            state.request_stop("it lost what the model had learned")
        self._low = low
        if self._enough is not None and not phases.is_better(self._enough, self.best):
            state.request_stop("the model is as good as asked for")
