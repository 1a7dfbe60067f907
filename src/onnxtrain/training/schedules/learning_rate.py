"""Learning rate of a trainer: the schedule's, until a callback or the user sets another."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments

Schedule = Callable[[int], float]
"""Function from the index of a step, from 0, to its learning rate."""


class LearningRate:
    """Learning rate of the next step, from a schedule or set by hand."""

    def __init__(self, value: float) -> None:
        self.base = self.current = value
        self.chosen: float | None = None
        self._training = False

    def choose(self, value: float) -> None:
        """Set the rate from the next step on."""
        check_rate(value)
        self.current = float(value)
        if self._training:
            self.chosen = self.current
        else:
            self.base = self.current

    def restore(self, current: float, base: float) -> None:
        """Set the rate of the next step and its base, between trainings; a training keeps its own."""
        if not self._training:
            self.current, self.base = current, base

    def copy(self) -> LearningRate:
        """Return an independent rate between trainings."""
        found = LearningRate(self.base)
        found.current = self.current
        return found

    def follow(self, schedule: Schedule, step: int) -> float:
        """Return the rate of a step."""
        self.current = float(schedule(step)) if self.chosen is None else self.chosen
        return self.current

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Run one training: start with its schedule; a rate that is set meanwhile becomes the base of the next one."""
        self._training, self.chosen = True, None
        try:
            yield
            if self.chosen is not None:
                self.base = self.chosen
        finally:
            self._training = False


@checks_arguments
def check_rate(rate: object, what: str = "The learning rate") -> None:
    """Refuse an invalid learning rate.

    Raises:
        OptionError: The rate is negative, infinite, NaN or not a number.
    """
    try:
        good = math.isfinite(rate) and rate >= 0  # type: ignore[arg-type, operator]
    except (TypeError, ValueError):
        good = False
    if not good:
        raise OptionError(f"{what} is {rate!r}; it must be a finite number of at least 0.").about(what, got=rate)
