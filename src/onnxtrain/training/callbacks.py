"""Callbacks: what runs at the ends of steps and epochs; early stopping, history and log files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from onnxtrain.errors import ModelError, OptionError
from onnxtrain.model.places import explained
from onnxtrain.model.writing import AtomicFiles
from onnxtrain.training.callback import Callback, CallbackList, TrainingState

__all__ = ["Callback", "CallbackList", "CsvLogger", "EarlyStopping", "History", "TrainingState"]


class EarlyStopping(Callback):
    """Stop when a value has not improved for some epochs, and go back to the best weights.

    An epoch improves when its value is better than the best one so far by more than `minimum_delta`; NaN
    never improves. PyTorch has none; Keras' ``EarlyStopping`` is alike.

    Args:
        monitor: the name of a metric, or ``loss`` for the training loss.
        patience: after how many epochs in a row without improvement to stop; at least 1.
        minimum_delta: a smaller change is no improvement; not negative.
        mode: whether small (``min``) or large (``max``) values are good; None: by the name (accuracy: max).
        restore_best: whether to put the weights of the best epoch back at the end.

    Raises:
        OptionError: an argument has a value that it cannot have.
    """

    setting: ClassVar[str | None] = "early_stopping"

    def __init__(
        self,
        monitor: str = "validation_loss",
        patience: int = 3,
        minimum_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
        restore_best: bool = True,
    ) -> None:
        if patience < 1:
            raise OptionError(f"patience of early stopping is {patience}; it must be at least 1 epoch.")
        if not (math.isfinite(minimum_delta) and minimum_delta >= 0):
            raise OptionError(f"minimum_delta of early stopping is {minimum_delta}; it must be at least 0.")
        if mode not in (None, "min", "max"):
            raise OptionError(f"mode of early stopping is '{mode}'; it must be 'min', 'max' or None.")
        self.monitor = monitor
        self.patience = patience
        self.minimum_delta = minimum_delta
        self.mode = mode or ("max" if "accuracy" in monitor else "min")
        self.restore_best = restore_best
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.best_weights: dict[str, np.ndarray] = {}
        self.waited = 0

    def settings(self) -> dict[str, Any]:
        """All arguments."""
        watched = ("monitor", "patience", "minimum_delta", "mode", "restore_best")
        return {name: getattr(self, name) for name in watched}

    def on_epoch_end(self, state: TrainingState) -> None:
        """Compare with the best epoch.

        Raises:
            OptionError: the monitored value does not exist.
        """
        values = {"loss": state.loss, **state.metrics}
        if self.monitor not in values:
            raise OptionError(
                f"early stopping monitors '{self.monitor}', but what is measured is {', '.join(values)}; "
                f"monitor one of these, or add validation data or the metric."
            )
        value = values[self.monitor]
        if self._improves(value):
            self.best, self.best_epoch, self.waited = value, state.epoch, 0
            if self.restore_best:
                self.best_weights = {name: np.array(array) for name, array in state.weights.items()}
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "" if self.best is None else f" (best {self.best:.6g} in epoch {(self.best_epoch or 0) + 1})"
            state.request_stop(f"{self.monitor} has not improved for {self.waited} epochs{best}")

    def on_fit_end(self, state: TrainingState) -> None:
        """Put the best weights back."""
        if self.restore_best:
            state.weights.update(self.best_weights)

    def record(self) -> dict[str, Any]:
        """The best value and the epochs waited."""
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self.waited}

    def record_arrays(self) -> dict[str, np.ndarray]:
        """The best weights."""
        return dict(self.best_weights)

    def resume_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Take the best weights back."""
        self.best_weights = dict(arrays)

    def resume(self, record: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.best, self.best_epoch, self.waited = record["best"], record["best_epoch"], record["waited"]

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = value - self.best if self.mode == "max" else self.best - value
        return gain > self.minimum_delta


class History(Callback):
    """One row per epoch: epoch (from 0), step, loss, learning rate and all metrics.

    Attributes:
        rows: the rows, oldest first.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_epoch_end(self, state: TrainingState) -> None:
        """Add a row."""
        self.rows.append(_row(state))

    def record(self) -> dict[str, Any]:
        """All rows."""
        return {"rows": [dict(row) for row in self.rows]}

    def resume(self, record: dict[str, Any]) -> None:
        """Go on with the rows of the checkpoint."""
        self.rows = [dict(row) for row in record["rows"]]

    def column(self, name: str) -> list[float]:
        """One value over all epochs; NaN where an epoch has none."""
        return [row.get(name, math.nan) for row in self.rows]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a ``.json`` or ``.csv`` file. JSON has no NaN and no infinity: they become null.

        Raises:
            OptionError: the path has another ending or cannot be written.
        """
        path = Path(path)
        if path.suffix == ".json":
            rows = [{name: value if math.isfinite(value) else None for name, value in row.items()} for row in self.rows]
            _write(path, json.dumps(rows, indent=1) + "\n")
        elif path.suffix == ".csv":
            _write_csv(path, self.rows)
        else:
            raise OptionError(f"a history is saved as .json or .csv, not as '{path}'.")


class CsvLogger(Callback):
    """Keeps a ``.csv`` file up to date with one row per epoch, in the columns of `History`.

    The file is complete after every epoch. A column that appears later is added to all rows. A resumed
    training goes on with the rows that it had.

    Args:
        path: the file; what it held before is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._history = History()

    def on_fit_begin(self, state: TrainingState) -> None:
        """Write what there is, so that a path that cannot be written is known before the first step."""
        _write_csv(self.path, self._history.rows)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Add a row to the file."""
        self._history.on_epoch_end(state)
        _write_csv(self.path, self._history.rows)

    def record(self) -> dict[str, Any]:
        """All rows."""
        return self._history.record()

    def resume(self, record: dict[str, Any]) -> None:
        """Go on with the rows of the checkpoint."""
        self._history.resume(record)


def _row(state: TrainingState) -> dict[str, float]:
    values = {"loss": state.loss, "learning_rate": state.rate_of_last_step, **state.metrics}
    return {
        "epoch": state.epoch,
        "step": state.step,
        **{name: float(value) for name, value in values.items()},
    }


def _write_csv(path: Path, rows: Sequence[dict[str, float]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if columns:
        writer.writeheader()
    writer.writerows(rows)
    _write(path, text.getvalue())


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole: who reads it meanwhile sees the old or the new rows."""
    try:
        with explained(path):
            path.parent.stat()  # else it would be made
        with AtomicFiles() as files, files.create(path) as file:
            file.write(text.encode())
    except ModelError as error:
        raise OptionError(str(error)) from error
