"""Scales of charts: where a value stands, and at which values the marks are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOGARITHMIC_FROM = 30.0
"""Values above 0 of which the largest is more than this factor above the smallest have a logarithmic axis."""


@dataclass(frozen=True)
class Scale:
    """From values to places on an axis.

    Attributes:
        low: the value at the beginning.
        high: the value at the end.
        start: where the beginning is, in pixels.
        end: where the end is.
        logarithmic: whether equal factors have equal lengths.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    @classmethod
    def around(cls, values: Iterable[float], start: float, end: float, *, logarithmic: bool = False) -> Scale:
        """A scale that holds all finite values, with a little room on both sides.

        >>> round(Scale.around([2.0], 0, 100)(2.0))
        50
        """
        found = [value for value in values if math.isfinite(value) and (value > 0 or not logarithmic)]
        low, high = (min(found), max(found)) if found else (0.0, 1.0)
        if logarithmic:
            room = 1.1 if high == low else (high / low) ** 0.04
            return cls(low / room, high * room, start, end, True)
        room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        """The place of a value."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def marks(self, most: int = 6) -> list[float]:
        """Round values within the scale.

        >>> Scale(0.0, 1.04, 0, 100).marks()
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        >>> Scale(0.008, 12.0, 0, 100, logarithmic=True).marks()
        [0.01, 0.1, 1.0, 10.0]
        >>> Scale(0.07, 1.5, 0, 100, logarithmic=True).marks()
        [0.1, 0.2, 0.5, 1.0]
        """
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 2:
                every = -(-(last - first + 1) // most)
                return [float(f"1e{power}") for power in range(first, last + 1, every)]
            found = [float(f"{factor}e{power}") for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
            if sum(self.low <= mark <= self.high for mark in found) > 1:
                return [mark for mark in found if self.low <= mark <= self.high]
        rough = (self.high - self.low) / most
        if not rough > 0 or not math.isfinite(rough):
            return [self.low]
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def spans_orders(values: Iterable[float]) -> bool:
    """Return whether values are easier to read on a logarithmic axis."""
    found = [value for value in values if math.isfinite(value)]
    return bool(found) and min(found) > 0 and max(found) > LOGARITHMIC_FROM * min(found)


def shown(value: float) -> str:
    """A value in few characters.

    >>> shown(0.25), shown(1234567.0), shown(3.0), shown(float("nan"))
    ('0.25', '1.235e+06', '3', 'nan')
    """
    return f"{value:.4g}"
