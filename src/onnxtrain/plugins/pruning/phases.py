"""The trainings of a pruning: they keep the best point seen, and start again more slowly where they do harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from onnxtrain.data import split_validation
from onnxtrain.data.opening import Source
from onnxtrain.errors import NumericalError
from onnxtrain.losses import BinaryCrossEntropy, Distillation, SoftmaxCrossEntropy
from onnxtrain.operators import Optimizer
from onnxtrain.plugins.pruning.recipe import choose_batch_size, choose_schedule
from onnxtrain.training.callbacks import Callback, TrainingState
from onnxtrain.training.callbacks.progress import Display, Progress, StepsOf
from onnxtrain.training.schedules import Schedule
from onnxtrain.training.trainer import Trainer

_SLOWEST: Final = 27
"""Largest divisor of the default learning rate, which each training that does harm divides by three."""

_MOST_LOST: Final = 0.1
"""Accuracy that a model may lose: a training that loses more starts again, a pruning that loses more has failed."""

_HOPELESS: Final = 0.4
"""Fraction of its accuracy that a model may lose in a pruning whose epochs or update rules the user chose."""


class _Settings(Protocol):
    """The settings of single weights and of structures that the trainings need."""

    @property
    def batch_size(self) -> int | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def epochs(self) -> int | None: ...
    @property
    def fine_tune_epochs(self) -> int | None: ...


def metric_of(trainer: Trainer) -> str:
    """Return the metric of a pruning: the accuracy of a classifier, or the loss."""
    classifies = isinstance(trainer.objective.loss, (SoftmaxCrossEntropy, BinaryCrossEntropy, Distillation))
    return "accuracy" if classifies else "loss"


def _readable_again(data: Any) -> Any:
    return list(data) if hasattr(data, "__next__") else data


class Phases:
    """The data of a pruning, and the trainings on them."""

    def __init__(
        self,
        trainer: Trainer,
        data: Source,
        validation: Source | float | None,
        settings: _Settings,
        *,
        target: str | None,
        slower: bool,
        say: Callable[[str], None],
        display: Display,
    ) -> None:
        self.metric = metric_of(trainer)
        self.measured_on = "training data" if validation is None else "validation data"
        data, validation = _readable_again(data), _readable_again(validation)
        if isinstance(validation, float):
            parts = split_validation(trainer.open_data(data, target=target), validation, settings.seed)
            data, validation = parts.train, parts.validation
        self._data, self._measured, self._target = data, data if validation is None else validation, target
        self.opened = trainer.open_data(data, target=target)
        self.examples = self.opened.size
        self.batch_size = settings.batch_size or choose_batch_size(self.examples)
        self.say, self._slower = say, slower
        self._divisor, self._shown = 1, Progress(StepsOf(display))

    def measure(self, trainer: Trainer) -> float:
        """Return the accuracy of a trainer's model, or the loss if it does not classify."""
        metrics = ["accuracy"] if self.metric == "accuracy" else []
        return float(trainer.evaluate(self._measured, target=self._target, metrics=metrics)[self.metric])

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

    def shortfall(self, after: float, reached: Sequence[float], settings: _Settings) -> str:
        """Return a sentence about a result that lost what the model had reached; "" for a good one."""
        given = (settings.epochs, settings.fine_tune_epochs, getattr(settings, "rounds", None))
        own = not self._slower or any(number is not None for number in given)
        best = reached[0]
        for value in reached[1:]:
            best = value if self.is_better(value, best) else best
        if not self.is_lost(after, best, hopelessly=own):
            return ""
        return (
            f"The pruned model has the {self.metric} {after:.4f}, but {best:.4f} was reached before the cut, and "
            "fine-tuning did not make up for it; remove less, or fine-tune longer or at another learning rate."
        )

    def train(
        self,
        start: Trainer,
        phase: str,
        *,
        optimizer: Optimizer,
        epochs: int,
        schedule: str | Schedule | None,
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
        first, weights, tunes = self.measure(start), start.get_weights(), phase != "training"
        batches = self.opened.batch_count(self.batch_size)
        chosen = schedule or choose_schedule(None if batches is None else epochs * batches, falling=tunes)
        while True:
            may_slow = self._slower and self._divisor < _SLOWEST
            rate = optimizer.learning_rate / self._divisor
            rule = replace(optimizer, learning_rate=rate) if self._divisor > 1 else optimizer
            trainer = start.rebuilt(optimizer=rule, **changes)
            trainer.set_weights(weights)
            watch = Watch(self, trainer, phase, first, weights if tunes else None, stops=may_slow, enough=enough)
            try:
                trainer.fit(
                    self._data,
                    target=self._target,
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
