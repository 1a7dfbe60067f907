"""Check arguments of the native functions in Python: C would wrap integers and cut strings that do not fit."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np

from onnxtrain.errors import OperatorError

_INFINITE = 2.0**128 - 2.0**103
"""Smallest value that rounds to infinity in float32."""


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Return ``value`` as an integer from ``low`` to ``high``."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise OperatorError(
            f"{name} is {_shown(value)}: it must be an integer from {_power(low)} to {_power(high)}."
        ) from None
    if number < low:
        raise OperatorError(f"{name} is {_shown(number)}: it must be {_power(low)} or more.")
    if number > high:
        raise OperatorError(f"{name} is {_shown(number)}: it must be at most {_power(high)}.")
    return number


def wide_number(name: str, value: Any) -> float:
    """Return ``value`` as float64."""
    fits = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        number = float(value) if fits else math.nan
    except OverflowError:
        number, fits = math.nan, False
    if not fits or (math.isinf(number) and not np.isinf(value)):
        raise OperatorError(f"{name} is {_shown(value)}: it must be a number that float64 holds.")
    return number


def number(name: str, value: Any) -> float:
    """Return ``value`` as float64 after a check that float32, the type of ONNX attributes, can hold it."""
    found = wide_number(name, value)
    if math.isfinite(found) and abs(found) >= _INFINITE:
        raise OperatorError(
            f"{name} is {found!r}: its magnitude must be at most 3.402823e+38, since it is stored as float32."
        ).about(name, got=found)
    return found


def text(name: str, value: Any) -> bytes:
    """Return ``value`` as bytes without NUL, which C would take for the end."""
    if not isinstance(value, str):
        raise OperatorError(f"{name} is {_shown(value)}: it must be a string.")
    if "\0" in value:
        raise OperatorError(f"{name} is {_shown(value)}: it must be a string without NUL.")
    return value.encode(errors="backslashreplace")


def arrays(name: str, values: Any) -> list[Any]:
    """Return ``values`` as a list."""
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise OperatorError(f"{name} is {_shown(values)}: it must be a list of arrays.")
    try:
        return list(values)
    except TypeError:  # a 0-d array has __iter__ but refuses to iterate
        raise OperatorError(f"{name} is {_shown(values)}: it must be a list of arrays.") from None


def _shown(value: Any) -> str:
    """Format a value for a message: shortened, or its type for arrays and other objects."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return f"an integer of {value.bit_length()} bits"  # repr() raises ValueError on very long integers
    if isinstance(value, (bool, int, float, str, bytes, type(None), np.generic)):
        shown = ascii(value) if isinstance(value, str) else repr(value)
        return shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"of type {type(value).__name__}"


def _power(bound: int) -> str:
    return {2**63 - 1: "2**63 - 1", -(2**63): "-2**63", 2**31 - 1: "2**31 - 1"}.get(bound, str(bound))
