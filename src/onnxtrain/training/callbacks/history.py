"""Training history: one row per epoch, and its files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import ModelError, OptionError
from onnxtrain.errors.formatting import html_table, text_table
from onnxtrain.model_file.writing import AtomicFiles, explained
from onnxtrain.training.callbacks.base import Callback, TrainingState
from onnxtrain.training.report.charts import measured, side_by_side


class History(Callback):
    """One row per epoch: epoch (from 1), step, loss, learning rate, all metrics, and for texts tokens per second.

    Attributes:
        rows: One mapping per epoch, oldest first.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_epoch_end(self, state: TrainingState) -> None:
        """Add a row."""
        self.rows.append(row_of(state))

    def record(self) -> dict[str, Any]:
        """Return all rows."""
        return {"rows": [dict(row) for row in self.rows]}

    def resume(self, record: dict[str, Any]) -> None:
        """Continue with the rows of the checkpoint."""
        self.rows = [dict(row) for row in record["rows"]]

    def __repr__(self) -> str:
        """Return a table."""
        return text_table(self.rows) if self.rows else "History of no epochs"

    def _repr_html_(self) -> str:
        return side_by_side(measured(self.rows)) + html_table(self.rows)

    def column(self, name: str) -> list[float]:
        """Return one value over all epochs; NaN where an epoch has none."""
        return [row.get(name, math.nan) for row in self.rows]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a ``.json`` or ``.csv`` file. NaN and infinity become null in JSON.

        Raises:
            OptionError: The path has another suffix or cannot be written.
        """
        path = Path(path)
        if path.suffix == ".json":
            write_text(path, json.dumps(for_json(self.rows), indent=1) + "\n")
        elif path.suffix == ".csv":
            write_csv(path, self.rows)
        else:
            raise OptionError(f"A history is saved as .json or .csv, not as '{path}'.").about(str(path))


def for_json(value: Any) -> Any:
    """Return a value for JSON, which lacks arrays, infinities and NaN: they become lists and null."""
    if isinstance(value, Mapping):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(item) for item in value]
    if isinstance(value, np.ndarray):
        return for_json(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def row_of(state: TrainingState) -> dict[str, float]:
    """Return the values of an epoch by name."""
    values = {"loss": state.loss, "learning_rate": state.rate_of_last_step, **state.metrics}
    if state.tokens_per_second is not None:
        values["tokens_per_second"] = state.tokens_per_second
    measured = {name: float(value) for name, value in values.items()}
    return {"epoch": state.epoch, "step": state.step, **measured}


def write_csv(path: Path, rows: Sequence[dict[str, float]]) -> None:
    """Write rows as CSV; missing values are empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if columns:
        writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old or the new rows."""
    try:
        with explained(path):
            path.parent.stat()  # AtomicFiles would create the folder
        with AtomicFiles() as files, files.create(path) as file:
            file.write(text.encode())
    except ModelError as error:
        raise OptionError(str(error)) from error
