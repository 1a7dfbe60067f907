"""The course of a training as JSON lines: one object per epoch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from onnxtrain.training.callback import Callback, TrainingState
from onnxtrain.training.history import History, write_text


class JsonLinesLogger(Callback):
    """Keeps a ``.jsonl`` file up to date with one JSON object per epoch, of the names in `History`.

    The file is complete after every epoch. JSON has no NaN and no infinity: they become null. A resumed training goes
    on with the rows that it had.

    Args:
        path: the file; what it held before is replaced.
    """

    writes_only = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._history = History()

    def on_fit_begin(self, state: TrainingState) -> None:
        """Write what there is, so that a path that cannot be written is known before the first step."""
        self._write()

    def on_epoch_end(self, state: TrainingState) -> None:
        """Add a line to the file."""
        self._history.on_epoch_end(state)
        self._write()

    def _write(self) -> None:
        rows = [
            {name: value if math.isfinite(value) else None for name, value in row.items()} for row in self._history.rows
        ]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def record(self) -> dict[str, Any]:
        """All rows."""
        return self._history.record()

    def resume(self, record: dict[str, Any]) -> None:
        """Go on with the rows of the checkpoint."""
        self._history.resume(record)
