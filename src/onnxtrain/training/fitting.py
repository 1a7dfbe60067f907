"""Fit a model: what is asked for is checked, described for checkpoints, and run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.training.callbacks import Callback, CallbackList, History, TrainingState
from onnxtrain.training.callbacks.progress import Progress, ProgressLike, display_for
from onnxtrain.training.callbacks.watching import SaveBest
from onnxtrain.training.checkpoints.fingerprint import describe_course, names_to_change
from onnxtrain.training.data import Dataset, split_validation
from onnxtrain.training.data.augmentation import Augment
from onnxtrain.training.data.naming import NoSuchArrayError
from onnxtrain.training.data.prefetch import Prefetch
from onnxtrain.training.description import describe_data, describe_model, describe_settings
from onnxtrain.training.inference.evaluation import Evaluator
from onnxtrain.training.learner import Learner, Source
from onnxtrain.training.loop import Loop
from onnxtrain.training.losses.heads import Metrics
from onnxtrain.training.schedules import Schedule, resolve_schedule

if TYPE_CHECKING:
    from onnxtrain.training.checkpoints.checkpoint import CheckpointStore
    from onnxtrain.training.run_folder import RunFolder


def fit(
    trainer: Learner,
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
    """Train for some epochs.

    The last batch of an epoch may be smaller than the others: its step is one on the mean over its own examples. A
    model of a fixed batch size gets such a batch padded; the padding does not count in the loss.

    The learning rate is the schedule's, which starts from :attr:`onnxtrain.Trainer.learning_rate`. A callback that sets
    that of the trainer or of its :class:`~onnxtrain.training.callbacks.TrainingState` takes it over from the next step
    on; the rate that was set last wins, and a resumed training goes on with it.

    Args:
        trainer: The trainer.
        data: Training data: a ``.npz`` file, a folder of ``.npy`` files, a ``.csv`` file, a folder of pictures by
            class, a mapping of arrays, (inputs, targets), or an iterable of batches; with ``y`` the inputs alone.
        y: The targets, where ``data`` has none; by output where several have losses.
        validation: Data to evaluate on after every epoch, which may be (inputs, targets, weights), or the fraction of
            ``data`` to hold out: ``0.2``.
        sample_weight: One weight per example [N], at least 0, or the name of the array or column of ``data`` that has
            them. The loss is the mean over the examples of weight times loss, as in Keras; so weights of another mean
            are a learning rate of another size. The validation loss is weighted where its examples have weights: their
            own, those of the fraction that is held out, or the column of that name; metrics count all alike.
        target: Name of the target: the array, where several are left beside the inputs, or the column of a table.
        epochs: How often to go through the data.
        batch_size: Examples per step (split into micro-batches where the trainer accumulates). A model of a fixed
            batch size has its own, times the micro-batches of the trainer.
        schedule: Learning rate by step: ``"cosine"``, ``"warmup(100)+linear"``, ``"step(30, 0.1)"`` ..., an
            object of :mod:`onnxtrain.training.schedules`, or a function; constant by default. A text starts from
            the trainer's learning rate.
        metrics: What to measure on the validation data: names or functions of (y_true, y_pred); by output where several
            have losses.
        shuffle: Whether to take the examples in a new order every epoch (by the trainer's seed).
        callbacks: Called at the ends of steps and epochs.
        progress: Shows loss, metrics, examples per second and time left: a table in a notebook, a bar in a terminal,
            else a line per epoch on the standard error; ``"notebook"``, ``"bar"`` or ``"lines"`` to say which,
            ``False`` for nothing.
        checkpoint: Folder of checkpoints; none by default.
        checkpoint_every: Steps between checkpoints; by default one per epoch.
        keep: How many checkpoints to keep.
        save_best: A metric such as ``"validation_accuracy"``: the model of its best epoch is in ``best.onnx`` in the
            folder of the checkpoints.
        resume: Go on from the newest checkpoint of the folder, or from the one of this path, bit for bit as if never
            stopped. Everything that changes numbers must be as it was: settings, schedule, the model, and the data, of
            which hashes are compared. (Of a function only its name is, and of an iterable of batches nothing.) More
            epochs are welcome where the schedule does not end with them.
        change: Names of what may differ from the checkpoint all the same, as a list or separated by commas, such as
            ``"epochs,learning_rate"``. The training goes on at its step with the new settings: a schedule is
            followed as if it had been this one from the first step.
        run: Folder for ``metrics.csv``, ``curves.svg`` and ``report.html``: curves, mistakes or residuals on the
            validation data (the training data where there are none), parameters, gradients, sparsity.
        prefetch: Whether the next batch is prepared in a thread while a step runs, where that takes time; results are
            the same. An iterable that only the main thread may read needs ``False``.
        augment: A function ``augment(inputs, rng)`` that changes the inputs of training batches: the array of the only
            input [N, ...], or a dictionary of several, and a ``numpy.random.Generator`` that follows from the seed, the
            epoch and the batch alone. It returns inputs of the same types and shapes. A checkpoint compares its name.
        ema: Whether validation measures the moving averages of the weights (``Trainer(ema=...)``), which ``save_best``
            then writes; by default where the trainer keeps them. Early stopping puts averages and weights back.

    Returns:
        One row per epoch: loss, learning rate, the loss of each output where several have one, validation loss and
        metrics.

    Raises:
        DataError: Data does not fit the model.
        NumericalError: The loss became NaN; the message names the step and the last good checkpoint.
        CheckpointError: The checkpoint to resume does not belong to this training, or the folder cannot be written to.
        KeyboardInterrupt: Ctrl-C was pressed. The step was finished, and a checkpoint written where there is a folder
            for it; the message says how to go on. SIGTERM does the same and ends the process, with status 143. A second
            Ctrl-C interrupts at once.
    """
    if epochs < 1:
        raise OptionError(f"epochs is {epochs}; it needs a number of at least 1.")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise OptionError(f"checkpoint_every is {checkpoint_every}; it needs a number of steps of at least 1.")
    if metrics and validation is None:
        raise OptionError("metrics are measured on validation data; give validation=.")
    if resume and checkpoint is None:
        raise OptionError("resume needs the folder of the checkpoints; give checkpoint=.")
    if save_best is not None and checkpoint is None:
        raise OptionError("save_best needs the folder of the checkpoints; give checkpoint=.")
    keeps_averages = trainer.specification.ema is not None
    ema = keeps_averages if ema is None else ema
    if ema and not keeps_averages:
        raise OptionError(
            "ema=True measures the moving averages of the weights, but this trainer keeps none; make it with "
            "Trainer(ema=0.999)."
        )
    if save_best is not None and checkpoint is not None and os.path.isdir(checkpoint):
        trainer.file.check_writable(os.path.join(checkpoint, "best.onnx"))
    changes = names_to_change(change)
    folder = None if run is None else _run_folder(run, resume=bool(resume))
    if changes and not resume:
        raise OptionError("change names what a resumed training may have otherwise; give resume=True, too.")
    together = trainer.communicator
    store = None if checkpoint is None else _store(checkpoint, keep)
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
        trainer.rate.base,
        total_steps=None if per_epoch is None else per_epoch * epochs,
        steps_per_epoch=per_epoch,
    )
    shown = [] if together.rank else _progress(progress, callbacks)
    measured = trainer.objective.resolve_metrics(metrics)
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
        trainer, trainer.steps.share(dataset), held_out, measured, rate, listeners, None if together.rank else store
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
                **describe_settings(trainer.specification, trainer.objective),
                **describe_course(
                    trainer.rate.base,
                    schedule=schedule,
                    epochs=epochs,
                    per_epoch=per_epoch,
                    batch_size=size,
                    shuffle=shuffle,
                    callbacks=callbacks,
                    augment=augment,
                ),
                **describe_model(trainer.file),
                "labels": None if trainer.labels is None else list(trainer.labels),
                "data": describe_data(dataset),
                "validation": describe_data(held_out),
                **({"measures_ema": ema} if keeps_averages else {}),
            }
        trainer.steps.agree({**loop.identity, "epochs": epochs, "checkpoint": checkpoint is not None, "resume": resume})
        newest = None if loop.store is None else loop.store.latest()
        if not resume and newest is not None:
            raise CheckpointError(
                f"The folder {os.fspath(checkpoint or '')!r} holds checkpoints of an earlier training (the newest is "
                f"{newest}); resume it, or give another folder."
            )
        stack.enter_context(trainer.rate.training())
        stack.callback(listeners.close)
        if resume:
            loop.resume(changes, None if resume is True else resume)
        loop.run(epochs)
    if folder is not None:
        folder.finish(trainer, ema=ema)
    return history


def _open_validation(
    trainer: Learner, validation: Source, target: str | None, ema: bool, weights: str | None
) -> tuple[Evaluator, Dataset]:
    """The validation data, and what measures them: with weights where they have an array of this name."""
    if weights is not None:
        with contextlib.suppress(NoSuchArrayError):
            return trainer.open_for_evaluation(validation, target=target, ema=ema, sample_weight=weights)
    return trainer.open_for_evaluation(validation, target=target, ema=ema)


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


def _examples_per_step(trainer: Learner, dataset: Dataset, batch_size: int) -> int:
    """The batch size of a training; a model of a fixed one takes a batch, or one for every micro-batch.

    Raises:
        DataError: A batch would have to be padded, and padding cannot be left out of the loss.
    """
    fixed, loss = trainer.objective.fixed_batch, trainer.objective.loss
    if fixed is None:
        return batch_size
    rest = 0 if dataset.size is None else dataset.size % fixed.size
    if rest and (loss is not None or dataset.size == rest):
        trainer.objective.on_real_rows(rest)  # what cannot be is found out here, not after an epoch
    return trainer.steps.most_rows or batch_size


def _steps_per_epoch(trainer: Learner, dataset: Dataset, size: int) -> int | None:
    fixed = trainer.objective.fixed_batch
    if fixed is not None and trainer.objective.loss is None and dataset.size is not None:
        return -(-(dataset.size // fixed.size * fixed.size) // size)
    return dataset.batch_count(size)
