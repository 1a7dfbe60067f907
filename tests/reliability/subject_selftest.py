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
        """Fail in the way of the case's number."""
        (case / "input").write_text(str(index))
        operations.run("work", (fine, refuse, fail, mix, exhaust, crash, hang, blame, grow, fine)[index])


def fine() -> None:
    """Do nothing."""


def refuse() -> None:
    """Raise as the library does."""
    from onnxtrain.errors import ModelError

    raise ModelError("'x' is no model; give another.")


def fail() -> None:
    """Raise an internal error."""
    raise KeyError("x")


def mix() -> None:
    """Leave something wrong."""
    raise WrongError("old and new", "mixed")


def exhaust() -> None:
    """Allocate more memory than the limit."""
    np.ones(1 << 40)


def crash() -> None:
    """End by a signal."""
    os.abort()


def hang() -> None:
    """Compute without end."""
    while True:
        pass


def blame() -> None:
    """Refuse with a message that calls it a defect of onnxtrain."""
    from onnxtrain.errors import ModelError

    raise ModelError("this is a defect")


def grow() -> None:
    """Allocate much memory, and free it."""
    np.ones(560 << 20, np.uint8)
