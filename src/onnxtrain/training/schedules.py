"""Learning-rate schedules: from the number of the step, counted from 0, to the learning rate of that step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from onnxtrain.errors import OptionError
from onnxtrain.training.call_text import Call, read_call

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same learning rate for every step. PyTorch: no scheduler.

    Args:
        learning_rate: not negative.
    """

    learning_rate: float

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        return self.learning_rate


@dataclass(frozen=True)
class Linear:
    """A straight line to a fraction of the learning rate.

        rate(t) = learning_rate (1 + (end_factor - 1) min(t, steps) / steps)

    PyTorch: ``LinearLR(start_factor=1, end_factor=end_factor, total_iters=steps)``.

    Args:
        learning_rate: at step 0.
        steps: after how many steps the line ends.
        end_factor: what is left then, as a fraction.

    >>> [Linear(1.0, steps=4)(step) for step in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """

    learning_rate: float
    steps: int
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_steps(self.steps, "a linear schedule")
        _check_factor(self.end_factor, "end_factor")

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        return self.learning_rate * (1 + (self.end_factor - 1) * min(step, self.steps) / self.steps)


@dataclass(frozen=True)
class Cosine:
    """Half a period of a cosine (Loshchilov and Hutter, 2017, without restarts).

        rate(t) = learning_rate (end_factor + (1 - end_factor) (1 + cos(pi min(t, steps) / steps)) / 2)

    PyTorch: ``CosineAnnealingLR(T_max=steps, eta_min=end_factor * learning_rate)`` up to step `steps`; there
    PyTorch's rises again, this one stays.

    Args:
        learning_rate: at step 0.
        steps: after how many steps the lowest rate is reached.
        end_factor: what is left then, as a fraction.
    """

    learning_rate: float
    steps: int
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_steps(self.steps, "a cosine schedule")
        _check_factor(self.end_factor, "end_factor")

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        half_wave = (1 + math.cos(math.pi * min(step, self.steps) / self.steps)) / 2
        return self.learning_rate * (self.end_factor + (1 - self.end_factor) * half_wave)


@dataclass(frozen=True)
class Step:
    """Stairs: ``rate(t) = learning_rate factor^floor(t / every)``. PyTorch: ``StepLR(every, gamma=factor)``.

    Args:
        learning_rate: of the first stair.
        every: how many steps a stair is long.
        factor: from one stair to the next.
    """

    learning_rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_steps(self.every, "a stair of a step schedule")
        _check_factor(self.factor, "factor")

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        return float(self.learning_rate * self.factor ** (step // self.every))


@dataclass(frozen=True)
class Exponential:
    """Exponential decay: ``rate(t) = learning_rate factor^(t / every)``. PyTorch: ``ExponentialLR(factor)``.

    Args:
        learning_rate: at step 0.
        factor: of the learning rate from step t to step t + every.
        every: how many steps that takes.
    """

    learning_rate: float
    factor: float
    every: int = 1

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        _check_factor(self.factor, "factor")
        _check_steps(self.every, "the unit of an exponential schedule")

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        return float(self.learning_rate * self.factor ** (step / self.every))


@dataclass(frozen=True)
class WarmUp:
    """A line up to another schedule, which then starts at its own step 0.

        rate(t) = inner(0) (t + 1) / (steps + 1)    for t < steps
        rate(t) = inner(t - steps)                  from there on

    No step is lost to a learning rate of 0. PyTorch: ``SequentialLR`` of
    ``LinearLR(start_factor=1 / (steps + 1), total_iters=steps)`` and the inner one, ``milestones=[steps]``.

    Args:
        inner: the schedule after the warm-up.
        steps: how many steps the warm-up takes.

    >>> [WarmUp(Constant(1.0), steps=3)(step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    inner: Schedule
    steps: int

    def __post_init__(self) -> None:
        _check_steps(self.steps, "a warm-up")

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.steps:
            return self.inner(0) * (step + 1) / (self.steps + 1)
        return self.inner(step - self.steps)


@dataclass(frozen=True)
class Custom:
    """Any function from the step to the learning rate, its results checked. PyTorch: ``LambdaLR``, roughly.

    Args:
        function: the step, counted from 0, to the learning rate itself (PyTorch: to a factor).
    """

    function: Callable[[int], float]

    def __call__(self, step: int) -> float:
        """The learning rate of a step.

        Raises:
            OptionError: the function returned something negative, infinite, NaN or no number.
        """
        rate = self.function(step)
        check_rate(rate, f"the learning rate that the schedule returned for step {step}")
        return float(rate)


def resolve_schedule(
    schedule: str | Schedule | None,
    learning_rate: float,
    *,
    total_steps: int | None = None,
    steps_per_epoch: int | None = None,
) -> Schedule:
    """Make a schedule of what a user gives: a text, a function of the step, or None for a constant rate.

    Args:
        schedule: see `parse_schedule` for the text; a function returns the learning rate itself.
        learning_rate: the highest rate of a schedule given as text.
        total_steps: how many steps the training has; None when not known.
        steps_per_epoch: how many steps an epoch has; None when not known.

    Raises:
        OptionError: a value that cannot be.
    """
    if schedule is None:
        return Constant(learning_rate)
    if isinstance(schedule, str):
        return parse_schedule(schedule, learning_rate, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    if not callable(schedule):
        raise OptionError(
            f"a schedule is a text like 'cosine' or a function of the step, not a {type(schedule).__name__}."
        )
    return Custom(schedule)


_FORMS: Final = (
    "constant, linear(end_factor), cosine(end_factor), step(every, factor), exponential(factor, every), "
    "each with warmup(steps)+ in front"
)
_WARM_UP: Final = re.compile(r"\s*warmup\s*\((?P<steps>[^()]*)\)\s*(?:\+|$)\s*")
_COUNT: Final = re.compile(r"(?P<number>\d+)\s*(?P<unit>steps?|epochs?)?")


def parse_schedule(
    text: str, learning_rate: float, *, total_steps: int | None = None, steps_per_epoch: int | None = None
) -> Schedule:
    """Read a schedule from a text, as on the command line.

    The forms are ``constant``, ``linear(end_factor=0)``, ``cosine(end_factor=0)``,
    ``step(every, factor=0.1)`` and ``exponential(factor, every=1)``; ``warmup(steps)+`` may stand in front of
    any. What counts steps can count epochs too: ``step(10 epochs, 0.5)``.

    Args:
        text: the schedule.
        learning_rate: its highest rate.
        total_steps: how many steps the training has; linear and cosine need it.
        steps_per_epoch: how many steps an epoch has; counts in epochs need it.

    Raises:
        OptionError: the text is not one of these forms, or a value in it cannot be.

    >>> parse_schedule("warmup(100)+cosine", 0.1, total_steps=1000)
    WarmUp(inner=Cosine(learning_rate=0.1, steps=900, end_factor=0.0), steps=100)
    """
    match = _WARM_UP.match(text)
    rest = text if match is None else text[match.end() :]
    call = read_call(rest if match is None else rest or "constant")
    if call is None:
        raise OptionError(f"'{text}' is not a schedule; the forms are {_FORMS}.")
    reader = _Reader(text, learning_rate, total_steps, steps_per_epoch)
    if match is None:
        return reader.schedule(call)
    warm_up = reader.count(match["steps"])
    if total_steps is not None:
        if warm_up >= total_steps:
            raise OptionError(f"the warm-up of '{text}' takes {warm_up} of {total_steps} steps; make it shorter.")
        reader = _Reader(text, learning_rate, total_steps - warm_up, steps_per_epoch)
    return WarmUp(reader.schedule(call), warm_up)


@dataclass(frozen=True)
class _Reader:
    """Reads the parts of one schedule text."""

    text: str
    learning_rate: float
    total_steps: int | None
    steps_per_epoch: int | None

    def schedule(self, call: Call) -> Schedule:
        forms: dict[str, Callable[..., Schedule]] = {
            "constant": self._constant,
            "linear": self._linear,
            "cosine": self._cosine,
            "step": self._step,
            "exponential": self._exponential,
        }
        if call.name not in forms:
            raise OptionError(f"there is no schedule '{call.name}' (in '{self.text}'); the forms are {_FORMS}.")
        if not call.fits(forms[call.name]):
            given = len(call.positional) + len(call.named)
            raise OptionError(f"'{self.text}' gives {call.name} {given} values, which does not fit; forms: {_FORMS}.")
        return forms[call.name](*call.positional, **call.named)

    def _constant(self) -> Schedule:
        return Constant(self.learning_rate)

    def _linear(self, end_factor: str = "0") -> Schedule:
        return Linear(self.learning_rate, self._length("linear"), self._number(end_factor))

    def _cosine(self, end_factor: str = "0") -> Schedule:
        return Cosine(self.learning_rate, self._length("cosine"), self._number(end_factor))

    def _step(self, every: str, factor: str = "0.1") -> Schedule:
        return Step(self.learning_rate, self.count(every), self._number(factor))

    def _exponential(self, factor: str, every: str = "1") -> Schedule:
        return Exponential(self.learning_rate, self._number(factor), self.count(every))

    def count(self, value: str) -> int:
        match = _COUNT.fullmatch(value.strip())
        if match is None:
            raise OptionError(f"'{value}' in '{self.text}' is not a count such as 100, 100 steps or 5 epochs.")
        number = int(match["number"])
        if not (match["unit"] or "").startswith("epoch"):
            return number
        if self.steps_per_epoch is None:
            raise OptionError(
                f"'{self.text}' counts epochs, but how many steps an epoch has is not known; count steps."
            )
        return number * self.steps_per_epoch

    def _number(self, value: str) -> float:
        try:
            return float(value)
        except ValueError as error:
            raise OptionError(f"'{value}' in '{self.text}' is not a number.") from error

    def _length(self, name: str) -> int:
        if self.total_steps is None:
            raise OptionError(
                f"the {name} schedule needs the number of steps, which this data does not tell; "
                f"use constant, step or exponential, or data whose size is known."
            )
        return self.total_steps


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


def _check_factor(factor: float, name: str) -> None:
    if not (math.isfinite(factor) and factor >= 0):
        raise OptionError(f"{name} of the schedule is {factor}; it must be a finite number of at least 0.")


def _check_steps(steps: int, what: str) -> None:
    if steps < 1:
        raise OptionError(f"{what} is {steps} steps long; it must be at least 1.")
