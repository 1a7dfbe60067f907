"""Callbacks: objects that are called at the ends of steps and epochs, and the state that they receive."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from onnxtrain.errors import CheckpointError, OptionError


@dataclass
class TrainingState:
    """The progress of a training; callbacks read it, may request a stop, and may set the learning rate.

    Attributes:
        epoch: number of the current epoch, from 1; 0 before the first.
        step: optimizer steps done since the training began.
        loss: of the last step; at the end of an epoch the mean over its examples. NaN before the first step.
        learning_rate: of the last step. Setting it is setting that of the trainer: it decides from the next step on,
            instead of the schedule, until it is set again or the training ends.
        batch_size: how many examples the last step had; before the first one how many steps are to have.
        waited: seconds that steps have waited for data since this training, or its resumption, began.
        data: what to call the data.
        batch: these examples, a :class:`~onnxtrain.data.Batch`; None before the first step.
        metrics: what was measured, by name, at the end of the epoch; empty before.
        epochs: how many epochs are planned; None when not known.
        steps_per_epoch: how many steps an epoch has; None when not known.
        stop: whether to stop after the current step or epoch.
        stop_reason: why, in words.
        trainer: who trains: for predictions, evaluations and saving; None outside of `fit`.
        weights: the live values of what is trained, by name: arrays to read, and to assign to.
        averages: the moving averages of the parameters in the same way, by ``{parameter}/average``; empty where the
            trainer keeps none.
        ema: whether validation measures the moving averages; then a model that is kept for what was measured is that of
            ``trainer.save(path, ema=True)``.
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
    trainer: Any = field(default=None, repr=False, compare=False)
    waited: float = 0.0
    data: str = "the data"
    batch: Any = field(default=None, repr=False, compare=False)
    weights: MutableMapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    averages: MutableMapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    ema: bool = False
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
    """The base of callbacks: override what you need. Any other object with some of these methods is one, too.

    A callback that must survive a restart returns its memory from `record` and `record_arrays` and takes it back in
    `resume` and `resume_arrays`. One that changes the numbers of a training, as early stopping does, has a `setting`.
    """

    setting: ClassVar[str | None] = None
    """Name of what :meth:`settings` returns among all that a checkpoint compares; resuming with ``change=`` that name
    allows another callback of the kind, or none. None where the training goes the same way without the callback."""

    writes_only: ClassVar[bool] = False
    """Whether it only shows or writes what happens: of several processes that train together, rank 0 alone calls it."""

    def settings(self) -> dict[str, Any]:
        """Settings that affect the results of the training."""
        return {}

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

    def close(self) -> None:
        """Called last in any case, also after an error: give back what is held open."""

    def record(self) -> dict[str, Any]:
        """State of this callback for a checkpoint, as values that JSON can hold."""
        return {}

    def resume(self, record: dict[str, Any]) -> None:
        """Take back what `record` returned when the checkpoint was written."""

    def record_arrays(self) -> dict[str, np.ndarray]:
        """Arrays that a checkpoint keeps of this callback."""
        return {}

    def resume_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Take back what `record_arrays` returned, before `resume`."""


HOOKS = ("on_fit_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_fit_end")
"""The methods that a training calls; a callback has at least one of them."""


class CallbackList(Callback):
    """Several callbacks as one, called in their order.

    Args:
        callbacks: the callbacks: objects with some of the methods of `Callback`.

    Attributes:
        silent: Whether another process shows and writes down what happens.

    Raises:
        OptionError: one has none of these methods.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self.callbacks = list(callbacks)
        self.silent = False
        for callback in self.callbacks:
            if isinstance(callback, type) or not any(hasattr(callback, hook) for hook in HOOKS):
                shown = f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback)
                raise OptionError(f"a callback is an object with one or more of {', '.join(HOOKS)}, not {shown}.")

    @property
    def decide_by_step(self) -> bool:
        """Whether a step may end otherwise in one process than in another: by what a user's callback does."""
        return any(
            hasattr(callback, "on_step_end")
            and getattr(type(callback), "on_step_end", None) is not Callback.on_step_end
            and not type(callback).__module__.startswith("onnxtrain.")
            for callback in self.callbacks
        )

    def _call(self, hook: str, state: TrainingState) -> None:
        for callback in self.callbacks:
            if hasattr(callback, hook) and not (self.silent and getattr(callback, "writes_only", False)):
                getattr(callback, hook)(state)

    def on_fit_begin(self, state: TrainingState) -> None:
        """Pass on to all."""
        self._call("on_fit_begin", state)

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Pass on to all."""
        self._call("on_epoch_begin", state)

    def on_step_end(self, state: TrainingState) -> None:
        """Pass on to all."""
        self._call("on_step_end", state)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Pass on to all."""
        self._call("on_epoch_end", state)

    def on_fit_end(self, state: TrainingState) -> None:
        """Pass on to all."""
        self._call("on_fit_end", state)

    def close(self) -> None:
        """Pass on to all that are of the class `Callback`; what `close` means to others nobody knows."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                if isinstance(callback, Callback):
                    stack.callback(callback.close)

    def record(self) -> dict[str, Any]:
        """The records of all that keep something, by position, class and setting."""
        return {key: _returned(callback, "record") for key, callback in self._keys().items()}

    def record_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of all, by position, class and setting."""
        return {
            f"{key}/{name}": array
            for key, callback in self._keys().items()
            for name, array in _returned(callback, "record_arrays").items()
        }

    def resume(
        self,
        record: dict[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        may_differ: Collection[str] = (),
    ) -> None:
        """Give every callback its record back.

        Args:
            record: what `record` returned.
            arrays: what `record_arrays` returned.
            may_differ: settings whose callbacks may have come or gone since; one that came has no record.

        Raises:
            CheckpointError: the record was made with other callbacks.
        """

        def kinds(keys: Iterable[str], *, free: bool) -> list[tuple[str, str]]:
            """Class and key of the callbacks that may differ, or of the others."""
            split = [(key, *key.split(" ")[1:]) for key in keys]
            return [(kind, key) for key, kind, *setting in split if bool({*setting} & {*may_differ}) == free]

        here = self._keys()
        fixed, fixed_here = kinds(record, free=False), kinds(here, free=False)
        if [kind for kind, _ in fixed] != [kind for kind, _ in fixed_here]:
            raise CheckpointError(
                f"the checkpoint was written with the callbacks {list(record)}, now there are {list(here)}; "
                f"resume with the same callbacks in the same order."
            )
        pairs = list(zip(fixed, fixed_here, strict=True))
        pairs += list(zip(kinds(record, free=True), kinds(here, free=True), strict=False))
        for (_, old), (_, new) in pairs:
            callback, start = here[new], f"{old}/"
            own = {key.removeprefix(start): a for key, a in (arrays or {}).items() if key.startswith(start)}
            if hasattr(callback, "resume_arrays"):
                callback.resume_arrays(own)
            if hasattr(callback, "resume"):
                callback.resume(record[old])

    def _keys(self) -> dict[str, Any]:
        """The callbacks by what a checkpoint calls them; those that keep nothing may come and go."""
        found = {}
        for index, callback in enumerate(self.callbacks):
            if not _keeps_something(callback):
                continue
            setting = getattr(callback, "setting", None)
            found[" ".join(filter(None, (str(index), type(callback).__name__, setting)))] = callback
        return found


def _keeps_something(callback: Any) -> bool:
    """Whether a checkpoint has something of a callback: it has a `record`, `record_arrays` or `setting` of its own."""
    return getattr(callback, "setting", None) is not None or any(
        getattr(type(callback), name, None) not in (None, getattr(Callback, name))
        for name in ("record", "record_arrays")
    )


def _returned(callback: Any, method: str) -> dict[str, Any]:
    return dict(getattr(callback, method)()) if hasattr(callback, method) else {}


def settings_of(callbacks: Sequence[Any], setting: str) -> list[dict[str, Any]]:
    """The settings of the callbacks of a kind."""
    return [callback.settings() for callback in callbacks if getattr(callback, "setting", None) == setting]
