"""Model files that each target one weakness: see ``crafted``."""

from __future__ import annotations

from pathlib import Path

from reliability.crafted import CRAFTED
from reliability.subject_models import use_model
from reliability.worker import Operations


class Subject:
    """The files of ``crafted``, one after the other."""

    def __init__(self, shared: Path) -> None:
        self._makers = [*CRAFTED.items()]

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Write a file, and run all operations on it."""
        name, make = self._makers[index % len(self._makers)]
        (case / "name.txt").write_text(name)
        make(case)
        use_model(case / "model.onnx", operations, loss="mean_squared_error")
