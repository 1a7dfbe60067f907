"""Find a learning rate by a short training at rising rates."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.data.naming import TargetNames
from onnxtrain.errors import NumericalError, OptionError, TrainingHint
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.training.callbacks import Callback, TrainingState
from onnxtrain.training.trainer import Trainer

_MEMORY = 0.98
"""Weight of the earlier losses in the smoothed one."""

_FEWEST = 10
"""Fewest steps that suggest a rate."""

_DIVERGED = 4.0
"""Multiple of the least smoothed loss at which the training ends."""


@dataclass(frozen=True)
class LearningRates:
    """Losses of a short training at rising learning rates.

    Attributes:
        rates: The learning rate of each step.
        losses: The loss of each step, smoothed by an exponential moving average.
        suggestion: A rate in the longest fall of the loss, halfway down: fastai's "valley".
    """

    rates: np.ndarray
    losses: np.ndarray
    suggestion: float


class _Record(Callback):
    """Keep rates and smoothed losses, until the loss diverges or the steps are done."""

    def __init__(self, steps: int) -> None:
        self.steps, self.rates, self.losses, self._mean = steps, list[float](), list[float](), 0.0

    def on_step_end(self, state: TrainingState) -> None:
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * state.loss
        self.rates.append(state.rate_of_last_step)
        self.losses.append(self._mean / (1 - _MEMORY ** len(self.rates)))
        if len(self.rates) == self.steps or self.losses[-1] > _DIVERGED * min(self.losses):
            state.request_stop("the learning rates are measured")


@checks_arguments
def find_learning_rate(
    trainer: Trainer,
    data: Any,
    y: Any = None,
    *,
    target: TargetNames | None = None,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    batch_size: int = 32,
) -> LearningRates:
    """Train a copy for some steps at rising learning rates; return the losses and a rate at which they fall.

    The trainer stays as it was. This is the learning-rate range test; smoothing and suggestion are those of fastai.

    Args:
        trainer: The trainer, whose weights are the first ones.
        data: Training data in any form that ``fit`` takes; with ``y`` the inputs alone.
        y: The targets, where ``data`` has none.
        target: The name of the target in a table, as in ``fit``.
        lowest: The first rate.
        highest: The last rate; the rates between grow by one factor.
        steps: Number of steps, at least 20; fewer where the loss reaches four times its least value before.
        batch_size: Examples per step.

    Raises:
        OptionError: The rates do not rise, there are too few steps, or the loss diverges before it falls.

    Example:
        >>> import onnxtrain
        >>> x, y = onnxtrain.examples.points()
        >>> trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 16, 3)), loss="cross_entropy")
        >>> found = onnxtrain.find_learning_rate(trainer, x, y)
        >>> trainer.learning_rate = found.suggestion
        >>> 1e-4 < found.suggestion < 1
        True
    """
    if not isinstance(trainer, Trainer):
        raise OptionError(
            f"trainer is a {type(trainer).__name__}; find_learning_rate needs an onnxtrain.Trainer, which has the loss "
            "and the optimizer."
        ).about("trainer", got=type(trainer).__name__)
    if not 0 < lowest < highest < math.inf or steps < 20:
        raise OptionError(
            f"lowest is {lowest:g}, highest {highest:g}, steps {steps}; it needs rates above 0 that rise, and at least "
            "20 steps."
        )
    record, factor = _Record(steps), (highest / lowest) ** (1 / (steps - 1))
    with contextlib.suppress(NumericalError), warnings.catch_warnings():  # the last rates were too high
        warnings.simplefilter("ignore", TrainingHint)  # the trainer's own training has them
        copy.deepcopy(trainer).fit(
            data if y is None else (data, y),
            target=target,
            epochs=steps,
            batch_size=batch_size,
            schedule=lambda step: lowest * factor ** min(step, steps - 1),
            callbacks=[record],
            progress=False,
        )
    if len(record.losses) < _FEWEST:
        raise OptionError(
            f"The loss diverged after {len(record.losses)} steps, at the learning rate {record.rates[-1]:g}; give "
            f"lowest= below {lowest:g}."
        )
    return LearningRates(np.asarray(record.rates), np.asarray(record.losses), record.rates[_valley(record.losses)])


def _valley(losses: Sequence[float]) -> int:
    """Return the index in the middle of the second third of the longest falling subsequence."""
    lengths = [1] * len(losses)
    for index, loss in enumerate(losses):
        lengths[index] += max((lengths[at] for at in range(index) if loss < losses[at]), default=0)
    end = int(np.argmax(lengths))
    section = lengths[end] / 3
    return max(0, end - lengths[end] + int(section) + int(section / 2))
