"""Hints: sentences about what training may do otherwise than its caller expects, as warnings where that surprises."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from onnxtrain.errors import TrainingHint


class Hint(NamedTuple):
    """A hint about a model."""

    text: str
    surprising: bool = False


def warn_of(hints: Iterable[Hint]) -> None:
    """Issue a warning for each surprising hint, at the line of the caller outside this package."""
    for hint in hints:
        if hint.surprising:
            warnings.warn(hint.text, TrainingHint, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """Return the ``stacklevel``, counted from the function that calls this, of the first frame outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    return level


_OWN = (__name__.partition(".")[0], "contextlib")
"""Packages whose frames are skipped: this one, and contextlib, whose decorators its functions use."""
