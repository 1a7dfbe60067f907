"""The base of callbacks, which are called at the ends of steps and epochs, and the state that they receive."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.model_file.writing import only_warns


@dataclass
class TrainingState:
    """Progress of a training; callbacks read it, may request a stop, and may set the learning rate.

    Attributes:
        epoch: Number of the current epoch, from 1; 0 before the first.
        step: Optimizer steps since the training began.
        loss: Loss of the last step; at the end of an epoch the mean over its examples. NaN before the first step.
        learning_rate: Learning rate of the last step. Setting it sets the trainer's: it replaces the schedule from the
            next step on, until it is set again or the training ends.
        batch_size: Number of examples of the last step; before the first one, the configured batch size.
        waited: Seconds spent waiting for data since this training, or its resumption, began.
        data: Name of the data for messages.
        of_tokens: True if examples are rows of tokens.
        tokens_per_second: Tokens of the epoch's steps per second, at its end; None where examples are not rows of
            tokens.
        batch: The examples of the last step, a :class:`~onnxtrain.data.Batch`; None before the first step.
        metrics: Metrics of the epoch by name, at its end; empty before.
        epochs: Number of planned epochs; None when not known.
        steps_per_epoch: Number of steps of an epoch; None when not known.
        stop: True to stop after the current step or epoch.
        stop_reason: Reason to stop, in words.
        trainer: The trainer, for predictions, evaluations and saving; None outside `fit`.
        weights: Live values of the trainable parameters by name: arrays to read, and to assign to.
        averages: Moving averages of the parameters in the same way, by ``{parameter}/average``; empty where the trainer
            keeps none.
        ema: True if validation evaluates the moving averages, the model that ``trainer.save(path, ema=True)`` writes.
        first_set: Prefix of the first of several validation sets, ``clean_``; empty for one.
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
    of_tokens: bool = False
    tokens_per_second: float | None = None
    batch: Any = field(default=None, repr=False, compare=False)
    weights: MutableMapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    averages: MutableMapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    ema: bool = False
    first_set: str = ""
    _choose_rate: Callable[[float], None] | None = field(default=None, init=False, repr=False, compare=False)
    _step_rate: float | None = field(default=None, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: Any) -> None:
        choose = self.__dict__.get("_choose_rate")
        if name == "learning_rate" and choose is not None:
            choose(value)
            value = float(value)
        super().__setattr__(name, value)

    def bind_rate(self, choose: Callable[[float], None]) -> None:
        """Register the function to call when a callback sets the learning rate; `fit` does so before the first step."""
        self._choose_rate = choose

    def note_step(self, *, step: int, loss: float, learning_rate: float, batch_size: int) -> None:
        """Record a finished step."""
        self.step, self.loss, self.batch_size = step, loss, batch_size
        self.__dict__["learning_rate"] = self._step_rate = learning_rate

    @property
    def rate_of_last_step(self) -> float:
        """Learning rate of the last step, even after a callback has set the next one."""
        return self.learning_rate if self._step_rate is None else self._step_rate

    def request_stop(self, reason: str) -> None:
        """Request a stop; the first reason is kept."""
        if not self.stop:
            self.stop, self.stop_reason = True, reason


class Callback:
    """Base of callbacks: override what you need. Any object with some of these methods is a callback, too.

    A callback that must survive a restart returns its state from `record` and `record_arrays` and restores it in
    `resume` and `resume_arrays`. One that affects the results of a training, such as early stopping, has a `setting`.
    """

    setting: ClassVar[str | None] = None
    """Name of :meth:`settings` among the settings that a checkpoint compares; resuming with ``change=`` that name
    accepts other settings of the callback, or none. None where the callback does not affect the training."""

    writes_only: ClassVar[bool] = False
    """True if the callback only displays or writes: in distributed training, only rank 0 calls it. Its errors are
    warnings once the training has begun."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the results of the training."""
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
        """Called last in any case, also after an error: release resources."""

    def record(self) -> dict[str, Any]:
        """Return the state of this callback for a checkpoint, as JSON values."""
        return {}

    def resume(self, record: dict[str, Any]) -> None:
        """Restore what `record` returned when the checkpoint was written."""

    def record_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of this callback for a checkpoint."""
        return {}

    def resume_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restore what `record_arrays` returned; called before `resume`."""


HOOKS = ("on_fit_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_fit_end")
"""Methods that a training calls; a callback has at least one of them."""


class CallbackList(Callback):
    """A list of callbacks as a single callback; they are called in order.

    Args:
        callbacks: Objects with some of the methods of `Callback`.

    Attributes:
        silent: True if another process displays and writes.

    Raises:
        OptionError: An object has none of these methods.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self.callbacks = list(callbacks)
        self.silent = False
        for callback in self.callbacks:
            if isinstance(callback, type) or not any(hasattr(callback, hook) for hook in HOOKS):
                shown = f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback)
                raise OptionError(f"A callback is an object with one or more of {', '.join(HOOKS)}, not {shown}.")

    @property
    def decide_by_step(self) -> bool:
        """True where a user's callback may stop one process after a step but not another."""
        return any(
            hasattr(callback, "on_step_end")
            and getattr(type(callback), "on_step_end", None) is not Callback.on_step_end
            and not type(callback).__module__.startswith("onnxtrain.")
            for callback in self.callbacks
        )

    def _call(self, hook: str, state: TrainingState) -> None:
        for callback in self.callbacks:
            writes_only = getattr(callback, "writes_only", False)
            if hasattr(callback, hook) and not (self.silent and writes_only):
                with _guarded(callback) if writes_only and hook != "on_fit_begin" else contextlib.nullcontext():
                    getattr(callback, hook)(state)

    def on_fit_begin(self, state: TrainingState) -> None:
        """Call all callbacks."""
        self._call("on_fit_begin", state)

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Call all callbacks."""
        self._call("on_epoch_begin", state)

    def on_step_end(self, state: TrainingState) -> None:
        """Call all callbacks."""
        self._call("on_step_end", state)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Call all callbacks."""
        self._call("on_epoch_end", state)

    def on_fit_end(self, state: TrainingState) -> None:
        """Call all callbacks."""
        self._call("on_fit_end", state)

    def close(self) -> None:
        """Close all instances of `Callback`; `close` may mean something else for other objects."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                if isinstance(callback, Callback):
                    stack.callback(_close, callback)

    def record(self) -> dict[str, Any]:
        """Return the records of all callbacks with state, by position, class and setting."""
        return {key: _returned(callback, "record") for key, callback in self._keys().items()}

    def record_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of all callbacks, by position, class and setting."""
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
        """Restore every callback from its record.

        Args:
            record: The result of `record`.
            arrays: The result of `record_arrays`.
            may_differ: Settings whose callbacks may have been added or removed since the checkpoint.

        Raises:
            CheckpointError: The record is from other callbacks.
        """

        def kinds(keys: Iterable[str], *, free: bool) -> list[tuple[str, str]]:
            """Return class and key of the callbacks that may differ, or of the others."""
            split = [(key, *key.split(" ")[1:]) for key in keys]
            return [(kind, key) for key, kind, *setting in split if bool({*setting} & {*may_differ}) == free]

        here = self._keys()
        fixed, fixed_here = kinds(record, free=False), kinds(here, free=False)
        if [kind for kind, _ in fixed] != [kind for kind, _ in fixed_here]:
            raise CheckpointError(
                f"The checkpoint was written with the callbacks {list(record)}, now there are {list(here)}; "
                f"resume with the same callbacks in the same order."
            ).about("callbacks", got=[*here], wanted=[*record])
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
        """Return callbacks with state by their keys in a checkpoint; others may come and go."""
        found = {}
        for index, callback in enumerate(self.callbacks):
            if not _has_state(callback):
                continue
            setting = getattr(callback, "setting", None)
            found[" ".join(filter(None, (str(index), type(callback).__name__, setting)))] = callback
        return found


def _guarded(callback: Any) -> contextlib.AbstractContextManager[None]:
    return only_warns(f"{type(callback).__name__} failed")


def _close(callback: Callback) -> None:
    with _guarded(callback) if callback.writes_only else contextlib.nullcontext():
        callback.close()


def _has_state(callback: Any) -> bool:
    """Return whether a callback defines `record`, `record_arrays` or `setting`."""
    return getattr(callback, "setting", None) is not None or any(
        getattr(type(callback), name, None) not in (None, getattr(Callback, name))
        for name in ("record", "record_arrays")
    )


def _returned(callback: Any, method: str) -> dict[str, Any]:
    return dict(getattr(callback, method)()) if hasattr(callback, method) else {}
