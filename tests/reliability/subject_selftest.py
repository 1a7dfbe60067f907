"""Cases with known outcomes, which test the harness itself."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from reliability.outcome import WrongError
from reliability.worker import Operations

OUTCOMES = ("ok", "refused", "defect", "wrong", "memory", "crash", "hang", "defect", "memory", "ok")


class Subject:
    """Case number i ends with outcome i of `OUTCOMES`."""

    def __init__(self, shared: Path) -> None:
        pass

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Misbehave as a subject never may."""
        (case / "input").write_text(str(index))
        operations.run("work", (fine, refuse, fail, mix, exhaust, crash, hang, blame, grow, fine)[index])


def fine() -> None:
    """Do nothing."""


def refuse() -> None:
    """Raise as the library does."""
    from onnxtrain.errors import ModelError

    raise ModelError("'x' is no model; give another.")


def fail() -> None:
    """Raise an error that no user should see."""
    raise KeyError("x")


def mix() -> None:
    """Leave something wrong."""
    raise WrongError("old and new", "mixed")


def exhaust() -> None:
    """Ask for more memory than the limit."""
    np.ones(1 << 40)


def crash() -> None:
    """End by a signal."""
    os.abort()


def hang() -> None:
    """Compute without end."""
    while True:
        pass


def blame() -> None:
    """Refuse, but in the wrong words."""
    from onnxtrain.errors import ModelError

    raise ModelError("this is a defect")


def grow() -> None:
    """Take much memory, and give it back."""
    np.ones(560 << 20, np.uint8)
