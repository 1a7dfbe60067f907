"""The learning rate of a trainer: the schedule's, until a user sets another; what was set last wins."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from onnxtrain.errors import OptionError
from onnxtrain.spelling import checks_arguments

Schedule = Callable[[int], float]
"""From the number of a step, counted from 0, to its learning rate."""


class LearningRate:
    """The learning rate of the next step, and who decided it.

    A schedule decides it from the beginning of a training. A rate that is set meanwhile, by a callback, decides from
    the next step on. A rate that is set between trainings is where the next one starts from.

    Args:
        value: That of the optimizer.

    Attributes:
        base: What a training starts from: the highest rate of a schedule given as text.
        current: The rate of the next step, or of the last one of a training.
        chosen: What was set while a training runs; ``None`` as long as its schedule decides.

    >>> rate = LearningRate(0.1)
    >>> with rate.training():
    ...     first = rate.follow(lambda step: 0.1 / (step + 1), step=1)
    ...     rate.choose(0.5)
    ...     second = rate.follow(lambda step: 0.1 / (step + 1), step=2)
    >>> first, second, rate.base
    (0.05, 0.5, 0.5)
    """

    def __init__(self, value: float) -> None:
        self.base = self.current = value
        self.chosen: float | None = None
        self._training = False

    def choose(self, value: float) -> None:
        """Set the rate of the next step and of those after it.

        Raises:
            OptionError: It is negative, infinite, NaN or no number.
        """
        check_rate(value)
        self.current = float(value)
        if self._training:
            self.chosen = self.current
        else:
            self.base = self.current

    def follow(self, schedule: Schedule, step: int) -> float:
        """The rate of a step of a training."""
        self.current = float(schedule(step)) if self.chosen is None else self.chosen
        return self.current

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """One training, whose schedule decides first. What was chosen meanwhile is where the next one starts from."""
        self._training, self.chosen = True, None
        try:
            yield
            if self.chosen is not None:
                self.base = self.chosen
        finally:
            self._training = False


@checks_arguments
def check_rate(rate: object, what: str = "the learning rate") -> None:
    """Refuse what no learning rate can be.

    Raises:
        OptionError: it is negative, infinite, NaN or no number.
    """
    try:
        good = math.isfinite(rate) and rate >= 0  # type: ignore[arg-type, operator]
    except (TypeError, ValueError):
        good = False
    if not good:
        raise OptionError(f"{what} is {rate!r}; it must be a finite number of at least 0.")
