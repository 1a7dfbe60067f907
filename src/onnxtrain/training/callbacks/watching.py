"""Callbacks that monitor a value over the epochs: early stopping, a lower learning rate, the best model."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from onnxtrain.data.conversion import all_finite
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.writing import only_warns
from onnxtrain.training.callbacks.base import Callback, TrainingState
from onnxtrain.training.report.record import large_is_good


@checks_arguments
class Watch(Callback):
    """Base of callbacks that compare a value with the best one so far, epoch by epoch.

    An epoch improves when its value is better than the best one so far by more than `min_delta`. An epoch never
    improves where the value, the validation loss or a weight is NaN.

    Args:
        monitor: Name of a metric, or ``loss`` for the training loss.
        min_delta: Smallest change that is an improvement, at least 0.
        mode: ``min`` if small values are good, ``max`` if large ones; None decides by name (accuracy: max).
        what: Name of the callback in messages.

    Raises:
        OptionError: An argument is invalid.
    """

    def __init__(self, monitor: str, min_delta: float, mode: Literal["min", "max"] | None, what: str) -> None:
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise OptionError(f"min_delta of {what} is {min_delta}; it must be at least 0.")
        if mode not in (None, "min", "max"):
            raise OptionError(f"mode of {what} is '{mode}'; it must be 'min', 'max' or None.")
        self.monitor = monitor
        self.min_delta = min_delta
        self.mode = mode or ("max" if large_is_good(monitor) else "min")
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._what = what

    def improves(self, state: TrainingState) -> bool:
        """Compare with the best epoch, and remember this one if it is better.

        Raises:
            OptionError: The monitored value does not exist.
        """
        values = {"loss": state.loss, **state.metrics}
        first = "val_" + state.first_set + self.monitor.removeprefix("val_")
        if self.monitor.startswith("val_") and first in values:
            values.setdefault(self.monitor, values[first])
        if self.monitor not in values:
            raise OptionError(
                f"{self._what} monitors '{self.monitor}', but the measured values are {', '.join(values)}; "
                f"monitor one of these, or add validation data or the metric."
            ).about("monitor", got=self.monitor, wanted=[*values])
        value = values[self.monitor]
        if math.isnan(value) or math.isnan(values.get("val_loss", 0.0)):
            return False
        if self.best is not None:
            gain = value - self.best if self.mode == "max" else self.best - value
            if not gain > self.min_delta:
                return False
        if not all(map(all_finite, state.weights.values())):  # the last update may have produced NaN
            return False
        self.best, self.best_epoch = value, state.epoch
        return True

    def record(self) -> dict[str, Any]:
        """Return the best value and its epoch."""
        return {"best": self.best, "best_epoch": self.best_epoch}

    def resume(self, record: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.best, self.best_epoch = record["best"], record["best_epoch"]


class _PatientWatch(Watch):
    """Base of callbacks that act after several epochs without improvement."""

    def __init__(
        self, monitor: str, patience: int, min_delta: float, mode: Literal["min", "max"] | None, what: str
    ) -> None:
        if patience < 1:
            raise OptionError(f"patience of {what} is {patience}; it must be at least 1 epoch.")
        super().__init__(monitor, min_delta, mode, what)
        self.patience = patience
        self.waited = 0

    def record(self) -> dict[str, Any]:
        """Return the best value and the epochs waited."""
        return {**super().record(), "waited": self.waited}

    def resume(self, record: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        super().resume(record)
        self.waited = record["waited"]


@checks_arguments
class EarlyStopping(_PatientWatch):
    """Stop when a value has not improved for some epochs, and restore the best weights.

    An epoch improves when its value is better than the best one so far by more than `min_delta`; NaN never improves.
    Similar to Keras' ``EarlyStopping``; PyTorch has none. Where the trainer keeps moving averages of the weights
    (``ema=``), those of the best epoch are restored, too.

    Args:
        monitor: Name of a metric, or ``loss`` for the training loss.
        patience: Number of consecutive epochs without improvement after which to stop, at least 1.
        min_delta: Smallest change that is an improvement, at least 0.
        mode: ``min`` if small values are good, ``max`` if large ones; None decides by name (accuracy: max).
        restore_best: Restore the weights of the best epoch at the end.

    Raises:
        OptionError: An argument is invalid.
    """

    setting: ClassVar[str | None] = "early_stopping"

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
        restore_best: bool = True,
    ) -> None:
        super().__init__(monitor, patience, min_delta, mode, "early stopping")
        self.restore_best = restore_best
        self.best_weights: dict[str, np.ndarray] = {}

    def settings(self) -> dict[str, Any]:
        """Return all arguments."""
        watched = ("monitor", "patience", "min_delta", "mode", "restore_best")
        return {name: getattr(self, name) for name in watched}

    def on_epoch_end(self, state: TrainingState) -> None:
        """Compare with the best epoch.

        Raises:
            OptionError: The monitored value does not exist.
        """
        if self.improves(state):
            self.waited = 0
            if self.restore_best:
                kept = {**state.weights, **state.averages}
                self.best_weights = {name: np.array(array) for name, array in kept.items()}
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "" if self.best is None else f" (best {self.best:.6g} in epoch {self.best_epoch})"
            state.request_stop(f"{self.monitor} has not improved for {self.waited} epochs{best}")

    def on_fit_end(self, state: TrainingState) -> None:
        """Restore the best weights."""
        if self.restore_best:
            for live in (state.weights, state.averages):
                live.update({name: array for name, array in self.best_weights.items() if name in live})

    def record_arrays(self) -> dict[str, np.ndarray]:
        """Return the best weights."""
        return dict(self.best_weights)

    def resume_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restore the best weights of a checkpoint."""
        self.best_weights = dict(arrays)


@checks_arguments
class ReduceOnPlateau(_PatientWatch):
    """Multiply the learning rate by a factor when a value has not improved for some epochs.

    PyTorch: ``ReduceLROnPlateau(factor=factor, patience=patience - 1, threshold=min_delta, threshold_mode="abs")``;
    Keras: the callback of this name. The rate that it sets replaces the schedule.

    Args:
        monitor: Name of a metric, or ``loss`` for the training loss.
        factor: Factor of the learning rate, between 0 and 1.
        patience: Number of consecutive epochs without improvement after which to reduce the rate, at least 1.
        min_delta: Smallest change that is an improvement, at least 0.
        min_lr: Lowest learning rate.
        mode: ``min`` if small values are good, ``max`` if large ones; None decides by name (accuracy: max).

    Raises:
        OptionError: An argument is invalid.
    """

    setting: ClassVar[str | None] = "reduce_on_plateau"

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 3,
        min_delta: float = 0.0,
        min_lr: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        super().__init__(monitor, patience, min_delta, mode, "reducing on a plateau")
        if not 0 < factor < 1:
            raise OptionError(f"factor of reducing on a plateau is {factor}; it must be between 0 and 1.")
        self.factor, self.min_lr = factor, min_lr

    def settings(self) -> dict[str, Any]:
        """Return all arguments."""
        watched = ("monitor", "factor", "patience", "min_delta", "min_lr", "mode")
        return {name: getattr(self, name) for name in watched}

    def on_epoch_end(self, state: TrainingState) -> None:
        """Compare with the best epoch.

        Raises:
            OptionError: The monitored value does not exist.
        """
        self.waited = 0 if self.improves(state) else self.waited + 1
        if self.waited >= self.patience:
            self.waited = 0
            state.learning_rate = max(state.learning_rate * self.factor, self.min_lr)


@checks_arguments
class SaveBest(Watch):
    """Write the model whenever a value is the best one so far; ``fit(save_best=...)`` adds this callback.

    The file has the evaluated weights: their moving averages where validation evaluates these.

    Args:
        path: The file, which is replaced.
        monitor: Name of a metric, or ``loss`` for the training loss.
        mode: ``min`` if small values are good, ``max`` if large ones; None decides by name (accuracy: max).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        monitor: str = "val_loss",
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        super().__init__(monitor, 0.0, mode, "save_best")
        self.path = Path(path)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the model if this epoch is the best so far; warn where it cannot be written.

        Raises:
            OptionError: The monitored value does not exist.
        """
        before = self.best, self.best_epoch
        if self.improves(state):
            best, (self.best, self.best_epoch) = (self.best, self.best_epoch), before
            with only_warns(f"The model of epoch {state.epoch}, the best so far, is not saved"):
                state.trainer.save(self.path, ema=state.ema)
                self.best, self.best_epoch = best
