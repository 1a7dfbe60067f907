"""The course of a training as a ``.csv`` file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onnxtrain.training.callback import Callback, TrainingState
from onnxtrain.training.history import History, write_csv


class CsvLogger(Callback):
    """Keeps a ``.csv`` file up to date with one row per epoch, in the columns of `History`.

    The file is complete after every epoch. A column that appears later is added to all rows. A resumed
    training goes on with the rows that it had.

    Args:
        path: the file; what it held before is replaced.
    """

    writes_only = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._history = History()

    def on_fit_begin(self, state: TrainingState) -> None:
        """Write what there is, so that a path that cannot be written is known before the first step."""
        write_csv(self.path, self._history.rows)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Add a row to the file."""
        self._history.on_epoch_end(state)
        write_csv(self.path, self._history.rows)

    def record(self) -> dict[str, Any]:
        """All rows."""
        return self._history.record()

    def resume(self, record: dict[str, Any]) -> None:
        """Go on with the rows of the checkpoint."""
        self._history.resume(record)
