"""The training loop: epochs, schedule, validation, checkpoints, callbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.errors import CheckpointError, DataError, ModelError, OptionError
from onnxtrain.training.callbacks import Callback, CallbackList, EarlyStopping, History, TrainingState
from onnxtrain.training.data import Batch, Dataset
from onnxtrain.training.fingerprint import (
    JSON,
    describe_course,
    describe_data,
    describe_model,
    describe_settings,
    describe_weights,
    differences,
    names_to_change,
)
from onnxtrain.training.masks import set_to_zero
from onnxtrain.training.metrics import MeanAccumulator, NamedMetric
from onnxtrain.training.partial import part
from onnxtrain.training.schedules import Schedule, resolve_schedule
from onnxtrain.version import __version__

if TYPE_CHECKING:
    from onnxtrain.training.checkpoint import CheckpointStore
    from onnxtrain.training.trainer import Source, Trainer


@dataclasses.dataclass
class Position:
    """Where a training stands, in what a checkpoint keeps: the next batch, the mean so far, why it stopped.

    ``learning_rate`` is what a callback set, where one did: it decides instead of the schedule. ``last_rate`` is that
    of the last step.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    total: float = 0.0
    examples: int = 0
    stopped: str | None = None
    learning_rate: float | None = None
    last_rate: float | None = None


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
    change: str | Sequence[str] = (),
) -> History:
    """Train for some epochs.

    The last batch of an epoch may be smaller than the others: its step is one on the mean over its own examples. A
    model of a fixed batch size gets such a batch padded; the padding does not count in the loss.

    The learning rate is the schedule's, which starts from :attr:`onnxtrain.Trainer.learning_rate`. A callback that sets
    that of the trainer or of its :class:`~onnxtrain.training.callbacks.TrainingState` takes it over from the next step
    on; the rate that was set last wins, and a resumed training goes on with it.

    Args:
        trainer: The trainer.
        data: Training data: a ``.npz`` file, a folder of ``.npy`` files, a mapping of arrays, (inputs, targets),
            or an iterable of batches.
        validation: Data to evaluate on after every epoch.
        target: Name of the target array, where several are left beside the inputs.
        epochs: How often to go through the data.
        batch_size: Examples per step (split into micro-batches where the trainer accumulates). A model of a fixed
            batch size has its own, times the micro-batches of the trainer.
        schedule: Learning rate by step: ``"cosine"``, ``"warmup(100)+linear"``, ``"step(30, 0.1)"`` ..., an
            object of :mod:`onnxtrain.training.schedules`, or a function; constant by default. A text starts from
            the trainer's learning rate.
        metrics: What to measure on the validation data: names or functions of (y_true, y_pred).
        shuffle: Whether to take the examples in a new order every epoch (by the trainer's seed).
        callbacks: Called at the ends of steps and epochs.
        checkpoint: Folder of checkpoints; none by default.
        checkpoint_every: Steps between checkpoints; by default one per epoch.
        keep: How many checkpoints to keep.
        resume: Go on from the newest checkpoint of the folder, bit for bit as if never stopped. Everything that
            changes numbers must be as it was: settings, schedule, the model, and the data, of which hashes are
            compared. (Of a function only its name is, and of an iterable of batches nothing.) More epochs are
            welcome where the schedule does not end with them.
        change: Names of what may differ from the checkpoint all the same, as a list or separated by commas, such as
            ``"epochs,learning_rate"``. The training goes on at its step with the new settings: a schedule is
            followed as if it had been this one from the first step.

    Returns:
        One row per epoch: loss, learning rate, validation loss and metrics.

    Raises:
        DataError: Data does not fit the model.
        NumericalError: The loss became NaN; the message names the step and the last good checkpoint.
        CheckpointError: The checkpoint to resume does not belong to this training, or the folder cannot be written to.
    """
    if epochs < 1:
        raise OptionError(f"epochs is {epochs}; it needs a number of at least 1.")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise OptionError(f"checkpoint_every is {checkpoint_every}; it needs a number of steps of at least 1.")
    if metrics and validation is None:
        raise OptionError("metrics are measured on validation data; give validation=.")
    if resume and checkpoint is None:
        raise OptionError("resume needs the folder of the checkpoints; give checkpoint=.")
    changes = names_to_change(change)
    if changes and not resume:
        raise OptionError("change names what a resumed training may have otherwise; give resume=True, too.")
    store = None if checkpoint is None else _store(checkpoint, keep)
    dataset = trainer.open(data, target=target)
    held_out = None
    if validation is not None:
        evaluator, held_out = trainer.open_for_evaluation(validation, target=target)
        evaluator.check(held_out)
    size = _examples_per_step(trainer, dataset, batch_size)
    per_epoch = _steps_per_epoch(trainer, dataset, size)
    rate = resolve_schedule(
        schedule,
        trainer._rate.base,
        total_steps=None if per_epoch is None else per_epoch * epochs,
        steps_per_epoch=per_epoch,
    )
    measured = trainer._subject.resolve_metrics(metrics)
    history = History()
    listeners = CallbackList([history, *callbacks])
    loop = _Loop(trainer, dataset, held_out, measured, rate, listeners, store)
    loop.batch_size, loop.shuffle, loop.every = size, shuffle, checkpoint_every
    loop.state = TrainingState(epochs=epochs, steps_per_epoch=per_epoch, learning_rate=trainer.learning_rate)
    with contextlib.ExitStack() as stack:
        if store is not None:
            stack.enter_context(store.reserved())
            loop.identity = {
                **describe_settings(trainer),
                **describe_course(
                    trainer,
                    schedule=schedule,
                    epochs=epochs,
                    per_epoch=per_epoch,
                    batch_size=size,
                    shuffle=shuffle,
                    callbacks=callbacks,
                ),
                **describe_model(trainer.file),
                "data": describe_data(dataset),
                "validation": describe_data(held_out),
            }
            if not resume and store.latest() is not None:
                raise CheckpointError(
                    f"The folder {str(store.folder)!r} holds checkpoints of an earlier training (the newest is "
                    f"{store.latest()}); resume it, or give another folder."
                )
        stack.enter_context(trainer._rate.training())
        if resume:
            loop.resume(changes)
        loop.run(epochs)
    return history


def _store(folder: str | os.PathLike[str], keep: int) -> CheckpointStore:
    from onnxtrain.training.checkpoint import CheckpointStore  # imports safetensors

    if not os.fspath(folder):
        raise OptionError("checkpoint is '', which names no folder; give the name of one, such as 'checkpoints'.")
    return CheckpointStore(folder, keep)


def _examples_per_step(trainer: Trainer, dataset: Dataset, batch_size: int) -> int:
    """The batch size of a training; a model of a fixed one takes a batch, or one for every micro-batch.

    Raises:
        DataError: A batch would have to be padded, and padding cannot be left out of the loss.
    """
    fixed = trainer._fixed
    if fixed is None:
        return batch_size
    rest = 0 if dataset.size is None else dataset.size % fixed.size
    if rest and (trainer._subject.loss is not None or dataset.size == rest):
        trainer._partial_session(rest)  # what cannot be is found out here, not after an epoch
    return fixed.size * trainer.accumulate


def _steps_per_epoch(trainer: Trainer, dataset: Dataset, size: int) -> int | None:
    if trainer._fixed is not None and trainer._subject.loss is None and dataset.size is not None:
        return -(-(dataset.size // trainer._fixed.size * trainer._fixed.size) // size)
    return dataset.batch_count(size)


class _Loop:
    """One call of fit."""

    batch_size: int
    identity: Mapping[str, Any]
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
        state.bind_rate(self.trainer._rate.choose)
        try:
            self.callbacks.on_fit_begin(state)
            while self.position.epoch < epochs and not state.stop:
                self._epoch()
            self.callbacks.on_fit_end(state)
        except KeyboardInterrupt as interrupt:
            where = self._where_to_go_on()
            if interrupt.args or not where:
                raise
            raise KeyboardInterrupt(f"Interrupted; {where}") from None

    def _epoch(self) -> None:
        trainer, state, position = self.trainer, self.state, self.position
        state.epoch, state.metrics = position.epoch, {}
        self.callbacks.on_epoch_begin(state)
        for batch in self._batches():
            position.batch += 1
            if not batch.size:
                continue
            rate = trainer._rate.follow(self.rate, position.step)
            loss = trainer._step_batch(batch)
            trainer.check_finite(loss, position.step, self._last_good())
            position.step += 1
            position.total += loss * batch.size
            position.examples += batch.size
            position.last_rate = rate
            state.note_step(step=position.step, loss=loss, learning_rate=rate, batch_size=batch.size)
            self.callbacks.on_step_end(state)
            if self.every is not None and position.step % self.every == 0:
                self._save()
            if state.stop:
                return
        self._end_epoch()

    def _batches(self) -> Iterator[Batch]:
        """The batches of this epoch that are left. What cannot be padded is left out: see `on_real_rows`.

        Raises:
            DataError: The data turned out not to fit, or ended; the message says where to go on.
        """
        position, trainer = self.position, self.trainer
        try:
            for batch in self.dataset.batches(
                self.batch_size,
                shuffle=self.shuffle,
                seed=trainer.seed,
                epoch=position.epoch,
                start=position.batch,
            ):
                if trainer._fixed is not None and trainer._subject.loss is None:
                    batch = part(batch, 0, batch.size // trainer._fixed.size * trainer._fixed.size)
                yield batch
        except DataError as error:
            where = self._where_to_go_on()
            raise DataError(f"{error} ({where})" if where else str(error)) from error

    def _where_to_go_on(self) -> str:
        """What is left of a training that ends before its end."""
        newest = None if self.store is None else self.store.latest()
        return "" if newest is None else f"'{newest}' is kept, resume=True goes on from there."

    def _end_epoch(self) -> None:
        trainer, state, position = self.trainer, self.state, self.position
        mean = MeanAccumulator()
        mean.add(position.total / max(position.examples, 1), position.examples)
        state.loss = mean.value
        if self.validation is not None:
            measured = trainer.evaluate(self.validation, batch_size=max(self.batch_size, 64), metrics=self.metrics)
            state.metrics = {f"validation_{name}": value for name, value in measured.items()}
        self.callbacks.on_epoch_end(state)
        self.position = Position(
            epoch=position.epoch + 1, step=position.step, stopped=state.stop_reason, last_rate=position.last_rate
        )
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
        masks = self.trainer.masks
        return {
            **self.identity,
            "masks": {name: zlib.crc32(np.packbits(mask).tobytes()) for name, mask in masks.items()},
        }

    @functools.cached_property
    def _frozen(self) -> JSON:
        """A hash of what the training does not change in the file, taken before it is written onto."""
        return describe_weights(self.trainer.file, without=self.trainer.trained_values().keys())

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
                "onnxtrain": __version__,
                "fingerprint": self._fingerprint(),
                "frozen": self._frozen,
                "position": dataclasses.asdict(self.position) | {"learning_rate": self.trainer._rate.chosen},
                "callbacks": self.callbacks.record(),
            },
        )

    def resume(self, change: frozenset[str]) -> None:
        """Take everything back from the newest checkpoint, apart from what is to change."""
        assert self.store is not None
        if self.store.latest() is None:
            return
        here = self._fingerprint()
        try:
            tensors, metadata = self.store.load_newest(expect=here, change=change)
        except CheckpointError:
            if not self._is_saved():
                raise
            tensors, metadata = self.store.load_newest(expect=here, change=change | {"weights"})
        try:
            written: dict[str, Any] = metadata["fingerprint"]  # type: ignore[assignment]
            position = Position(**metadata["position"])  # type: ignore[arg-type]
            records: dict[str, Any] = metadata["callbacks"]  # type: ignore[assignment]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"The checkpoints in {str(self.store.folder)!r} were not written by fit, which does not find in them "
                f"where to go on ({error}); give another folder."
            ) from error
        changed = differences(written, here).keys()
        self._take_states(tensors, changed)
        self._take_position(position, changed, written)
        best = {key.removeprefix("best/"): array for key, array in tensors.items() if key.startswith("best/")}
        self.callbacks.resume(records, may_differ=EarlyStopping if "early_stopping" in changed else None)
        for callback in self.callbacks.callbacks:
            if isinstance(callback, EarlyStopping) and best:
                callback.best_weights = best

    def _is_saved(self) -> bool:
        """Whether the model has the weights of the newest checkpoint: it was saved in place, and then the run ended."""
        assert self.store is not None
        tensors, metadata = self.store.load_newest()
        names = self.trainer.trained_values().keys()
        try:
            given = {name: self.trainer.file.value(name) for name in names}
        except ModelError:  # changed meanwhile
            return False
        return metadata.get("frozen") == self._frozen and any(
            all(np.array_equal(tensors.get(f"{kind}/{name}", ()), given[name]) for name in names)
            for kind in ("state", "best")
        )

    def _take_states(self, tensors: Mapping[str, np.ndarray], changed: Collection[str]) -> None:
        """Parameters and the optimizer's states; what a new update rule does not share stays at its first values.

        Raises:
            CheckpointError: States are missing, or would be lost.
        """
        trainer = self.trainer
        states = trainer.session.state
        wanted = list(trainer.trained_values() if "optimizer" in changed else states)
        missing = [name for name in wanted if f"state/{name}" not in tensors]
        if missing and not {"attributes", "sparsity", "accumulate", "batch_norm"} & set(changed):
            raise CheckpointError(f"The checkpoint lacks the states {missing[:5]}; it is of another training.")
        lost = [row.name for row in trainer.table if row.name not in states and f"state/{row.name}" in tensors]
        if lost:
            raise CheckpointError(
                f"The checkpoint has new values of {lost[:5]}, which this training keeps as the model has them; resume "
                "with the batch_norm that it was written with."
            )
        for name in wanted:
            if name not in missing:
                states[name] = tensors[f"state/{name}"]
        if "masks" in changed:
            set_to_zero(states, trainer.masks)

    def _take_position(self, position: Position, changed: Collection[str], written: Mapping[str, Any]) -> None:
        """Where to go on: at the same step and example, in settings that may be new."""
        if "batch_size" in changed:
            position.batch = -(-position.batch * int(written["batch_size"]) // self.batch_size)
        if "early_stopping" in changed:
            position.stopped = None
        if not {"learning_rate", "schedule"} & set(changed):  # what is set now was set last
            self.trainer._rate.chosen = position.learning_rate
        self.position = position
        self.state.step = position.step
        if position.last_rate is not None:
            self.state.note_step(
                step=position.step, loss=self.state.loss, learning_rate=position.last_rate, batch_size=0
            )
        if position.stopped is not None:
            self.state.request_stop(position.stopped)
