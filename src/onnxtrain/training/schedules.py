"""Learning-rate schedules: functions from the index of a step, from 0, to its learning rate."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from onnxtrain.errors import OptionError
from onnxtrain.errors._internal import public_names
from onnxtrain.errors.spelling import checks_arguments, suggestion
from onnxtrain.operators.call_text import Call, name_of, read_call

__all__ = [
    "Constant",
    "Cosine",
    "Custom",
    "Exponential",
    "Linear",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "Step",
    "WarmUp",
    "check_rate",
    "parse_schedule",
    "resolve_schedule",
]

__dir__ = public_names(__name__)

Schedule = Callable[[int], float]
"""Function from the index of a step, from 0, to its learning rate."""


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


class _Shape:
    """Base of schedules: checks the rate, numbers of steps and factors by the names of the fields."""

    _unit: ClassVar[str] = ""
    """The words of an error for a number of steps."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "learning_rate":
                check_rate(value)
            elif name in ("steps", "every") and value < 1:
                raise OptionError(f"{self._unit} is {value} steps long; it needs at least 1.")
            elif name in ("factor", "end_factor") and not (math.isfinite(value) and value >= 0):
                raise OptionError(f"{name} of the schedule is {value}; it must be a finite number of at least 0.")


@checks_arguments
@dataclass(frozen=True)
class Constant(_Shape):
    """Constant learning rate. PyTorch: no scheduler.

    Args:
        learning_rate: Learning rate, at least 0.
    """

    learning_rate: float

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.learning_rate


@checks_arguments
@dataclass(frozen=True)
class Linear(_Shape):
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

    _unit = "A linear schedule"

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.learning_rate * (1 + (self.end_factor - 1) * min(step, self.steps) / self.steps)


@checks_arguments
@dataclass(frozen=True)
class Cosine(_Shape):
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

    _unit = "A cosine schedule"

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        half_wave = (1 + math.cos(math.pi * min(step, self.steps) / self.steps)) / 2
        return self.learning_rate * (self.end_factor + (1 - self.end_factor) * half_wave)


@checks_arguments
@dataclass(frozen=True)
class Step(_Shape):
    """Step decay: ``rate(t) = learning_rate factor^floor(t / every)``. PyTorch: ``StepLR(every, gamma=factor)``.

    Args:
        learning_rate: Rate of the first stage.
        every: Steps per stage.
        factor: Factor from one stage to the next.
    """

    learning_rate: float
    every: int
    factor: float = 0.1

    _unit = "A stage of a step schedule"

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return float(self.learning_rate * self.factor ** (step // self.every))


@checks_arguments
@dataclass(frozen=True)
class Exponential(_Shape):
    """Exponential decay: ``rate(t) = learning_rate factor^(t / every)``. PyTorch: ``ExponentialLR(factor)``.

    Args:
        learning_rate: Rate at step 0.
        factor: Factor from step t to step t + every.
        every: Number of steps per factor.
    """

    learning_rate: float
    factor: float
    every: int = 1

    _unit = "The unit of an exponential schedule"

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return float(self.learning_rate * self.factor ** (step / self.every))


@checks_arguments
@dataclass(frozen=True)
class Polynomial(_Shape):
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

    _unit = "A polynomial schedule"

    def __post_init__(self) -> None:
        super().__post_init__()
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
class WarmUp(_Shape):
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

    _unit = "A warm-up"

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


@checks_arguments
def resolve_schedule(
    schedule: str | Schedule | None,
    learning_rate: float,
    *,
    total_steps: int | None = None,
    steps_per_epoch: int | None = None,
) -> Schedule:
    """Resolve a schedule: a text, a function of the step, or None for a constant rate.

    Args:
        schedule: A text as for :func:`parse_schedule`, or a function that returns the learning rate itself.
        learning_rate: Highest rate of a schedule given as text.
        total_steps: Number of steps of the training; None when not known.
        steps_per_epoch: Number of steps of an epoch; None when not known.

    Raises:
        OptionError: The schedule or a value in it is invalid.
    """
    if schedule is None:
        return Constant(learning_rate)
    if isinstance(schedule, str):
        return parse_schedule(schedule, learning_rate, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    if not callable(schedule):
        raise OptionError(
            f"A schedule is a text like 'cosine' or a function of the step, not a {type(schedule).__name__}."
        )
    return Custom(schedule)


_VANISHED: Final = 1e-9
"""Fraction of the highest rate below which a schedule trains nothing."""

_SAMPLES: Final = 200
"""Number of steps that are sampled."""


def vanishing_hint(schedule: str | Schedule, rate: Schedule, total_steps: int, steps_per_epoch: int) -> str:
    """Return a hint if a schedule falls to a billionth of its rate well before the training ends, else ""."""
    shape: object = rate
    while isinstance(shape, WarmUp | Custom):
        shape = shape.inner if isinstance(shape, WarmUp) else shape.function
    if isinstance(shape, Constant):
        return ""
    steps = sorted({round(index * (total_steps - 1) / (_SAMPLES - 1)) for index in range(_SAMPLES)})
    rates = [rate(step) for step in steps]
    limit = _VANISHED * max(rates) * (1 + 1e-6)  # powers of 0.1 are rounded
    allowed = 0 if isinstance(shape, Step | Exponential) else len(steps) // 20
    late = [step for step, value in zip(steps, rates, strict=True) if value <= limit]
    if not limit or len(late) <= allowed:
        return ""
    low, high = max((step for step in steps if step < late[0]), default=0), late[0]
    while high - low > 1:  # bisect between two samples
        middle = (low + high) // 2
        low, high = (low, middle) if rate(middle) <= limit else (middle, high)
    shown = repr(schedule) if isinstance(schedule, str) else f"of the type {type(shape).__name__}"
    advice = "train for fewer steps, or let the rate fall more slowly"
    if isinstance(schedule, str) and isinstance(shape, Step | Exponential) and "epoch" not in schedule:
        counted = f"step({shape.every} epochs, {shape.factor:g})"
        if isinstance(shape, Exponential):
            counted = f"exponential({shape.factor:g}, {shape.every} epochs)"
        advice = f"it counts steps, and an epoch has {steps_per_epoch}; to count epochs, write {counted}"
    return (
        f"The schedule {shown} is at a billionth of its rate from step {high + 1} of {total_steps} on (epoch "
        f"{high // steps_per_epoch + 1}), and trains nothing from there on; {advice}."
    )


_FORMS: Final = (
    "constant, linear(end_factor), cosine(end_factor), polynomial(power), one_cycle(rising), step(every, factor), "
    "exponential(factor, every), each with warmup(steps)+ in front"
)
_SHAPES: Final[dict[str, Callable[..., Schedule]]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "polynomial": Polynomial,
    "one_cycle": OneCycle,
    "step": Step,
    "exponential": Exponential,
}
"""Schedules by their names in texts; texts give their arguments, but not the rate and the number of steps."""

_WARM_UP: Final = re.compile(r"\s*warmup\s*\((?P<steps>[^()]*)\)\s*(?:\+|$)\s*")
_PART: Final = re.compile(r"0?\.\d+")
_COUNT: Final = re.compile(r"(?P<number>\d+)\s*(?P<unit>steps?|epochs?)?")


@checks_arguments
def parse_schedule(
    text: str, learning_rate: float, *, total_steps: int | None = None, steps_per_epoch: int | None = None
) -> Schedule:
    """Parse a schedule from text, as on the command line.

    The forms are ``constant``, ``linear(end_factor=0)``, ``cosine(end_factor=0)``, ``polynomial(power=1)``,
    ``one_cycle(rising=0.3)``, ``step(every, factor=0.1)`` and ``exponential(factor, every=1)``, each optionally after
    ``warmup(steps)+``. Numbers of steps may also be epochs, ``step(10 epochs, 0.5)``; a warm-up may also be a fraction
    of the training, ``warmup(0.1)``.

    Args:
        text: The schedule.
        learning_rate: Highest rate of the schedule.
        total_steps: Number of steps of the training; linear, cosine, polynomial and one_cycle need it.
        steps_per_epoch: Number of steps of an epoch; numbers of epochs need it.

    Raises:
        OptionError: The text has another form, or a value in it is invalid.

    >>> parse_schedule("warmup(100)+cosine", 0.1, total_steps=1000)
    WarmUp(inner=Cosine(learning_rate=0.1, steps=900, end_factor=0.0), steps=100)
    """
    match = _WARM_UP.match(text)
    rest = text if match is None else text[match.end() :]
    call = read_call(rest if match is None else rest or "constant")
    if call is None:
        near = suggestion(name_of(text), [*_SHAPES, "warmup"])
        raise OptionError(f"'{text}' is not a schedule; the forms are {_FORMS}.{near}")
    reader = _Reader(text, learning_rate, total_steps, steps_per_epoch)
    if match is None:
        return reader.schedule(call)
    warm_up = reader.warm_up(match["steps"])
    if total_steps is not None:
        if warm_up >= total_steps:
            raise OptionError(f"The warm-up of '{text}' takes {warm_up} of {total_steps} steps; make it shorter.")
        reader = _Reader(text, learning_rate, total_steps - warm_up, steps_per_epoch)
    return WarmUp(reader.schedule(call), warm_up)


@dataclass(frozen=True)
class _Reader:
    text: str
    learning_rate: float
    total_steps: int | None
    steps_per_epoch: int | None

    def schedule(self, call: Call) -> Schedule:
        if call.name not in _SHAPES:
            raise OptionError(
                f"There is no schedule '{call.name}' (in '{self.text}'); the forms are {_FORMS}"
                f".{suggestion(call.name, [*_SHAPES, 'warmup'])}"
            )
        shape = _SHAPES[call.name]
        known = inspect.signature(shape).parameters
        asked = {name: parameter for name, parameter in known.items() if name not in ("learning_rate", "steps")}
        try:
            given = inspect.Signature(list(asked.values())).bind(*call.positional, **call.named).arguments
        except TypeError as error:
            count = len(call.positional) + len(call.named)
            near = suggestion(next((name for name in call.named if name not in asked), ""), asked)
            raise OptionError(
                f"'{self.text}' gives {call.name} {count} values, which do not fit; the forms are {_FORMS}.{near}"
            ) from error
        length = {"steps": self._length(call.name)} if "steps" in known else {}
        values = {name: self.count(text) if name == "every" else self._number(text) for name, text in given.items()}
        return shape(self.learning_rate, **length, **values)

    def warm_up(self, value: str) -> int:
        """Return the steps of a warm-up given as steps, epochs or a fraction of the training."""
        if not _PART.fullmatch(value.strip()):
            return self.count(value)
        return max(1, round(float(value) * self._length("warm-up")))

    def count(self, value: str) -> int:
        match = _COUNT.fullmatch(value.strip())
        if match is None:
            raise OptionError(f"'{value}' in '{self.text}' is not a count such as 100, 100 steps or 5 epochs.")
        number = int(match["number"])
        if not (match["unit"] or "").startswith("epoch"):
            return number
        if self.steps_per_epoch is None:
            raise OptionError(
                f"'{self.text}' counts epochs, but the number of steps per epoch is not known; count steps."
            ).about(self.text)
        return number * self.steps_per_epoch

    def _number(self, value: str) -> float:
        try:
            return float(value)
        except ValueError as error:
            raise OptionError(f"'{value}' in '{self.text}' is not a number.") from error

    def _length(self, name: str) -> int:
        if self.total_steps is None:
            raise OptionError(
                f"The {name} schedule needs the number of steps, which this data does not determine; "
                f"use constant, step or exponential, or data whose size is known."
            ).about(name)
        return self.total_steps
