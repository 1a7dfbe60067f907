"""Training on Ray: several workers train one ONNX model on Ray Data, and restart after a failure.

Ray Train starts the workers, Ray Data provides the batches, and Ray's collective operations over gloo add up gradients.
Ray is an optional extra; see docs/ray.md.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx

from onnxtrain.data import Batch, IterableDataset
from onnxtrain.data.naming import Wanted
from onnxtrain.distributed.communicator import Communicator
from onnxtrain.editing.working import Model
from onnxtrain.errors import OptionError, ParallelError
from onnxtrain.errors._internal import import_optional, public_names
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.writing import check_writable
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.callbacks.base import Callback, TrainingState
from onnxtrain.training.config import Options, choose_distributed
from onnxtrain.training.schedules import Schedule
from onnxtrain.training.trainer import Trainer

__all__ = ["Collective", "fit"]

__dir__ = public_names(__name__)

_MODEL = "model.onnx"
"""Name of the model in a Ray checkpoint."""


def ray(module: str = "ray") -> Any:
    """Import a module of Ray.

    Raises:
        OptionError: Ray is not installed, or has no such module.
    """
    return import_optional(
        module, needs="onnxtrain.interop.ray needs Ray 2.60 or newer", packages="'ray[data,train]' torch"
    )


class Collective(Communicator):
    """Communicator of the workers of one training on Ray, by ``ray.util.collective`` over gloo.

    Gloo comes with PyTorch, which must be installed where the workers run. Gloo's sums have the same bits in all
    workers and in every run with as many workers; with two workers they equal one process with two micro-batches.

    Args:
        rank: Index of this worker, from 0.
        size: Number of workers.
        group: Name that is unique to the workers of this training.

    Raises:
        OptionError: Ray or PyTorch is not installed.
    """

    def __init__(self, rank: int, size: int, group: str) -> None:
        self.rank, self.size = rank, size
        self._group = group
        self._calls, self._torch = ray("ray.util.collective"), ray("torch")
        if size > 1:
            self._calls.init_collective_group(size, rank, backend="gloo", group_name=group)

    def all_reduce_(self, array: np.ndarray) -> None:
        """Replace every element by its sum over all workers."""
        if self.size > 1 and array.size:
            self._call("allreduce", self._tensor(array), self._group)

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        """Replace all elements by those of the worker ``root``."""
        if self.size > 1 and array.size:
            self._call("broadcast", self._tensor(_bytes(array)), root, self._group)

    def all_gather_(self, array: np.ndarray) -> None:
        """Fill the rows of an array [size, ...]; each worker contributes one."""
        if self.size > 1 and array.size:
            rows = [self._tensor(_bytes(row)) for row in array.reshape(self.size, -1)]
            self._call("allgather", rows, rows[self.rank].clone(), self._group)

    def _tensor(self, array: np.ndarray) -> Any:
        """Return a PyTorch tensor that shares the memory of an array."""
        return self._torch.from_numpy(array.reshape(-1))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            getattr(self._calls, name)(*arguments)
        except RuntimeError as error:
            raise ParallelError(
                f"Worker {self.rank} lost another one ({' '.join(str(error).split())[:200]}).", lost=True
            ) from error


def _bytes(array: np.ndarray) -> np.ndarray:
    """View an array as uint8, since gloo does not support uint16 and ml_dtypes types."""
    return array.reshape(-1).view(np.uint8)


def fit(
    model: Model,
    dataset: Any,
    *,
    loss: LossLike,
    save: str | os.PathLike[str] | None = None,
    optimizer: Optimizer | str | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    schedule: str | Schedule | None = None,
    validation: Any = None,
    metrics: str | Sequence[Any] = (),
    target: str | None = None,
    shuffle: bool = True,
    callbacks: Sequence[Callback] = (),
    scaling: Any = None,
    run: Any = None,
    **options: Unpack[Options],
) -> Any:
    """Train a model with several workers of Ray Train.

    Every worker streams the data and takes its rows of every batch: the steps equal those of one process on whole
    batches, up to the order of sums. After every epoch the metrics and a checkpoint are reported to Ray. When a worker
    is lost, Ray restarts all of them from the checkpoint, as often as ``run`` allows:
    ``RunConfig(failure_config=FailureConfig(max_failures=3))``.

    Args:
        model: A path or a loaded model.
        dataset: A ``ray.data.Dataset`` with a column for each of the model's inputs, and one with the target. Its order
            of rows must be deterministic.
        loss: The loss, as for :class:`onnxtrain.Trainer`.
        save: Path of the trained model.
        optimizer: The optimizer, by default ``Adam()``.
        epochs: Number of epochs.
        batch_size: Examples per step, of all workers together.
        schedule: Learning rate by step, as for :meth:`onnxtrain.Trainer.fit`.
        validation: Data to evaluate on after every epoch, readable by every worker: a path or arrays.
        metrics: Metrics of the validation data.
        target: Name of the target, where several columns remain.
        shuffle: Shuffle every epoch, with a buffer of 16 batches.
        callbacks: Callbacks of every worker; they are pickled.
        scaling: A ``ray.train.ScalingConfig``; by default one worker.
        run: A ``ray.train.RunConfig``: name, storage, failures.
        options: All other options of :class:`onnxtrain.Trainer`.

    Returns:
        Ray's result: ``metrics`` of the last epoch, ``checkpoint`` with the model as ``model.onnx``.

    Raises:
        OptionError: Ray is not installed, or an argument is invalid.
        ray.train.TrainingFailedError: The workers failed more often than ``run`` allows; it holds their errors.
    """
    if epochs < 1:
        raise OptionError(f"epochs is {epochs}; it needs a number of at least 1.").about("epochs", got=epochs)
    if save is not None:
        check_writable(save)
    train, data = ray("ray.train"), ray("ray.data")
    api = ray("ray.train.v2.api.data_parallel_trainer")
    task = _Task(
        model=(onnx.load(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model).SerializeToString(),
        settings={"loss": loss, "optimizer": optimizer, **options},
        fit_options={
            "epochs": epochs,
            "batch_size": batch_size,
            "schedule": schedule,
            "validation": validation,
            "metrics": metrics,
            "target": target,
            "shuffle": shuffle,
        },
        callbacks=tuple(callbacks),
        rows=dataset.count(),
    )
    in_order = data.ExecutionOptions(preserve_order=True)
    result = api.DataParallelTrainer(
        _work,
        train_loop_config={"task": task},
        scaling_config=scaling or train.ScalingConfig(num_workers=1),
        run_config=run,
        datasets={"train": dataset},
        dataset_config=train.DataConfig(datasets_to_split=[], execution_options=in_order),
    ).fit()
    if getattr(result, "error", None) is not None:
        raise result.error
    if save is not None:
        with result.checkpoint.as_directory() as folder:
            ModelFile.load(Path(folder) / _MODEL).save(save, {})
    return result


@dataclass(frozen=True)
class _Task:
    """The task of every worker."""

    model: bytes
    settings: dict[str, Any]
    fit_options: dict[str, Any]
    callbacks: Sequence[Callback]
    rows: int


def _work(config: Mapping[str, Any]) -> None:
    """Run a worker: an ordinary training with Ray's communicator, data and checkpoints."""
    task: _Task = config["task"]
    train = ray("ray.train")
    context = train.get_context()
    group = ray("ray.train.collective").broadcast_from_rank_zero(uuid.uuid4().hex)
    communicator = Collective(context.get_world_rank(), context.get_world_size(), group)
    distributed = dataclasses.replace(choose_distributed(task.settings.get("distributed")), communicator=communicator)
    settings = {**task.settings, "distributed": distributed}
    trainer = Trainer(onnx.ModelProto.FromString(task.model), **settings)
    fit_options = dict(task.fit_options)
    target = fit_options["target"]
    specs = trainer.objective.inputs
    wanted = Wanted(specs, target)
    data = _RayData(train.get_dataset_shard("train"), fit_options["batch_size"], task.rows, wanted)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        earlier = train.get_checkpoint()
        if earlier is not None and not communicator.rank:
            with earlier.as_directory() as written:
                shutil.copytree(written, folder)
                (folder / _MODEL).unlink()
        reports = _Reports(folder, trainer)
        trainer.fit(
            data,
            checkpoint=folder,
            keep=1,
            resume=earlier is not None,
            callbacks=[*task.callbacks, reports],
            **fit_options,
        )


class _RayData(IterableDataset):
    """A dataset of Ray Data, streamed once per epoch."""

    borrows = False

    def __init__(self, shard: Any, batch_size: int, rows: int, wanted: Wanted) -> None:
        super().__init__((), wanted)
        self.name = "the dataset of Ray"
        self._shard, self._rows_of_batch, self._rows = shard, batch_size, rows

    def batch_count(self, batch_size: int = 1) -> int:
        """Return the number of batches of an epoch."""
        return -(-self._rows // self._rows_of_batch)

    def _read(self, batch_size: int, shuffled: tuple[int, int] | None, start: int) -> Iterator[Batch]:
        """Iterate over one epoch, in an order that seed and epoch determine."""
        order: dict[str, Any] = {}
        if shuffled is not None:
            seed, epoch = shuffled
            order = {
                "local_shuffle_buffer_size": 16 * self._rows_of_batch,
                "local_shuffle_seed": (seed * 1_000_003 + epoch) % (1 << 31),
            }
        items = self._shard.iter_batches(batch_size=self._rows_of_batch, batch_format="numpy", **order)
        return self._converted(iter(items), start)


class _Reports(Callback):
    """Report every epoch to Ray: its metrics, and a checkpoint with the model."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self._folder, self._trainer = folder, trainer
        self._measured: dict[str, Any] | None = None

    def on_epoch_end(self, state: TrainingState) -> None:
        """Store the metrics: the checkpoint is not written yet."""
        self._measured = {"epoch": state.epoch, "loss": state.loss, **state.metrics}

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Report the previous epoch."""
        self._report(state)

    def on_fit_end(self, state: TrainingState) -> None:
        """Report the last epoch."""
        self._report(state)

    def _report(self, state: TrainingState) -> None:
        measured, self._measured = self._measured, None
        if measured is None:
            return
        train = ray("ray.train")
        if self._trainer._communicator.rank:
            train.report(measured)
            return
        with tempfile.TemporaryDirectory() as name:
            shutil.copytree(self._folder, name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.lock", ".*"))
            self._trainer.save(Path(name) / _MODEL, ema=state.ema)
            train.report(measured, checkpoint=train.Checkpoint.from_directory(name))
