"""One call of fit: epochs of steps, validation, checkpoints, callbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.callbacks import CallbackList, TrainingState
from onnxtrain.callbacks.stopping import Stopping
from onnxtrain.data import Batch, Dataset, IterableDataset
from onnxtrain.data.array_dataset import undivided
from onnxtrain.data.augmentation import Augment, augmented
from onnxtrain.data.base import share
from onnxtrain.data.prefetch import Prefetch
from onnxtrain.errors import CheckpointError, DataError, ModelError
from onnxtrain.losses.heads import HeadMetric
from onnxtrain.metrics.base import MeanAccumulator
from onnxtrain.renamed import VALIDATION, MetricValues
from onnxtrain.schedules import Schedule
from onnxtrain.state import Parameters
from onnxtrain.training.checkpoints.fingerprint import differences
from onnxtrain.training.description import JSON, describe_masks, describe_weights
from onnxtrain.version import __version__
from onnxtrain.weights.ema import average_name
from onnxtrain.weights.masks import set_to_zero

if TYPE_CHECKING:
    from onnxtrain.training.checkpoints.checkpoint import CheckpointStore


@dataclasses.dataclass
class Position:
    """Where a training stands, in what a checkpoint keeps: the next batch, the mean so far, why it stopped.

    ``epoch`` and ``batch`` count what is done. ``learning_rate`` is what a callback set, where one did: it decides
    instead of the schedule. ``last_rate`` is that of the last step.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    total: float = 0.0
    examples: int = 0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    stopped: str | None = None
    learning_rate: float | None = None
    last_rate: float | None = None


class Loop:
    """One call of fit."""

    batch_size: int
    identity: Mapping[str, Any]
    shuffle: bool
    every: int | None
    state: TrainingState

    def __init__(
        self,
        trainer: Any,
        dataset: Dataset,
        validation: Dataset | None,
        metrics: list[HeadMetric],
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
        self.keeps = store is not None
        self.identity = {}
        self.position = Position()
        self.prefetch = Prefetch()
        self.augment: Augment | None = None
        self.stopping = Stopping()
        self.ema = False

    def run(self, epochs: int) -> None:
        """All epochs from the current position."""
        state = self.state
        state.bind_rate(self.trainer._rate.choose)
        state.trainer, state.weights = self.trainer, self.trainer.trained
        state.averages, state.ema = Parameters(self.trainer.states, list(self._averages.values())), self.ema
        state.data = self.dataset.name
        try:
            with self.stopping:
                self.callbacks.on_fit_begin(state)
                while self.position.epoch < epochs and not state.stop:
                    self._epoch()
                self.callbacks.on_fit_end(state)
                if (
                    self.stopping.signal is not None and self.trainer._communicator.size == 1
                ):  # it came after the last step
                    raise self.stopping.exception(f"Interrupted; {self._where_to_go_on() or self._what_is_kept()}")
        except KeyboardInterrupt as interrupt:
            where = self._where_to_go_on()
            if interrupt.args or not where:
                raise
            raise KeyboardInterrupt(f"Interrupted; {where}") from None

    def _epoch(self) -> None:
        state = self.state
        state.epoch, state.metrics = self.position.epoch + 1, {}
        self.callbacks.on_epoch_begin(state)
        with contextlib.closing(self._batches()) as batches:
            if self._steps(batches):
                self._end_epoch()

    def _steps(self, batches: Iterator[Batch]) -> bool:
        """A step on each batch; returns whether all were taken."""
        trainer, state, position = self.trainer, self.state, self.position
        for batch in batches:
            position.batch += 1
            if not batch.total:
                continue
            rate = trainer._rate.follow(self.rate, position.step)
            trainer._executor.send_signal(self.stopping)
            loss = trainer._step_batch(batch)
            trainer._check_loss(loss, position.step, self._last_good())
            position.step += 1
            position.total += loss * batch.total
            for name, part_loss in trainer.loss_parts.items():
                position.parts[name] = position.parts.get(name, 0.0) + part_loss * batch.total
            position.examples += batch.total
            position.last_rate = rate
            state.note_step(step=position.step, loss=loss, learning_rate=rate, batch_size=batch.total)
            state.batch, state.waited = batch, self.prefetch.waited
            self.callbacks.on_step_end(state)
            if self.callbacks.decide_by_step:
                self._decide_once()
            asked = trainer._executor.received_signal(self.stopping)
            if asked or (self.every is not None and position.step % self.every == 0):
                self._save()
            if asked:
                raise self.stopping.exception(f"Interrupted; {self._where_to_go_on() or self._what_is_kept()}")
            if state.stop:
                return False
        return True

    def _batches(self) -> Generator[Batch]:
        """The batches of this epoch that are left. What cannot be padded is left out: see `on_real_rows`.

        Raises:
            DataError: The data turned out not to fit, or ended; the message says where to go on.
        """
        position, trainer = self.position, self.trainer
        try:
            read = self.dataset.batches(
                self.batch_size,
                shuffle=self.shuffle,
                seed=trainer.seed,
                epoch=position.epoch,
                start=position.batch,
            )
            if self.augment is not None:
                read = augmented(
                    read,
                    self.augment,
                    seed=trainer.seed,
                    epoch=position.epoch,
                    start=position.batch,
                    rank=trainer._communicator.rank,
                )
            copies = type(undivided(self.dataset)) is IterableDataset
            with contextlib.closing(self.prefetch(read, copies=copies)) as batches:
                for batch in batches:
                    fixed = trainer._objective.fixed_batch
                    if fixed is not None and trainer._objective.loss is None:
                        whole = batch.total // fixed.size * fixed.size
                        batch = share(batch, slice(0, batch.size // fixed.size * fixed.size), whole)
                    yield batch
        except DataError as error:
            where = self._where_to_go_on()
            raise DataError(f"{error} ({where})" if where else str(error)) from error

    def _where_to_go_on(self) -> str:
        """What is left of a training that ends before its end."""
        newest = None if self.store is None else self.store.latest()
        return "" if newest is None else f"'{newest}' is kept, resume=True goes on from there."

    def _what_is_kept(self) -> str:
        """What is left of a training without checkpoints."""
        return f"the trainer has the weights of step {self.position.step}, which save() writes."

    def _end_epoch(self) -> None:
        trainer, state, position = self.trainer, self.state, self.position
        mean = MeanAccumulator()
        mean.add(position.total / max(position.examples, 1), position.examples)
        state.loss = mean.value
        parts = {name: total / max(position.examples, 1) for name, total in position.parts.items()}
        state.metrics = MetricValues(parts)
        if self.validation is not None:
            size = max(self.batch_size, 64)
            measured = trainer.evaluate(self.validation, batch_size=size, metrics=self.metrics, ema=self.ema)
            state.metrics |= {VALIDATION + name: value for name, value in measured.items()}
        self.callbacks.on_epoch_end(state)
        self._decide_once()
        trainer._executor.check_equal_weights()
        self.position = Position(
            epoch=position.epoch + 1, step=position.step, stopped=state.stop_reason, last_rate=position.last_rate
        )
        self._save()

    def _decide_once(self) -> None:
        """Of several processes, do what the callbacks of rank 0 decided: whether to stop, and the learning rate."""
        state, rate = self.state, self.trainer._rate
        state.stop, state.stop_reason, rate.chosen = self.trainer._communicator.broadcast_object(
            (state.stop, state.stop_reason, rate.chosen)
        )

    def _last_good(self) -> str:
        newest = None if self.store is None else self.store.latest()
        return "" if newest is None else f"The last good checkpoint is {newest}."

    def _fingerprint(self) -> dict[str, Any]:
        """What must agree between the training that wrote a checkpoint and the one that resumes it."""
        return {**self.identity, "masks": describe_masks(self.trainer.masks)}

    @functools.cached_property
    def _frozen(self) -> JSON:
        """A hash of what the training does not change in the file, taken before it is written onto."""
        return describe_weights(self.trainer._file, without=self.trainer._initializers().keys())

    def _save(self) -> None:
        if not self.keeps:
            return
        self.trainer.check_weights()
        tensors = {f"state/{name}": array for name, array in self.trainer._executor.checkpoint_states().items()}
        if self.store is None:  # another process writes
            return
        tensors |= {f"callbacks/{name}": array for name, array in self.callbacks.record_arrays().items()}
        self.store.save(
            self.position.step,
            tensors,
            {
                "onnxtrain": __version__,
                "fingerprint": self._fingerprint(),
                "frozen": self._frozen,
                "position": dataclasses.asdict(self.position) | {"learning_rate": self.trainer._rate.chosen},
                "callbacks": self.callbacks.record(),
                "left_out": list(self.trainer._data.names.left_out),
            },
        )

    def resume(self, change: frozenset[str], given: str | os.PathLike[str] | None = None) -> None:
        """Take everything back from a checkpoint, by default the newest, apart from what is to change.

        Of several processes rank 0 reads it; what it is then, it is in all.
        """
        here = self._fingerprint()
        found = self.trainer._communicator.on_root(lambda: self._read(here, change, given))
        if found is None:
            return
        tensors, metadata = found
        written: dict[str, Any] = metadata["fingerprint"]
        changed = differences(written, here).keys()
        self._take_states(tensors, changed)
        self._take_position(Position(**metadata["position"]), changed, written)
        arrays = {
            key.removeprefix("callbacks/"): array for key, array in tensors.items() if key.startswith("callbacks/")
        }
        self.callbacks.resume(metadata["callbacks"], arrays, may_differ=changed)

    def _read(
        self, here: Mapping[str, Any], change: frozenset[str], given: str | os.PathLike[str] | None
    ) -> tuple[Mapping[str, np.ndarray], dict[str, Any]] | None:
        """A checkpoint, or the newest; ``None`` where there is none."""
        assert self.store is not None
        if given is None and self.store.latest() is None:
            return None
        load = self.store.load_newest if given is None else functools.partial(self.store.load, given)
        try:
            tensors, metadata = load(expect=here, change=change)
        except CheckpointError:
            if not self._is_saved():
                raise
            tensors, metadata = load(expect=here, change=change | {"weights"})
        try:
            _ = metadata["fingerprint"], Position(**metadata["position"]), metadata["callbacks"]  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"The checkpoints in {str(self.store.folder)!r} were not written by fit, which does not find in them "
                f"where to go on ({error}); give another folder."
            ) from error
        return tensors, metadata

    def _is_saved(self) -> bool:
        """Whether the model has the weights of the newest checkpoint: it was saved in place, and then the run ended."""
        assert self.store is not None
        tensors, metadata = self.store.load_newest()
        names, averages = [*dict(self.trainer.trained)], self._averages
        try:
            given = {name: self.trainer._file.value(name) for name in names}
        except ModelError:  # changed meanwhile
            return False
        # Those of the last step, or the best ones that a callback keeps; both live, or averaged.
        kept = [key.removesuffix(names[0]) for key in tensors if key.endswith(f"/{names[0]}")]
        live = {name: name for name in names}
        averaged = {name: averages.get(name, name) for name in names}
        return metadata.get("frozen") == self._frozen and any(
            all(np.array_equal(tensors.get(f"{prefix}{key}", ()), given[name]) for name, key in form.items())
            for prefix in kept
            for form in (live, averaged)
        )

    @property
    def _averages(self) -> dict[str, str]:
        """The states that hold moving averages, by parameter; empty where none are kept."""
        trainer = self.trainer
        kept = trainer.config.ema is not None
        return {name: average_name(name) for name in trainer._objective.parameters} if kept else {}

    def _take_states(self, tensors: Mapping[str, np.ndarray], changed: Collection[str]) -> None:
        """Parameters and the optimizer's states; what a new update rule does not share stays at its first values.

        Raises:
            CheckpointError: States are missing, or would be lost.
        """
        trainer = self.trainer
        states = trainer.states
        wanted = list(dict(trainer.trained) if "optimizer" in changed else trainer._executor.checkpoint_names)
        missing = [name for name in wanted if f"state/{name}" not in tensors]
        if missing and not {"attributes", "sparsity", "accumulate", "batch_norm"} & set(changed):
            raise CheckpointError(f"The checkpoint lacks the states {missing[:5]}; it is of another training.")
        lost = [row.name for row in trainer.table if row.name not in states and f"state/{row.name}" in tensors]
        if lost:
            raise CheckpointError(
                f"The checkpoint has new values of {lost[:5]}, which this training keeps as the model has them; resume "
                "with the batch_norm that it was written with."
            )
        wanted += [name for name in trainer._executor.residual_names if f"state/{name}" in tensors]
        trainer._executor.load_states({name: tensors[f"state/{name}"] for name in wanted if name not in missing})
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
