"""Callbacks that watch a value over the epochs: early stopping, a lower learning rate, the best model."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from onnxtrain.callbacks.base import Callback, TrainingState
from onnxtrain.data.conversion import all_finite
from onnxtrain.errors import OptionError
from onnxtrain.renamed import metric_name, old_attribute
from onnxtrain.report.record import large_is_good
from onnxtrain.spelling import checks_arguments

RENAMED = {"minimum_delta": "min_delta", "minimum_rate": "min_lr"}
"""Old names of arguments."""


@checks_arguments(renamed=RENAMED)
class Watch(Callback):
    """The base of callbacks that compare a value with the best one so far, epoch by epoch.

    An epoch improves when its value is better than the best one so far by more than `min_delta`. An epoch never
    improves where the value, the validation loss or a weight is NaN.

    Args:
        monitor: the name of a metric, or ``loss`` for the training loss.
        min_delta: a smaller change is no improvement; not negative.
        mode: whether small (``min``) or large (``max``) values are good; None: by the name (accuracy: max).
        what: how messages call the callback.

    Raises:
        OptionError: an argument has a value that it cannot have.
    """

    minimum_delta = old_attribute("minimum_delta", "min_delta")

    def __init__(self, monitor: str, min_delta: float, mode: Literal["min", "max"] | None, what: str) -> None:
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise OptionError(f"min_delta of {what} is {min_delta}; it must be at least 0.")
        if mode not in (None, "min", "max"):
            raise OptionError(f"mode of {what} is '{mode}'; it must be 'min', 'max' or None.")
        self.monitor = monitor = metric_name(monitor)
        self.min_delta = min_delta
        self.mode = mode or ("max" if large_is_good(monitor) else "min")
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._what = what

    def improves(self, state: TrainingState) -> bool:
        """Compare with the best epoch, which this one is from now on where it is better.

        Raises:
            OptionError: the monitored value does not exist.
        """
        values = {"loss": state.loss, **state.metrics}
        if self.monitor not in values:
            raise OptionError(
                f"{self._what} monitors '{self.monitor}', but what is measured is {', '.join(values)}; "
                f"monitor one of these, or add validation data or the metric."
            )
        value = values[self.monitor]
        if math.isnan(value) or math.isnan(values.get("val_loss", 0.0)):
            return False
        if self.best is not None:
            gain = value - self.best if self.mode == "max" else self.best - value
            if not gain > self.min_delta:
                return False
        if not all(map(all_finite, state.weights.values())):  # the last update may have made them so
            return False
        self.best, self.best_epoch = value, state.epoch
        return True

    def record(self) -> dict[str, Any]:
        """The best value and its epoch."""
        return {"best": self.best, "best_epoch": self.best_epoch}

    def resume(self, record: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.best, self.best_epoch = record["best"], record["best_epoch"]


@checks_arguments(renamed=RENAMED)
class EarlyStopping(Watch):
    """Stop when a value has not improved for some epochs, and go back to the best weights.

    An epoch improves when its value is better than the best one so far by more than `min_delta`; NaN
    never improves. PyTorch has none; Keras' ``EarlyStopping`` is alike. Where the trainer keeps moving averages of the
    weights (``ema=``), those of the best epoch are put back, too.

    Args:
        monitor: the name of a metric, or ``loss`` for the training loss.
        patience: after how many epochs in a row without improvement to stop; at least 1.
        min_delta: a smaller change is no improvement; not negative.
        mode: whether small (``min``) or large (``max``) values are good; None: by the name (accuracy: max).
        restore_best: whether to put the weights of the best epoch back at the end.

    Raises:
        OptionError: an argument has a value that it cannot have.
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
        if patience < 1:
            raise OptionError(f"patience of early stopping is {patience}; it must be at least 1 epoch.")
        super().__init__(monitor, min_delta, mode, "early stopping")
        self.patience = patience
        self.restore_best = restore_best
        self.best_weights: dict[str, np.ndarray] = {}
        self.waited = 0

    def settings(self) -> dict[str, Any]:
        """All arguments."""
        watched = ("monitor", "patience", "min_delta", "mode", "restore_best")
        return {name: getattr(self, name) for name in watched}

    def on_epoch_end(self, state: TrainingState) -> None:
        """Compare with the best epoch.

        Raises:
            OptionError: the monitored value does not exist.
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
        """Put the best weights back."""
        if self.restore_best:
            for live in (state.weights, state.averages):
                live.update({name: array for name, array in self.best_weights.items() if name in live})

    def record(self) -> dict[str, Any]:
        """The best value and the epochs waited."""
        return {**super().record(), "waited": self.waited}

    def record_arrays(self) -> dict[str, np.ndarray]:
        """The best weights."""
        return dict(self.best_weights)

    def resume_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Take the best weights back."""
        self.best_weights = dict(arrays)

    def resume(self, record: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        super().resume(record)
        self.waited = record["waited"]


@checks_arguments(renamed=RENAMED)
class ReduceOnPlateau(Watch):
    """Multiply the learning rate by a factor when a value has not improved for some epochs.

    PyTorch: ``ReduceLROnPlateau(factor=factor, patience=patience - 1, threshold=min_delta, threshold_mode="abs")``;
    Keras' callback of that name. What it sets decides instead of a schedule.

    Args:
        monitor: the name of a metric, or ``loss`` for the training loss.
        factor: between 0 and 1.
        patience: after how many epochs in a row without improvement to reduce the rate; at least 1.
        min_delta: a smaller change is no improvement; not negative.
        min_lr: the lowest learning rate that it sets.
        mode: whether small (``min``) or large (``max``) values are good; None: by the name (accuracy: max).

    Raises:
        OptionError: an argument has a value that it cannot have.
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
        super().__init__(monitor, min_delta, mode, "reducing on a plateau")
        if not 0 < factor < 1:
            raise OptionError(f"factor of reducing on a plateau is {factor}; it must be between 0 and 1.")
        if patience < 1:
            raise OptionError(f"patience of reducing on a plateau is {patience}; it must be at least 1 epoch.")
        self.factor, self.patience, self.min_lr = factor, patience, min_lr
        self.waited = 0

    def settings(self) -> dict[str, Any]:
        """All arguments."""
        watched = ("monitor", "factor", "patience", "min_delta", "min_lr", "mode")
        return {name: getattr(self, name) for name in watched}

    def on_epoch_end(self, state: TrainingState) -> None:
        """Compare with the best epoch.

        Raises:
            OptionError: the monitored value does not exist.
        """
        self.waited = 0 if self.improves(state) else self.waited + 1
        if self.waited >= self.patience:
            self.waited = 0
            state.learning_rate = max(state.learning_rate * self.factor, self.min_lr)

    def record(self) -> dict[str, Any]:
        """The best value and the epochs waited."""
        return {**super().record(), "waited": self.waited}

    def resume(self, record: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        super().resume(record)
        self.waited = record["waited"]


@checks_arguments
class SaveBest(Watch):
    """Write the model whenever a value is the best one so far: what ``fit(save_best=...)`` adds.

    It has the weights that were measured: their moving averages where validation measures these.

    Args:
        path: the file; what it held before is replaced.
        monitor: the name of a metric, or ``loss`` for the training loss.
        mode: whether small (``min``) or large (``max``) values are good; None: by the name (accuracy: max).
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
        """Write the model where this epoch is the best so far.

        Raises:
            OptionError: the monitored value does not exist.
            ModelError: the file cannot be written.
        """
        if self.improves(state):
            state.trainer.save(self.path, ema=state.ema)
