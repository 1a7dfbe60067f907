"""Fit a model: what is asked for is checked, described for checkpoints, and run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onnxtrain.callbacks import Callback, CallbackList, History, TrainingState
from onnxtrain.callbacks.progress import Progress, ProgressLike, display_for
from onnxtrain.callbacks.watching import SaveBest
from onnxtrain.data import Dataset, split_validation
from onnxtrain.data.augmentation import Augment
from onnxtrain.data.data_names import names_of_checkpoint
from onnxtrain.data.naming import NoSuchArrayError
from onnxtrain.data.prefetch import Prefetch
from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.losses.heads import Metrics, are_none, check_numbers
from onnxtrain.schedules import Schedule, resolve_schedule
from onnxtrain.schedules.choice import vanishing_hint
from onnxtrain.training.advice.hints import Hint, warn_of
from onnxtrain.training.checkpoints.fingerprint import describe_course, names_to_change
from onnxtrain.training.description import describe_data, describe_model, describe_settings
from onnxtrain.training.loop import Loop

Source = Any

if TYPE_CHECKING:
    from onnxtrain.training.checkpoints.checkpoint import CheckpointStore
    from onnxtrain.training.run_folder import RunFolder


def fit(
    trainer: Any,
    data: Source,
    y: Any = None,
    *,
    validation: Source | float = None,
    sample_weight: Any = None,
    target: str | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    schedule: str | Schedule | None = None,
    metrics: Metrics = (),
    shuffle: bool = True,
    callbacks: Sequence[Callback] = (),
    progress: ProgressLike = "auto",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    save_best: str | None = None,
    resume: bool | str | os.PathLike[str] = False,
    change: str | Sequence[str] = (),
    run: str | os.PathLike[str] | RunFolder | None = None,
    prefetch: bool = True,
    augment: Augment | None = None,
    ema: bool | None = None,
) -> History:
    """Train for some epochs, as :meth:`onnxtrain.Trainer.fit` does, which documents the arguments."""
    if epochs < 1:
        raise OptionError(f"epochs is {epochs}; it needs a number of at least 1.")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise OptionError(f"checkpoint_every is {checkpoint_every}; it needs a number of steps of at least 1.")
    if validation is None and not are_none(metrics):
        raise OptionError("metrics are measured on validation data; give validation=.")
    if resume and checkpoint is None:
        raise OptionError("resume needs the folder of the checkpoints; give checkpoint=.")
    if save_best is not None and checkpoint is None:
        raise OptionError("save_best needs the folder of the checkpoints; give checkpoint=.")
    keeps_averages = trainer.config.ema is not None
    ema = keeps_averages if ema is None else ema
    if ema and not keeps_averages:
        raise OptionError(
            "ema=True measures the moving averages of the weights, but this trainer keeps none; make it with "
            "Trainer(ema=0.999)."
        )
    if save_best is not None and checkpoint is not None and os.path.isdir(checkpoint):
        trainer._file.check_writable(os.path.join(checkpoint, "best.onnx"))
    changes = names_to_change(change)
    folder = None if run is None else _run_folder(run, resume=bool(resume))
    if changes and not resume:
        raise OptionError("change names what a resumed training may have otherwise; give resume=True, too.")
    together = trainer._communicator
    store = None if checkpoint is None else _store(checkpoint, keep)
    if resume and store is not None:
        _take_names(trainer, store, None if resume is True else resume)
    dataset = trainer.open(data if y is None else (data, y), target=target, sample_weight=sample_weight)
    held_out = None
    if isinstance(validation, float | int):
        dataset, validation = split_validation(dataset, validation, trainer.seed)
    if validation is not None:
        named = sample_weight if isinstance(sample_weight, str) and not isinstance(validation, Dataset) else None
        evaluator, held_out = _open_validation(trainer, validation, target, ema, named)
        evaluator.check(held_out)
    size = _examples_per_step(trainer, dataset, batch_size)
    per_epoch = _steps_per_epoch(trainer, dataset, size)
    rate = resolve_schedule(
        schedule,
        trainer._rate.base,
        total_steps=None if per_epoch is None else per_epoch * epochs,
        steps_per_epoch=per_epoch,
    )
    if schedule is not None and per_epoch and not together.rank:
        text = vanishing_hint(schedule, rate, per_epoch * epochs, per_epoch)
        warn_of([Hint(text, surprising=True)] if text else [])
    shown = [] if together.rank else _progress(progress, callbacks)
    measured = trainer._objective.resolve_metrics(metrics)
    check_numbers(measured)
    history = History()
    if save_best is not None and checkpoint is not None:
        callbacks = [*callbacks, SaveBest(os.path.join(checkpoint, "best.onnx"), save_best)]
    if folder is not None:
        callbacks = [*callbacks, folder]
        folder.writes = not together.rank
        folder.describe(history, trainer, dataset, held_out, size, schedule)
    listeners = CallbackList([history, *callbacks, *shown])
    listeners.silent = together.rank > 0
    loop = Loop(
        trainer, trainer._executor.share(dataset), held_out, measured, rate, listeners, None if together.rank else store
    )
    loop.prefetch, loop.augment = Prefetch(threaded=prefetch), augment
    loop.keeps, loop.ema = store is not None, ema
    loop.batch_size, loop.shuffle, loop.every = size, shuffle, checkpoint_every
    loop.state = TrainingState(
        epochs=epochs, steps_per_epoch=per_epoch, learning_rate=trainer.learning_rate, batch_size=size
    )
    with contextlib.ExitStack() as stack:
        if loop.store is not None:
            stack.enter_context(loop.store.reserved())
        if store is not None or together.size > 1:
            loop.identity = {
                **describe_settings(trainer.config, trainer._objective),
                **describe_course(
                    trainer._rate.base,
                    schedule=schedule,
                    epochs=epochs,
                    per_epoch=per_epoch,
                    batch_size=size,
                    shuffle=shuffle,
                    callbacks=callbacks,
                    augment=augment,
                ),
                **describe_model(trainer._file),
                "labels": None if trainer.labels is None else list(trainer.labels),
                "columns": {name: list(names) for name, names in trainer.columns.items()},
                "data": describe_data(dataset),
                "validation": describe_data(held_out),
                **({"measures_ema": ema} if keeps_averages else {}),
            }
        trainer._executor.check_agreement(
            {**loop.identity, "epochs": epochs, "checkpoint": checkpoint is not None, "resume": resume}
        )
        newest = None if loop.store is None else loop.store.latest()
        if not resume and newest is not None:
            raise CheckpointError(
                f"The folder {os.fspath(checkpoint or '')!r} holds checkpoints of an earlier training (the newest is "
                f"{newest}); resume it, or give another folder."
            )
        stack.enter_context(trainer._rate.training())
        stack.callback(listeners.close)
        if resume:
            loop.resume(changes, None if resume is True else resume)
        loop.run(epochs)
    trainer._data.names = trainer._data.names.learned(dataset.columns, ())  # an iterable tells them only now
    if folder is not None:
        folder.finish(trainer, ema=ema)
    return history


def _take_names(trainer: Any, store: CheckpointStore, given: str | os.PathLike[str] | None) -> None:
    """Read data by the names that columns and classes had when a checkpoint was written."""
    metadata = trainer._communicator.on_root(lambda: store.metadata(given))
    kept = names_of_checkpoint(metadata or {})
    trainer._data.names = trainer._data.names.learned(kept.columns, kept.left_out)
    trainer._data.expected_labels = kept.labels


def _open_validation(trainer: Any, validation: Source, target: str | None, ema: bool, weights: str | None) -> Any:
    """The validation data, and what measures them: with weights where they have an array of this name."""
    if weights is not None:
        with contextlib.suppress(NoSuchArrayError):
            return trainer._open_for_evaluation(validation, target=target, ema=ema, sample_weight=weights)
    return trainer._open_for_evaluation(validation, target=target, ema=ema)


def _progress(progress: ProgressLike, callbacks: Sequence[Callback]) -> list[Progress]:
    """What shows the training, where no callback does already."""
    display = display_for(progress)
    if display is None or any(isinstance(callback, Progress) for callback in callbacks):
        return []
    return [Progress(display)]


def _store(folder: str | os.PathLike[str], keep: int) -> CheckpointStore:
    from onnxtrain.training.checkpoints.checkpoint import CheckpointStore  # imports safetensors

    if not os.fspath(folder):
        raise OptionError("checkpoint is '', which names no folder; give the name of one, such as 'checkpoints'.")
    return CheckpointStore(folder, keep)


def _run_folder(run: str | os.PathLike[str] | RunFolder, *, resume: bool) -> RunFolder:
    from onnxtrain.training.run_folder import RunFolder  # imports what draws

    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    folder.check(resume=resume)
    return folder


def _examples_per_step(trainer: Any, dataset: Dataset, batch_size: int) -> int:
    """The batch size of a training; a model of a fixed one takes a batch, or one for every micro-batch.

    Raises:
        DataError: A batch would have to be padded, and padding cannot be left out of the loss.
    """
    fixed, loss = trainer._objective.fixed_batch, trainer._objective.loss
    if fixed is None:
        return batch_size
    rest = 0 if dataset.size is None else dataset.size % fixed.size
    if rest and (loss is not None or dataset.size == rest):
        trainer._objective.on_real_rows(rest)  # what cannot be is found out here, not after an epoch
    return trainer._executor.most_rows or batch_size


def _steps_per_epoch(trainer: Any, dataset: Dataset, size: int) -> Any:
    fixed = trainer._objective.fixed_batch
    if fixed is not None and trainer._objective.loss is None and dataset.size is not None:
        return -(-(dataset.size // fixed.size * fixed.size) // size)
    return dataset.batch_count(size)
