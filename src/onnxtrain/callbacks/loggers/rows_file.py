"""A file that has all rows of a history after every epoch."""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import Any

from onnxtrain.callbacks.base import Callback, TrainingState
from onnxtrain.callbacks.history import History


class RowsFile(Callback, abc.ABC):
    """Keeps a file up to date with the rows of a `History`; subclasses say how they are written.

    Args:
        path: the file; what it held before is replaced.
    """

    writes_only = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._history = History()

    @abc.abstractmethod
    def write(self, rows: list[dict[str, float]]) -> None:
        """Write all rows to the file."""

    def on_fit_begin(self, state: TrainingState) -> None:
        """Write what there is, so that a path that cannot be written is known before the first step."""
        self.write(self._history.rows)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Add a row to the file."""
        self._history.on_epoch_end(state)
        self.write(self._history.rows)

    def record(self) -> dict[str, Any]:
        """All rows."""
        return self._history.record()

    def resume(self, record: dict[str, Any]) -> None:
        """Go on with the rows of the checkpoint."""
        self._history.resume(record)
