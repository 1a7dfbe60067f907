"""Learning-rate schedules: functions from the index of a step, from 0, to its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.training.schedules.learning_rate import Schedule, check_rate


@checks_arguments
@dataclass(frozen=True)
class Constant:
    """Constant learning rate. PyTorch: no scheduler.

    Args:
        learning_rate: Learning rate, at least 0.
    """

    learning_rate: float

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.learning_rate


@checks_arguments
@dataclass(frozen=True)
class Linear:
    """Linear decay to a fraction of the learning rate.

        rate(t) = learning_rate (1 + (end_factor - 1) min(t, steps) / steps)

    PyTorch: ``LinearLR(start_factor=1, end_factor=end_factor, total_iters=steps)``.

    Args:
        learning_rate: Rate at step 0.
        steps: Steps until the final rate.
        end_factor: Final rate as a fraction of the first.

    >>> [Linear(1.0, steps=4)(step) for step in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """

    learning_rate: float
    steps: int
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_steps(self.steps, "A linear schedule")
        _check_factor(self.end_factor, "end_factor")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.learning_rate * (1 + (self.end_factor - 1) * min(step, self.steps) / self.steps)


@checks_arguments
@dataclass(frozen=True)
class Cosine:
    """Cosine decay (Loshchilov and Hutter, 2017, without restarts).

        rate(t) = learning_rate (end_factor + (1 - end_factor) (1 + cos(pi min(t, steps) / steps)) / 2)

    PyTorch: ``CosineAnnealingLR(T_max=steps, eta_min=end_factor * learning_rate)`` up to step `steps`; after it
    PyTorch's rate rises again, this one stays.

    Args:
        learning_rate: Rate at step 0.
        steps: Steps until the final rate.
        end_factor: Final rate as a fraction of the first.
    """

    learning_rate: float
    steps: int
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_steps(self.steps, "A cosine schedule")
        _check_factor(self.end_factor, "end_factor")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        half_wave = (1 + math.cos(math.pi * min(step, self.steps) / self.steps)) / 2
        return self.learning_rate * (self.end_factor + (1 - self.end_factor) * half_wave)


@checks_arguments
@dataclass(frozen=True)
class Step:
    """Step decay: ``rate(t) = learning_rate factor^floor(t / every)``. PyTorch: ``StepLR(every, gamma=factor)``.

    Args:
        learning_rate: Rate of the first stage.
        every: Steps per stage.
        factor: Factor from one stage to the next.
    """

    learning_rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_steps(self.every, "A stage of a step schedule")
        _check_factor(self.factor, "factor")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return float(self.learning_rate * self.factor ** (step // self.every))


@checks_arguments
@dataclass(frozen=True)
class Exponential:
    """Exponential decay: ``rate(t) = learning_rate factor^(t / every)``. PyTorch: ``ExponentialLR(factor)``.

    Args:
        learning_rate: Rate at step 0.
        factor: Factor from step t to step t + every.
        every: Number of steps per factor.
    """

    learning_rate: float
    factor: float
    every: int = 1

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_factor(self.factor, "factor")
        _check_steps(self.every, "The unit of an exponential schedule")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return float(self.learning_rate * self.factor ** (step / self.every))


@checks_arguments
@dataclass(frozen=True)
class Polynomial:
    """Polynomial decay: ``rate(t) = learning_rate (1 - min(t, steps) / steps)^power``.

    PyTorch: ``PolynomialLR(total_iters=steps, power=power)``.

    Args:
        learning_rate: Rate at step 0.
        steps: Steps until the rate is 0.
        power: Exponent, above 0; 1 is linear.
    """

    learning_rate: float
    steps: int
    power: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_steps(self.steps, "A polynomial schedule")
        if not (math.isfinite(self.power) and self.power > 0):
            raise OptionError(f"power of the schedule is {self.power}; it must be a finite number above 0.")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return float(self.learning_rate * (1 - min(step, self.steps) / self.steps) ** self.power)


@checks_arguments
@dataclass(frozen=True)
class OneCycle:
    """One-cycle schedule: half a cosine up to the learning rate, and half a cosine down (Smith, 2018).

        up    from learning_rate / 25 to learning_rate, up to step peak = rising steps - 1
        down  from there to learning_rate / 250000 at step steps - 1

    PyTorch: ``OneCycleLR(max_lr=learning_rate, total_steps=steps, pct_start=rising, cycle_momentum=False)``.

    Args:
        learning_rate: Highest rate.
        steps: Steps of the cycle, more than 1 / rising; later steps keep the last rate.
        rising: Fraction of the steps in which the rate rises, above 0 and below 1.
    """

    learning_rate: float
    steps: int
    rising: float = 0.3

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        if not 0 < self.rising < 1:
            raise OptionError(f"rising of the one-cycle schedule is {self.rising}; it must be between 0 and 1.").about(
                "rising", got=self.rising
            )
        least = math.floor(1 / self.rising) + 1
        if self.steps < least:
            raise OptionError(
                f"A one-cycle schedule with rising={self.rising:g} needs at least {least} steps, but has {self.steps}; "
                "train longer, or use another schedule."
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        high, low, last = self.learning_rate, self.learning_rate / 25, self.steps - 1
        peak = self.rising * self.steps - 1
        if step <= peak:
            return _half_wave(low, high, step / peak)
        return _half_wave(high, low / 1e4, (min(step, last) - peak) / (last - peak))


def _half_wave(start: float, end: float, part: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


@checks_arguments
@dataclass(frozen=True)
class WarmUp:
    """Linear warm-up to another schedule, which then starts at its own step 0.

        rate(t) = inner(0) (t + 1) / (steps + 1)    for t < steps
        rate(t) = inner(t - steps)                  from there on

    No step has a learning rate of 0. PyTorch: ``SequentialLR`` of
    ``LinearLR(start_factor=1 / (steps + 1), total_iters=steps)`` and the inner one, ``milestones=[steps]``.

    Args:
        inner: The schedule after the warm-up.
        steps: Steps of the warm-up.

    >>> [WarmUp(Constant(1.0), steps=3)(step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    inner: Schedule
    steps: int

    def __post_init__(self) -> None:
        _check_steps(self.steps, "A warm-up")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        if step < self.steps:
            return self.inner(0) * (step + 1) / (self.steps + 1)
        return self.inner(step - self.steps)


@checks_arguments
@dataclass(frozen=True)
class Custom:
    """A function from the step to the learning rate, with checked results. PyTorch: ``LambdaLR``, roughly.

    Args:
        function: Maps the step, from 0, to the learning rate itself (PyTorch: to a factor).
    """

    function: Callable[[int], float]

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        rate = self.function(step)
        check_rate(rate, f"The learning rate that the schedule returned for step {step}")
        return float(rate)


def _check_factor(factor: float, name: str) -> None:
    if not (math.isfinite(factor) and factor >= 0):
        raise OptionError(f"{name} of the schedule is {factor}; it must be a finite number of at least 0.")


def _check_steps(steps: int, what: str) -> None:
    if steps < 1:
        raise OptionError(f"{what} is {steps} steps long; it needs at least 1.")
