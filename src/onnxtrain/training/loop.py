"""The training loop: epochs of steps, validation, checkpoints and callbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain import __version__
from onnxtrain.data import Batch, Dataset
from onnxtrain.data.base import share
from onnxtrain.data.data_names import DataNames, labels_record
from onnxtrain.data.pipeline import Prefetch, augmented
from onnxtrain.distributed.communicator import Communicator, Single, check_ends
from onnxtrain.errors import CheckpointError, DataError, ModelError, OptionError
from onnxtrain.errors.formatting import plural
from onnxtrain.losses.heads import HeadMetric, no_labels_left
from onnxtrain.metrics.base import MeanAccumulator
from onnxtrain.parameters.masks import set_to_zero
from onnxtrain.parameters.ties import value_reader
from onnxtrain.training.callbacks import Callback, CallbackList, TrainingState
from onnxtrain.training.callbacks.progress import Progress, ProgressLike, display_for
from onnxtrain.training.callbacks.stopping import Stopping
from onnxtrain.training.description import (
    JSON,
    counts_epochs,
    describe_loop,
    describe_masks,
    describe_model,
    describe_settings,
    describe_weights,
    differences,
    names_to_change,
)
from onnxtrain.training.executors.executor import Executor
from onnxtrain.training.fit_options import FitOptions
from onnxtrain.training.report.record import VALIDATION
from onnxtrain.training.schedules import Schedule
from onnxtrain.training.state import LearningRate, Parameters, State

if TYPE_CHECKING:
    from onnxtrain.training.checkpoints import CheckpointStore
    from onnxtrain.training.inference.evaluation import Evaluator


_logger = logging.getLogger(__name__)


KEPT = "which save() writes."
"""End of the message of an interruption without a checkpoint of the last step."""


@dataclass(frozen=True)
class Checkpoints:
    """Options of checkpoints: folder, interval, and the checkpoint to resume from."""

    store: CheckpointStore | None
    every: int | None
    resume: bool
    path: str | os.PathLike[str] | None
    changes: frozenset[str]

    @classmethod
    def of(
        cls,
        options: FitOptions,
    ) -> Checkpoints:
        """Check the options of ``fit`` about checkpoints."""
        folder, every, change = options.checkpoint, options.checkpoint_every, options.change
        if every is not None and every < 1:
            raise OptionError(f"checkpoint_every is {every}; it needs a number of steps of at least 1.")
        if options.resume and folder is None:
            raise OptionError("resume needs the folder of the checkpoints; give checkpoint=.")
        if options.save_best is not None and folder is None:
            raise OptionError("save_best needs the folder of the checkpoints; give checkpoint=.")
        changes = names_to_change(change if isinstance(change, str) else list(change))
        if changes and not options.resume:
            raise OptionError(
                "change lists the settings that may differ from the checkpoint; it needs resume=True, too."
            ).about("change")
        store = None
        if folder is not None:
            from onnxtrain.training.checkpoints import CheckpointStore  # imports safetensors

            if not os.fspath(folder):
                raise OptionError(
                    "checkpoint is '', which names no folder; give the name of one, such as 'checkpoints'."
                ).about("checkpoint", got="")
            store = CheckpointStore(folder, options.keep)
        path = None if isinstance(options.resume, bool) else options.resume
        return cls(store, every, bool(options.resume), path, changes)

    def check_new(self) -> None:
        """Check that a new training does not write among the checkpoints of an earlier one."""
        newest = None if self.store is None else self.store.latest()
        if not self.resume and self.store is not None and newest is not None:
            raise CheckpointError(
                f"The folder {os.fspath(self.store.folder)!r} holds checkpoints of an earlier training (the newest is "
                f"{newest}); resume it, or give another folder."
            ).about(str(self.store.folder), got=newest)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options and objects of one call of ``fit``, without its data."""

    given: FitOptions
    executor: Executor
    state: State
    rate: LearningRate
    metrics: list[HeadMetric]
    rates: Schedule
    names: DataNames
    callbacks: CallbackList
    progress: TrainingState
    batch_size: int
    ema: bool
    checkpoints: Checkpoints


@dataclass
class Position:
    """Position of a training in a checkpoint: the next batch, the sums of the epoch so far, the reason of a stop."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    total: float = 0.0
    examples: int = 0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    stopped: str | None = None
    learning_rate: float | None = None
    last_rate: float | None = None
    ahead: int = 0
    before: int = 0


class Loop:
    """Run one call of ``fit``."""

    def __init__(
        self,
        options: LoopOptions,
        dataset: Dataset,
        validation: Mapping[str, tuple[Dataset, Evaluator]],
        features: Dataset | None,
        measuring: Evaluator | None = None,
    ) -> None:
        self._options, self._dataset, self._validation = options, dataset, validation
        self._executor, self._state = options.executor, options.state
        communicator = options.executor.config.parallel
        self._communicator: Communicator = communicator or Single()
        self._shared = options.executor.share(features or dataset)
        self._shared.check_cut(options.batch_size, shuffle=options.given.shuffle)
        self._evaluated = max(options.batch_size, 64)
        self._held_out = {f"validation {name}".strip(" _"): held_out for name, (held_out, _) in validation.items()}
        for held_out in self._held_out.values():
            held_out.check_cut(self._evaluated)
        self._measuring, self._of_training = measuring, [each.metric.start() for each in options.metrics]
        self._stream: Iterator[Batch] | None = None  # goes on from epoch to epoch
        # rank 0 alone reads and writes checkpoints
        self._store = None if self._communicator.rank else options.checkpoints.store
        several = self._communicator.size > 1
        self._identity = self._described() if several or options.checkpoints.store is not None else {}
        # Ranks read batches of unknown content on their own.
        self._compares = several and self._identity["data"]["content"] is None
        self._count = options.progress.steps_per_epoch if self._compares else None
        self._position = Position(before=self._state.epochs)
        self._prefetch = Prefetch(threaded=options.given.prefetch)
        self._stopping = Stopping()
        self._tokens = 0
        self._not_written: set[int] = set()  # steps without their checkpoint

    def run(self) -> None:
        """Resume from a checkpoint if requested, and train until the last epoch."""
        options = self._options
        with contextlib.ExitStack() as stack:
            if self._store is not None:
                stack.enter_context(self._store.reserved())
            checkpoints = options.checkpoints
            asked = {
                "call": "fit",
                "epochs": options.given.epochs,
                "checkpoint": checkpoints.store is not None,
                "resume": checkpoints.path or checkpoints.resume,
                "batches": self._count,
                "epochs before": self._state.epochs,
            }
            data = {"data": self._dataset, **self._held_out}
            self._executor.check_agreement({**self._identity, **asked}, data)
            if self._store is not None:
                checkpoints.check_new()
            stack.enter_context(options.rate.training())
            stack.callback(options.callbacks.close)
            if checkpoints.resume:
                self._resume()
            stack.callback(self._say_which_exist)
            self._run_epochs()

    def _run_epochs(self) -> None:
        options, progress = self._options, self._options.progress
        self._state.check_finite(self._executor.config.model, begins=True)
        progress.bind_rate(options.rate.choose)
        progress.weights = self._state.trained
        progress.averages = Parameters(self._state.buffers, list(self._state.averages.values()))
        progress.ema, progress.data, progress.of_tokens = options.ema, self._dataset.name, self._dataset.of_tokens
        try:
            with self._stopping:
                options.callbacks.on_fit_begin(progress)
                while self._position.epoch < options.given.epochs and not progress.stop:
                    self._epoch()
                options.callbacks.on_fit_end(progress)
                if self._stopping.signal is not None and self._communicator.size == 1:  # after the last step
                    raise self._interrupted()
        except KeyboardInterrupt as interrupt:
            where = self._where_to_go_on()
            if interrupt.args or not where:
                raise
            raise KeyboardInterrupt(f"Interrupted; {where}") from None

    def _interrupted(self) -> BaseException:
        step = self._position.step
        where = "" if step in self._not_written else self._where_to_go_on()
        return self._stopping.exception(
            f"Interrupted; {where or f'the trainer has the weights of step {step}, {KEPT}'}"
        )

    def _epoch(self) -> None:
        progress, position = self._options.progress, self._position
        progress.epoch, progress.metrics = position.epoch + 1, {}
        self._state.epochs = position.before + progress.epoch
        self._options.callbacks.on_epoch_begin(progress)
        began, self._tokens = time.perf_counter(), 0
        with contextlib.closing(self._batches()) as batches:
            if self._run_steps(batches):
                if progress.of_tokens:
                    progress.tokens_per_second = self._tokens / max(time.perf_counter() - began, 1e-9)
                self._end_epoch()

    def _run_steps(self, batches: Iterator[Batch]) -> bool:
        """Train a step on each batch; return whether the epoch is complete."""
        options, executor, position = self._options, self._executor, self._position
        progress, every = options.progress, options.checkpoints.every
        learned = position.batch > 0  # a resumed epoch has begun before
        for batch in batches:
            position.batch += 1
            if not batch.total:
                continue
            rate = options.rate.follow(options.rates, position.step + position.ahead)
            if self._measuring is not None and batch.size:
                self._measuring.add(batch, options.metrics, self._of_training)
            executor.send_signal(self._stopping)
            with self._state.buffers.training("fit", changes=executor.config.divided):
                loss = executor.step_batch(batch, rate)
            executor.check_loss(loss, position.step, rate, self._last_good)
            learned = learned or loss != 0 or not executor.objective.ignores_all(batch)
            position.step += 1
            position.total += loss * batch.total
            for name, part_loss in executor.parts.items():
                position.parts[name] = position.parts.get(name, 0.0) + part_loss * batch.total
            position.examples += batch.total
            position.last_rate = rate
            progress.note_step(step=position.step, loss=loss, learning_rate=rate, batch_size=batch.total)
            progress.batch, progress.waited = batch, self._prefetch.waited
            self._tokens += batch.tokens if progress.of_tokens else 0
            options.callbacks.on_step_end(progress)
            if options.callbacks.decide_by_step:
                self._decide_once()
            asked = executor.received_signal(self._stopping)
            if asked or (every is not None and position.step % every == 0):
                self._save()
            if asked:
                raise self._interrupted()
            if progress.stop:
                return False
        if not learned and (heads := executor.objective.heads):
            raise DataError(no_labels_left(self._dataset.name, heads[0].loss))
        return True

    def _batches(self) -> Generator[Batch]:
        """Yield the remaining batches of this epoch, without examples that cannot be padded."""
        options, position, objective = self._options, self._position, self._executor.objective
        seed = self._executor.config.seed
        try:
            if (steps := options.given.steps_per_epoch) is None:
                read = self._read_data(position.before + position.epoch, position.batch)
            else:
                self._stream = self._stream or self._endless(position.epoch * steps + position.batch)
                read = itertools.islice(self._stream, steps - position.batch)
            if options.given.augment is not None:
                read = augmented(
                    read,
                    options.given.augment,
                    seed=seed,
                    epoch=position.before + position.epoch,
                    start=position.batch,
                    rank=self._communicator.rank,
                )
            with contextlib.closing(self._prefetch(read, copies=self._shared.borrows)) as batches:
                for batch in self._together(batches) if self._compares else batches:
                    fixed = objective.fixed_batch
                    if fixed is not None and objective.loss is None:
                        whole = batch.total // fixed.size * fixed.size
                        batch = share(batch, slice(0, batch.size // fixed.size * fixed.size), whole)
                    yield batch
        except DataError as error:
            where = self._where_to_go_on()
            again = DataError(f"{error} ({where})" if where else str(error))
            raise again.about(error.what, got=error.got, wanted=error.wanted) from error

    def _read_data(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        given, seed = self._options.given, self._executor.config.seed
        return self._shared.batches(
            self._options.batch_size, shuffle=given.shuffle, seed=seed, epoch=epoch, start=start
        )

    def _endless(self, done: int) -> Iterator[Batch]:
        """Yield the batches of the data again and again, without the first ones."""
        count = self._shared.batch_count(self._options.batch_size)
        passes, done = divmod(done, count) if count else (0, done)
        read = itertools.chain.from_iterable(map(self._read_data, itertools.count(self._position.before + passes)))
        return itertools.islice(read, done, None)

    def _together(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches; check that they end for all ranks at once, after each if their number is unknown."""
        number = self._position.batch
        while True:
            batch = next(batches, None)
            if batch is None or self._count is None or number >= self._count:
                check_ends(self._communicator, number, ended=batch is None)
            if batch is None:
                return
            yield batch
            number += 1

    def _where_to_go_on(self) -> str:
        newest = self._newest()
        return "" if newest is None else f"'{newest}' is kept, resume=True goes on from there."

    def _end_epoch(self) -> None:
        options, progress, position = self._options, self._options.progress, self._position
        mean = MeanAccumulator()
        mean.add(position.total / max(position.examples, 1), position.examples)
        progress.loss = mean.value
        parts = {name: total / max(position.examples, 1) for name, total in position.parts.items()}
        progress.metrics = parts
        for prefix, (dataset, evaluator) in self._validation.items():
            measured = evaluator.evaluate(dataset, self._evaluated, options.metrics, self._communicator)
            progress.metrics |= {f"{VALIDATION}{prefix}{name}": value for name, value in measured.items()}
        if self._measuring is not None:
            of_ranks = zip(*self._communicator.gather_objects(self._of_training), strict=True)
            for each, states in zip(options.metrics, of_ranks, strict=True):
                progress.metrics[each.name] = each.metric.result(functools.reduce(each.metric.merge, states))
            self._of_training = [each.metric.start() for each in options.metrics]
        options.callbacks.on_epoch_end(progress)
        self._decide_once()
        self._executor.check_equal_weights()
        self._position = Position(
            epoch=position.epoch + 1,
            step=position.step,
            stopped=progress.stop_reason,
            last_rate=position.last_rate,
            ahead=position.ahead,
            before=position.before,
        )
        self._save()

    def _decide_once(self) -> None:
        """Let the callbacks of rank 0 decide for all ranks whether to stop, and the learning rate."""
        progress, rate = self._options.progress, self._options.rate
        progress.stop, progress.stop_reason, rate.chosen = self._communicator.broadcast_object(
            (progress.stop, progress.stop_reason, rate.chosen)
        )

    def _last_good(self) -> str:
        newest = self._newest()
        return "" if newest is None else f"The last good checkpoint is {newest}."

    def _newest(self) -> Path | None:
        with contextlib.suppress(CheckpointError):  # the folder was replaced by something else
            return None if self._store is None else self._store.latest()
        return None

    def _say_which_exist(self) -> None:
        if self._not_written and self._store is not None:
            steps: list[int] = []
            with contextlib.suppress(CheckpointError):
                steps = self._store.steps()
            held = f"those of the steps {', '.join(map(str, steps))}" if steps else "none"
            text = "%s could not be written; %r holds %s."
            count = plural(len(self._not_written), "checkpoint")
            _logger.warning(text, count, os.fspath(self._store.folder), held)

    def _described(self) -> dict[str, Any]:
        """Return the settings that a resumed training must share with its checkpoint, and ranks with each other."""
        options, config, names = self._options, self._executor.config, self._options.names
        sets, steps = {name: each.describe() for name, each in self._held_out.items()}, options.given.steps_per_epoch
        return {
            **describe_settings(config, self._executor.objective),
            **describe_loop(
                options.rate.base,
                schedule=options.given.schedule,
                epochs=options.given.epochs,
                per_epoch=options.progress.steps_per_epoch,
                batch_size=options.batch_size,
                shuffle=options.given.shuffle,
                callbacks=options.callbacks.callbacks,
                augment=options.given.augment,
            ),
            **describe_model(config.model),
            "labels": None if names.labels is None else labels_record(names.labels),
            "columns": {name: list(columns) for name, columns in names.columns.items()},
            "data": self._dataset.describe(),
            "validation": sets.get("validation", sets) or None,
            **({} if config.ema is None else {"measures_ema": options.ema}),
            **({} if steps is None else {"steps_per_epoch": steps}),
        }

    def _fingerprint(self) -> dict[str, Any]:
        """Return the settings that a resumed training must share with its checkpoint."""
        return {**self._identity, "masks": describe_masks(self._executor.config.masks)}

    @functools.cached_property
    def _frozen(self) -> JSON:
        """Hash of the weights that training does not change, computed before the file is overwritten."""
        file, objective = self._executor.config.model, self._executor.objective
        merged = () if objective.adapted is None else objective.adapted.weights  # save() writes over them
        return describe_weights(file, without={*self._state.own_initializers(objective), *merged})

    def _save(self) -> None:
        options = self._options
        if options.checkpoints.store is None:
            return
        self._state.check_finite(self._executor.config.model)
        tensors = {f"state/{name}": array for name, array in self._executor.checkpoint_states().items()}
        if self._store is None:  # another rank writes
            return
        tensors |= {f"callbacks/{name}": array for name, array in options.callbacks.record_arrays().items()}
        record = {
            "onnxtrain": __version__,
            "fingerprint": self._fingerprint(),
            "frozen": self._frozen,
            "epochs": self._state.epochs,
            "position": dataclasses.asdict(self._position) | {"learning_rate": options.rate.chosen},
            "callbacks": options.callbacks.record(),
            "left_out": list(options.names.left_out),
            "kept": dict(options.names.kept),
            "pixels": {} if options.names.pixels is None else options.names.pixels.record(),
        }
        try:
            self._store.save(self._position.step, tensors, record)
            self._not_written.discard(self._position.step)
        except CheckpointError as error:
            self._not_written.add(self._position.step)
            _logger.warning("%s The training goes on, and the next checkpoint is tried.", error)

    def _resume(self) -> None:
        """Restore all values of a checkpoint except settings that may differ; rank 0 reads it for all ranks."""
        here = self._fingerprint()
        found = self._communicator.on_root(lambda: self._read(here))
        if found is None:
            return
        tensors, metadata = found
        written: dict[str, Any] = metadata["fingerprint"]
        changed = differences(written, here).keys()
        self._restore_states(tensors, changed)
        self._restore_position(Position(**metadata["position"]), changed, written)
        arrays = {
            key.removeprefix("callbacks/"): array for key, array in tensors.items() if key.startswith("callbacks/")
        }
        self._options.callbacks.resume(metadata["callbacks"], arrays, may_differ=changed)

    def _read(self, here: Mapping[str, Any]) -> tuple[Mapping[str, np.ndarray], dict[str, Any]] | None:
        """Read the checkpoint to resume from; return ``None`` where there is none."""
        store, given, change = self._store, self._options.checkpoints.path, self._options.checkpoints.changes
        assert store is not None
        if given is None and store.latest() is None:
            return None
        load: Callable[..., Any] = store.load_newest if given is None else functools.partial(store.load, given)
        try:
            tensors, metadata = load(expect=here, change=change)
        except CheckpointError:
            if not self._is_saved():
                raise
            tensors, metadata = load(expect=here, change=change | {"weights"})
        try:
            _ = metadata["fingerprint"], Position(**metadata["position"]), metadata["callbacks"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"The checkpoints in {str(store.folder)!r} were not written by fit: they lack its position "
                f"({error}); give another folder."
            ).about(str(store.folder)) from error
        return tensors, metadata

    def _is_saved(self) -> bool:
        """Return whether the model file holds the weights of the newest checkpoint, since it was saved in place."""
        assert self._store is not None
        tensors, metadata = self._store.load_newest()
        names, averages = list(self._state.trained), self._state.averages
        try:
            read = value_reader(self._executor.config.model, self._executor.objective.copies)
            given = {name: read(name) for name in names}
        except ModelError:  # changed meanwhile
            return False
        # The checkpoint has weights of the last step and the best weights of a callback; both live or averaged.
        kept = [key.removesuffix(names[0]) for key in tensors if key.endswith(f"/{names[0]}")]
        live = {name: name for name in names}
        averaged = {name: averages.get(name, name) for name in names}
        return metadata.get("frozen") == self._frozen and any(
            all(np.array_equal(tensors.get(f"{prefix}{key}", ()), given[name]) for name, key in form.items())
            for prefix in kept
            for form in (live, averaged)
        )

    def _restore_states(self, tensors: Mapping[str, np.ndarray], changed: Collection[str]) -> None:
        """Load parameters and optimizer states; with another optimizer, only parameters."""
        executor, states = self._executor, self._state.buffers
        wanted = list(self._state.trained if "optimizer" in changed else executor.checkpoint_names)
        missing = [name for name in wanted if f"state/{name}" not in tensors]
        if missing and not {"attributes", "sparsity", "accumulate", "batch_norm"} & set(changed):
            raise CheckpointError(f"The checkpoint lacks the states {missing[:5]}; it belongs to another training.")
        rows = executor.objective.table
        lost = [row.name for row in rows if row.name not in states and f"state/{row.name}" in tensors]
        if lost:
            raise CheckpointError(
                f"The checkpoint has trained values of {lost[:5]}, which this training does not change; resume with "
                "the batch_norm of the checkpoint."
            ).about(lost)
        wanted += [name for name in executor.residual_names if f"state/{name}" in tensors]
        executor.load_states({name: tensors[f"state/{name}"] for name in wanted if name not in missing})
        if "masks" in changed:
            set_to_zero(states, executor.config.masks)

    def _restore_position(self, position: Position, changed: Collection[str], written: Mapping[str, Any]) -> None:
        """Continue at the same step and example, under settings that may have changed."""
        options, progress = self._options, self._options.progress
        if "batch_size" in changed:
            position.batch = -(-position.batch * int(written["batch_size"]) // options.batch_size)
        per_epoch = progress.steps_per_epoch
        if {"batch_size", "data", "epochs", "schedule"} & set(changed) and per_epoch is not None:
            counts = counts_epochs(options.given.schedule, options.rate.base, options.given.epochs, per_epoch)
            position.ahead = position.epoch * per_epoch + position.batch - position.step if counts else 0
        if "early_stopping" in changed:
            position.stopped = None
        if not {"learning_rate", "schedule"} & set(changed):  # otherwise the new setting decides
            options.rate.chosen = position.learning_rate
        self._position = position
        self._state.epochs = position.before + position.epoch + (position.batch > 0)
        progress.step = position.step
        if position.last_rate is not None:
            progress.note_step(step=position.step, loss=progress.loss, learning_rate=position.last_rate, batch_size=0)
        if position.stopped is not None:
            progress.request_stop(position.stopped)


def shown_progress(progress: ProgressLike, callbacks: Sequence[Callback]) -> list[Progress]:
    """Return a progress display, unless the callbacks already include one."""
    display = display_for(progress)
    if display is None or any(isinstance(callback, Progress) for callback in callbacks):
        return []
    return [Progress(display)]


def examples_per_step(executor: Executor, dataset: Dataset, batch_size: int) -> int:
    """Return the batch size; for a model of a fixed batch size, that size times the number of micro-batches."""
    objective = executor.objective
    fixed = objective.fixed_batch
    if fixed is None:
        return batch_size
    rest = 0 if dataset.size is None else dataset.size % fixed.size
    if rest and (objective.loss is not None or dataset.size == rest):
        objective.on_real_rows(rest)  # fails now rather than after an epoch
    return executor.most_rows or batch_size


def fixed_batch_hints(executor: Executor, dataset: Dataset, batch_size: int) -> Iterator[str]:
    """Say that steps take another number of examples than was asked for, since the model fixes it."""
    most, fixed, parts = executor.most_rows, executor.objective.fixed_batch, executor.config.accumulate
    size = dataset.size
    if fixed is None or most is None or size is None or min(batch_size, size) == min(most, size):
        return
    more = batch_size * parts // most
    advice = f"; accumulate={more} takes {more} such batches a step" if more > parts else ""
    yield (
        f"The model has a fixed batch of {plural(fixed.size, 'example')}, so that a step takes {most}, not "
        f"batch_size={batch_size}. A model of onnxtrain.dynamic_batch(model) takes batches of any size, as fit with "
        f"dynamic_batch=True does{advice}."
    )


def steps_of_epoch(executor: Executor, dataset: Dataset, size: int) -> int | None:
    """Return the number of steps of an epoch; ``None`` for a dataset of unknown size."""
    fixed = executor.objective.fixed_batch
    if fixed is not None and executor.objective.loss is None and dataset.size is not None:
        return -(-(dataset.size // fixed.size * fixed.size) // size)
    return dataset.batch_count(size)
