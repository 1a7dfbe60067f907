"""The training loop: epochs, schedule, validation, checkpoints, callbacks."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.training.callbacks import Callback, CallbackList, EarlyStopping, History, TrainingState
from onnxtrain.training.data import Dataset
from onnxtrain.training.evaluation import fixed_batch_size
from onnxtrain.training.metrics import MeanAccumulator, NamedMetric
from onnxtrain.training.schedules import Schedule, resolve_schedule

if TYPE_CHECKING:
    from onnxtrain.training.checkpoint import CheckpointStore
    from onnxtrain.training.trainer import Source, Trainer


@dataclasses.dataclass
class Position:
    """Where a training stands, in what a checkpoint keeps: the next batch, the mean so far, why it stopped."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    total: float = 0.0
    examples: int = 0
    stopped: str | None = None


def fit(
    trainer: Trainer,
    data: Source,
    *,
    validation: Source = None,
    target: str | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    schedule: str | Schedule | None = None,
    metrics: Sequence[Any] = (),
    shuffle: bool = True,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    resume: bool = False,
) -> History:
    """Train for some epochs.

    Args:
        trainer: The trainer.
        data: Training data: a ``.npz`` file, a folder of ``.npy`` files, a mapping of arrays, (inputs, targets),
            or an iterable of batches.
        validation: Data to evaluate on after every epoch.
        target: Name of the target array, where several are left beside the inputs.
        epochs: How often to go through the data.
        batch_size: Examples per step (split into micro-batches where the trainer accumulates).
        schedule: Learning rate by step: ``"cosine"``, ``"warmup(100)+linear"``, ``"step(30, 0.1)"`` ..., an
            object of :mod:`onnxtrain.training.schedules`, or a function; constant by default.
        metrics: What to measure on the validation data: names or functions of (y_true, y_pred).
        shuffle: Whether to take the examples in a new order every epoch (by the trainer's seed).
        callbacks: Called at the ends of steps and epochs.
        checkpoint: Folder of checkpoints; none by default.
        checkpoint_every: Steps between checkpoints; by default one per epoch.
        keep: How many checkpoints to keep.
        resume: Go on from the newest checkpoint of the folder, bit for bit as if never stopped.

    Returns:
        One row per epoch: loss, learning rate, validation loss and metrics.

    Raises:
        DataError: Data does not fit the model.
        NumericalError: The loss became NaN; the message names the step and the last good checkpoint.
        CheckpointError: The checkpoint to resume does not belong to this training.
    """
    if epochs < 1:
        raise OptionError(f"epochs is {epochs}; it needs a number of at least 1.")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise OptionError(f"checkpoint_every is {checkpoint_every}; it needs a number of steps of at least 1.")
    if metrics and validation is None:
        raise OptionError("metrics are measured on validation data; give validation=.")
    if resume and checkpoint is None:
        raise OptionError("resume needs the folder of the checkpoints; give checkpoint=.")
    dataset = trainer.open(data, target=target)
    held_out = None if validation is None else trainer.open_for_evaluation(validation, target=target)[1]
    fixed = fixed_batch_size(trainer._subject.model.graph)
    size = batch_size if fixed is None else fixed
    per_epoch = dataset.batch_count(size)
    if fixed is not None and dataset.size is not None:
        per_epoch = dataset.size // fixed
        if per_epoch == 0:
            raise OptionError(
                f"The model takes batches of exactly {fixed} examples, but the data has {dataset.size}; "
                "give more data or export the model with a dynamic batch axis."
            )
    rate = resolve_schedule(
        schedule,
        trainer.optimizer.learning_rate,
        total_steps=None if per_epoch is None else per_epoch * epochs,
        steps_per_epoch=per_epoch,
    )
    measured = trainer._subject.resolve_metrics(metrics)
    history = History()
    listeners = CallbackList([history, *callbacks])
    store = None if checkpoint is None else _store(checkpoint, keep)
    loop = _Loop(trainer, dataset, held_out, measured, rate, listeners, store)
    loop.batch_size, loop.fixed, loop.shuffle, loop.every = size, fixed, shuffle, checkpoint_every
    loop.state = TrainingState(epochs=epochs, steps_per_epoch=per_epoch)
    if resume:
        loop.resume()
    elif store is not None and store.latest() is not None:
        raise CheckpointError(
            f"The folder {str(store.folder)!r} holds checkpoints of an earlier training (the newest is "
            f"{store.latest()}); resume it, or give another folder."
        )
    loop.run(epochs)
    return history


def _store(folder: str | os.PathLike[str], keep: int) -> CheckpointStore:
    from onnxtrain.training.checkpoint import CheckpointStore  # imports safetensors

    return CheckpointStore(folder, keep)


class _Loop:
    """One call of fit."""

    batch_size: int
    fixed: int | None
    shuffle: bool
    every: int | None
    state: TrainingState

    def __init__(
        self,
        trainer: Trainer,
        dataset: Dataset,
        validation: Dataset | None,
        metrics: list[NamedMetric],
        rate: Schedule,
        callbacks: CallbackList,
        store: CheckpointStore | None,
    ) -> None:
        self.trainer = trainer
        self.dataset = dataset
        self.validation = validation
        self.metrics = metrics
        self.rate = rate
        self.callbacks = callbacks
        self.store = store
        self.position = Position()
        for callback in callbacks.callbacks:
            if isinstance(callback, EarlyStopping):
                callback.bind(self._snapshot, self._restore)

    def run(self, epochs: int) -> None:
        """All epochs from the current position."""
        state = self.state
        self.callbacks.on_fit_begin(state)
        while self.position.epoch < epochs and not state.stop:
            self._epoch()
        self.callbacks.on_fit_end(state)

    def _epoch(self) -> None:
        trainer, state, position = self.trainer, self.state, self.position
        state.epoch, state.metrics = position.epoch, {}
        self.callbacks.on_epoch_begin(state)
        batches = self.dataset.batches(
            self.batch_size,
            shuffle=self.shuffle,
            seed=trainer.seed,
            epoch=position.epoch,
            start=position.batch,
        )
        for batch in batches:
            if self.fixed is not None and batch.size != self.fixed:
                continue  # the model takes whole batches only
            trainer.learning_rate = float(self.rate(position.step))
            loss = trainer._step_batch(batch)
            trainer.check_finite(loss, position.step, self._last_good())
            position.step += 1
            position.batch += 1
            position.total += loss * batch.size
            position.examples += batch.size
            state.step, state.loss, state.learning_rate = position.step, loss, trainer.learning_rate
            state.batch_size = batch.size
            self.callbacks.on_step_end(state)
            if self.every is not None and position.step % self.every == 0:
                self._save()
            if state.stop:
                return
        self._end_epoch()

    def _end_epoch(self) -> None:
        trainer, state, position = self.trainer, self.state, self.position
        mean = MeanAccumulator()
        mean.add(position.total / max(position.examples, 1), position.examples)
        state.loss = mean.value
        if self.validation is not None:
            measured = trainer.evaluate(self.validation, batch_size=max(self.batch_size, 64), metrics=self.metrics)
            state.metrics = {f"validation_{name}": value for name, value in measured.items()}
        self.callbacks.on_epoch_end(state)
        self.position = Position(epoch=position.epoch + 1, step=position.step, stopped=state.stop_reason)
        if self.store is not None:
            self._save()

    def _last_good(self) -> str:
        newest = None if self.store is None else self.store.latest()
        return "" if newest is None else f"The last good checkpoint is {newest}."

    def _snapshot(self) -> dict[str, np.ndarray]:
        return {name: np.array(array) for name, array in self.trainer.trained_values().items()}

    def _restore(self, weights: dict[str, np.ndarray]) -> None:
        for name, array in weights.items():
            self.trainer.session.state[name] = array

    def _fingerprint(self) -> dict[str, Any]:
        """What must agree between the training that wrote a checkpoint and the one that resumes it."""
        trainer = self.trainer
        return {
            "optimizer": type(trainer.optimizer).__name__,
            "attributes": dict(trainer.optimizer.node_attributes()),
            "seed": trainer.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "examples": self.dataset.size,
            "parameters": {name: list(array.shape) for name, array in trainer.parameters.items()},
            "masks": {name: zlib.crc32(np.packbits(mask).tobytes()) for name, mask in trainer.masks.items()},
        }

    def _save(self) -> None:
        if self.store is None:
            return
        tensors = {f"state/{name}": array for name, array in self.trainer.session.state.items()}
        for callback in self.callbacks.callbacks:
            if isinstance(callback, EarlyStopping) and callback.best_weights is not None:
                tensors |= {f"best/{name}": array for name, array in callback.best_weights.items()}
        self.store.save(
            self.position.step,
            tensors,
            {
                "fingerprint": self._fingerprint(),
                "position": dataclasses.asdict(self.position),
                "callbacks": self.callbacks.record(),
            },
        )
        self.trainer.reseed(self.position.step)

    def resume(self) -> None:
        """Take everything back from the newest checkpoint."""
        assert self.store is not None
        if self.store.latest() is None:
            return
        tensors, metadata = self.store.load(expect=self._fingerprint())
        states = self.trainer.session.state
        missing = [name for name in states if f"state/{name}" not in tensors]
        if missing:
            raise CheckpointError(f"The checkpoint lacks the states {missing[:5]}; it is of another training.")
        for name in states:
            states[name] = tensors[f"state/{name}"]
        best = {key.removeprefix("best/"): array for key, array in tensors.items() if key.startswith("best/")}
        for callback in self.callbacks.callbacks:
            if isinstance(callback, EarlyStopping) and best:
                callback.best_weights = best
        self.position = Position(**metadata["position"])  # type: ignore[arg-type]
        self.callbacks.resume(metadata["callbacks"])  # type: ignore[arg-type]
        self.state.step = self.position.step
        if self.position.stopped is not None:
            self.state.request_stop(self.position.stopped)
        self.trainer.reseed(self.position.step)
