"""Callbacks: what runs at the ends of steps and epochs; early stopping, history and log files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from onnxtrain.errors import CheckpointError, ModelError, OptionError
from onnxtrain.model.places import explained
from onnxtrain.model.writing import AtomicFiles


@dataclass
class TrainingState:
    """Where a training stands; callbacks read it, may ask to stop, and may set the learning rate.

    Attributes:
        epoch: number of the current epoch, from 0; what people read counts from 1.
        step: optimizer steps done since the training began.
        loss: of the last step; at the end of an epoch the mean over its examples. NaN before the first step.
        learning_rate: of the last step. Setting it is setting that of the trainer: it decides from the next step on,
            instead of the schedule, until it is set again or the training ends.
        batch_size: how many examples the last step had.
        metrics: what was measured, by name, at the end of the epoch; empty before.
        epochs: how many epochs are planned; None when not known.
        steps_per_epoch: how many steps an epoch has; None when not known.
        stop: whether to stop after the current step or epoch.
        stop_reason: why, in words.
    """

    epoch: int = 0
    step: int = 0
    loss: float = math.nan
    learning_rate: float = 0.0
    batch_size: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    epochs: int | None = None
    steps_per_epoch: int | None = None
    stop: bool = False
    stop_reason: str | None = None
    _choose_rate: Callable[[float], None] | None = field(default=None, init=False, repr=False, compare=False)
    _step_rate: float | None = field(default=None, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: Any) -> None:
        choose = self.__dict__.get("_choose_rate")
        if name == "learning_rate" and choose is not None:
            choose(value)
            value = float(value)
        super().__setattr__(name, value)

    def bind_rate(self, choose: Callable[[float], None]) -> None:
        """Tell what is to be called when a callback sets the learning rate: `fit` does this before the first step."""
        self._choose_rate = choose

    def note_step(self, *, step: int, loss: float, learning_rate: float, batch_size: int) -> None:
        """Take what a step was."""
        self.step, self.loss, self.batch_size = step, loss, batch_size
        self.__dict__["learning_rate"] = self._step_rate = learning_rate

    @property
    def rate_of_last_step(self) -> float:
        """The learning rate that the last step had, also after a callback has set that of the next."""
        return self.learning_rate if self._step_rate is None else self._step_rate

    def request_stop(self, reason: str) -> None:
        """Ask the training to stop; the first reason stays."""
        if not self.stop:
            self.stop, self.stop_reason = True, reason


class Callback:
    """The base of callbacks: override what you need.

    A callback that must survive a restart returns its memory from `record` and takes it back in `resume`.
    """

    def on_fit_begin(self, state: TrainingState) -> None:
        """Called once, before the first step."""

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Called before the first step of every epoch."""

    def on_step_end(self, state: TrainingState) -> None:
        """Called after every step."""

    def on_epoch_end(self, state: TrainingState) -> None:
        """Called after every epoch, when its metrics are known."""

    def on_fit_end(self, state: TrainingState) -> None:
        """Called once, after the last step, also when training was stopped."""

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: values that JSON can hold."""
        return {}

    def resume(self, record: dict[str, Any]) -> None:
        """Take back what `record` returned when the checkpoint was written."""


class CallbackList(Callback):
    """Several callbacks as one, called in their order.

    Args:
        callbacks: the callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = list(callbacks)

    def on_fit_begin(self, state: TrainingState) -> None:
        """Pass on to all."""
        for callback in self.callbacks:
            callback.on_fit_begin(state)

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Pass on to all."""
        for callback in self.callbacks:
            callback.on_epoch_begin(state)

    def on_step_end(self, state: TrainingState) -> None:
        """Pass on to all."""
        for callback in self.callbacks:
            callback.on_step_end(state)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Pass on to all."""
        for callback in self.callbacks:
            callback.on_epoch_end(state)

    def on_fit_end(self, state: TrainingState) -> None:
        """Pass on to all."""
        for callback in self.callbacks:
            callback.on_fit_end(state)

    def record(self) -> dict[str, Any]:
        """The records of all, by position and class."""
        return {self._key(index): callback.record() for index, callback in enumerate(self.callbacks)}

    def resume(self, record: dict[str, Any], *, may_differ: type[Callback] | None = None) -> None:
        """Give every callback its record back.

        Args:
            record: what `record` returned.
            may_differ: a class of callbacks that may have come or gone since; one that came has no record.

        Raises:
            CheckpointError: the record was made with other callbacks.
        """
        written = [(key.partition(" ")[2], value) for key, value in record.items()]
        free = "" if may_differ is None else may_differ.__name__
        optional = [value for name, value in written if name == free]
        fixed = [(name, value) for name, value in written if name != free]
        names = [type(callback).__name__ for callback in self.callbacks]
        if [name for name, _ in fixed] != [name for name in names if name != free]:
            keys = [self._key(index) for index in range(len(self.callbacks))]
            raise CheckpointError(
                f"the checkpoint was written with the callbacks {list(record)}, now there are {keys}; "
                f"resume with the same callbacks in the same order."
            )
        for name, callback in zip(names, self.callbacks, strict=True):
            if name != free:
                callback.resume(fixed.pop(0)[1])
            elif optional:
                callback.resume(optional.pop(0))

    def _key(self, index: int) -> str:
        return f"{index} {type(self.callbacks[index]).__name__}"


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
        self.best_weights: Any = None
        self.waited = 0
        self._snapshot: Callable[[], Any] | None = None
        self._restore: Callable[[Any], None] | None = None

    def bind(self, snapshot: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        """Tell how weights are kept: the trainer does this before the first step.

        Args:
            snapshot: returns a copy of the weights, in whatever form.
            restore: takes such a copy and makes it the weights again.
        """
        self._snapshot, self._restore = snapshot, restore

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
            if self.restore_best and self._snapshot is not None:
                self.best_weights = self._snapshot()
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "" if self.best is None else f" (best {self.best:.6g} in epoch {(self.best_epoch or 0) + 1})"
            state.request_stop(f"{self.monitor} has not improved for {self.waited} epochs{best}")

    def on_fit_end(self, state: TrainingState) -> None:
        """Put the best weights back."""
        if self.restore_best and self.best_weights is not None and self._restore is not None:
            self._restore(self.best_weights)

    def record(self) -> dict[str, Any]:
        """The best value and the epochs waited; `best_weights` are arrays, which the trainer keeps."""
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self.waited}

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
