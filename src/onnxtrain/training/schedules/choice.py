"""Resolve schedules given as text, as a function of the step, or as an object."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments, suggestion
from onnxtrain.operators.call_text import Call, name_of, read_call
from onnxtrain.training.schedules import shapes
from onnxtrain.training.schedules.learning_rate import Schedule


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
        return shapes.Constant(learning_rate)
    if isinstance(schedule, str):
        return parse_schedule(schedule, learning_rate, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    if not callable(schedule):
        raise OptionError(
            f"A schedule is a text like 'cosine' or a function of the step, not a {type(schedule).__name__}."
        )
    return shapes.Custom(schedule)


_VANISHED: Final = 1e-9
"""Fraction of the highest rate below which a schedule trains nothing."""

_SAMPLES: Final = 200
"""Number of steps that are sampled."""


def vanishing_hint(schedule: str | Schedule, rate: Schedule, total_steps: int, steps_per_epoch: int) -> str:
    """Return a hint if a schedule falls to a billionth of its rate well before the training ends, else ""."""
    shape: object = rate
    while isinstance(shape, shapes.WarmUp | shapes.Custom):
        shape = shape.inner if isinstance(shape, shapes.WarmUp) else shape.function
    if isinstance(shape, shapes.Constant):
        return ""
    steps = sorted({round(index * (total_steps - 1) / (_SAMPLES - 1)) for index in range(_SAMPLES)})
    rates = [rate(step) for step in steps]
    limit = _VANISHED * max(rates) * (1 + 1e-6)  # powers of 0.1 are rounded
    allowed = 0 if isinstance(shape, shapes.Step | shapes.Exponential) else len(steps) // 20
    late = [step for step, value in zip(steps, rates, strict=True) if value <= limit]
    if not limit or len(late) <= allowed:
        return ""
    low, high = max((step for step in steps if step < late[0]), default=0), late[0]
    while high - low > 1:  # bisect between two samples
        middle = (low + high) // 2
        low, high = (low, middle) if rate(middle) <= limit else (middle, high)
    shown = repr(schedule) if isinstance(schedule, str) else f"of the type {type(shape).__name__}"
    advice = "train for fewer steps, or let the rate fall more slowly"
    if isinstance(schedule, str) and isinstance(shape, shapes.Step | shapes.Exponential) and "epoch" not in schedule:
        counted = f"step({shape.every} epochs, {shape.factor:g})"
        if isinstance(shape, shapes.Exponential):
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
        known = ["constant", "linear", "cosine", "polynomial", "one_cycle", "step", "exponential", "warmup"]
        near = suggestion(name_of(text), known)
        raise OptionError(f"'{text}' is not a schedule; the forms are {_FORMS}.{near}")
    reader = _Reader(text, learning_rate, total_steps, steps_per_epoch)
    if match is None:
        return reader.schedule(call)
    warm_up = reader.warm_up(match["steps"])
    if total_steps is not None:
        if warm_up >= total_steps:
            raise OptionError(f"The warm-up of '{text}' takes {warm_up} of {total_steps} steps; make it shorter.")
        reader = _Reader(text, learning_rate, total_steps - warm_up, steps_per_epoch)
    return shapes.WarmUp(reader.schedule(call), warm_up)


@dataclass(frozen=True)
class _Reader:
    """Builds the schedule of a text."""

    text: str
    learning_rate: float
    total_steps: int | None
    steps_per_epoch: int | None

    def schedule(self, call: Call) -> Schedule:
        forms: dict[str, Callable[..., Schedule]] = {
            "constant": self._constant,
            "linear": self._linear,
            "cosine": self._cosine,
            "polynomial": self._polynomial,
            "one_cycle": self._one_cycle,
            "step": self._step,
            "exponential": self._exponential,
        }
        if call.name not in forms:
            raise OptionError(
                f"There is no schedule '{call.name}' (in '{self.text}'); the forms are {_FORMS}"
                f".{suggestion(call.name, [*forms, 'warmup'])}"
            )
        if not call.fits(forms[call.name]):
            given = len(call.positional) + len(call.named)
            known = inspect.signature(forms[call.name]).parameters
            near = suggestion(next((name for name in call.named if name not in known), ""), known)
            raise OptionError(
                f"'{self.text}' gives {call.name} {given} values, which do not fit; the forms are {_FORMS}.{near}"
            )
        return forms[call.name](*call.positional, **call.named)

    def _constant(self) -> Schedule:
        return shapes.Constant(self.learning_rate)

    def _linear(self, end_factor: str = "0") -> Schedule:
        return shapes.Linear(self.learning_rate, self._length("linear"), self._number(end_factor))

    def _cosine(self, end_factor: str = "0") -> Schedule:
        return shapes.Cosine(self.learning_rate, self._length("cosine"), self._number(end_factor))

    def _polynomial(self, power: str = "1") -> Schedule:
        return shapes.Polynomial(self.learning_rate, self._length("polynomial"), self._number(power))

    def _one_cycle(self, rising: str = "0.3") -> Schedule:
        return shapes.OneCycle(self.learning_rate, self._length("one_cycle"), self._number(rising))

    def warm_up(self, value: str) -> int:
        """Return the steps of a warm-up given as steps, epochs or a fraction of the training."""
        if not _PART.fullmatch(value.strip()):
            return self.count(value)
        return max(1, round(float(value) * self._length("warm-up")))

    def _step(self, every: str, factor: str = "0.1") -> Schedule:
        return shapes.Step(self.learning_rate, self.count(every), self._number(factor))

    def _exponential(self, factor: str, every: str = "1") -> Schedule:
        return shapes.Exponential(self.learning_rate, self._number(factor), self.count(every))

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
