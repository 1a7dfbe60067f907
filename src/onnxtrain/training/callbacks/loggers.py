"""Callbacks that log the training history: CSV and JSON Lines files, TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import abc
import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.training.callbacks.base import Callback, TrainingState
from onnxtrain.training.callbacks.history import History, for_json, write_csv, write_text
from onnxtrain.training.description import describe_settings
from onnxtrain.training.report.record import VALIDATION

_LEFT_OUT = ("parameters", "sparsify")
"""Settings whose length grows with the model."""


def needs(package: str, logger: str) -> None:
    """Refuse a logger whose package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise OptionError(f"{logger} needs the package {package}; install it: pip install {package}.")


def _checked_interval(every: int | None, logger: str) -> int | None:
    if every is not None and every < 1:
        raise OptionError(f"every of {logger} is {every}; it needs a number of steps of at least 1.").about(
            "every", got=every
        )
    return every


def epoch_values(state: TrainingState) -> dict[str, float]:
    """Return the values of an epoch in groups: ``training/loss``, ``validation/accuracy`` and so on."""
    found = {
        "training/loss": state.loss,
        "training/learning_rate": state.rate_of_last_step,
        "training/epoch": state.epoch,
    }
    for name, value in state.metrics.items():
        start, _, rest = name.partition(VALIDATION)
        found[f"validation/{rest}" if rest and not start else f"training/{name}"] = value
    return {name: float(value) for name, value in found.items()}


def settings(state: TrainingState) -> dict[str, Any]:
    """Return the settings of the training under flat names: ``optimizer``, ``optimizer.beta``, ``batch_size``."""
    found: dict[str, Any] = {"epochs": state.epochs, "batch_size": state.batch_size}
    if state.trainer is None:
        return found
    trainer = state.trainer
    found["learning_rate"] = trainer.learning_rate
    found["model"] = None if trainer.config.model.path is None else str(trainer.config.model.path)
    for name, value in describe_settings(trainer.config, trainer.objective).items():
        if name == "attributes" and isinstance(value, dict):
            found |= {f"optimizer.{attribute}": setting for attribute, setting in value.items()}
        elif name not in _LEFT_OUT:
            found[name] = value
    return {name: value for name, value in found.items() if value is not None}


class RowsFile(Callback, abc.ABC):
    """Write the rows of a `History` to a file after every epoch; subclasses define the format."""

    writes_only = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._history = History()

    @abc.abstractmethod
    def write(self, rows: list[dict[str, float]]) -> None:
        """Write all rows to the file."""

    def on_fit_begin(self, state: TrainingState) -> None:
        """Write the file, so that an invalid path fails before the first step."""
        self.write(self._history.rows)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Add a row to the file."""
        self._history.on_epoch_end(state)
        self.write(self._history.rows)

    def record(self) -> dict[str, Any]:
        """Return all rows."""
        return self._history.record()

    def resume(self, record: dict[str, Any]) -> None:
        """Continue with the rows of the checkpoint."""
        self._history.resume(record)


@checks_arguments
class CsvLogger(RowsFile):
    """Write a ``.csv`` file with one row per epoch and the columns of `History`.

    The file is complete after every epoch. A column that appears later is added to all rows. A resumed training
    continues its rows.

    Args:
        path: The file, which is replaced.
    """

    def write(self, rows: list[dict[str, float]]) -> None:
        """Write all rows to the file."""
        write_csv(self.path, rows)


@checks_arguments
class JsonLinesLogger(RowsFile):
    """Write a ``.jsonl`` file with one JSON object per epoch, with the names of `History`.

    The file is complete after every epoch. NaN and infinity become null. A resumed training continues its rows.

    Args:
        path: The file, which is replaced.
    """

    def write(self, rows: list[dict[str, float]]) -> None:
        """Write all rows to the file."""
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in for_json(rows)))


@checks_arguments
class TensorBoardLogger(Callback):
    """Write loss, learning rate and metrics to event files for ``tensorboard --logdir FOLDER``.

    Values of epochs are ``training/loss``, ``training/learning_rate`` and ``validation/...``; ``step/loss`` is the loss
    of single steps. The x axis is the number of steps. A resumed training adds a file to the folder. Needs the package
    tensorboard alone: ``pip install tensorboard``.

    Args:
        folder: Folder of the event files, one for each training.
        every: Steps between two values of ``step/loss``; None writes none.

    Raises:
        OptionError: The package tensorboard is not installed, or `every` is not positive.
    """

    writes_only = True

    def __init__(self, folder: str | os.PathLike[str], every: int | None = 50) -> None:
        needs("tensorboard", "TensorBoardLogger")
        self.folder = os.fspath(folder)
        self.every = _checked_interval(every, "TensorBoardLogger")
        self._writer: Any = None

    def on_fit_begin(self, state: TrainingState) -> None:
        """Open an event file.

        Raises:
            OptionError: The folder cannot be written to.
        """
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        try:
            self._writer = EventFileWriter(self.folder)
        except OSError as error:
            raise OptionError(f"TensorBoardLogger cannot write to {self.folder!r}: {error.strerror}.").about(
                self.folder, got=error.strerror
            ) from error

    def on_step_end(self, state: TrainingState) -> None:
        """Write the loss of every n-th step."""
        if self.every is not None and state.step % self.every == 0:
            self._write({"step/loss": state.loss}, state.step)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the values of the epoch."""
        self._write(epoch_values(state), state.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))


class _RunLogger(Callback):
    """Base of loggers that write to a run of a tracking server, which a resumed training continues."""

    writes_only = True

    def __init__(self, package: str) -> None:
        needs(package, type(self).__name__)
        self.run_id: str | None = None
        self._is_ours = False  # a run that this logger started
        self._is_finished = False

    def on_fit_end(self, state: TrainingState) -> None:
        """Record that the training finished."""
        self._is_finished = True

    def record(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"run_id": self.run_id}

    def resume(self, record: dict[str, Any]) -> None:
        """Continue the run of the checkpoint."""
        self.run_id = record["run_id"]


_LONGEST = 500
"""Length of a parameter that every MLflow store accepts."""


@checks_arguments
class MLflowLogger(_RunLogger):
    """Write settings, losses and metrics to a run of MLflow.

    It writes to the active run (``mlflow.start_run()``) and leaves it open; without one it starts a run, which ends
    with the training: ``FINISHED``, or ``FAILED`` after an error. A resumed training continues the run of its
    checkpoint. ``mlflow.set_tracking_uri`` sets where runs are stored. Needs the package mlflow, or mlflow-skinny:
    ``pip install mlflow-skinny``.

    Args:
        experiment: Name of the experiment, which is created if needed; by default MLflow's current one.
        run_name: Name of the run.

    Attributes:
        run_id: Id of the run, once the training has begun.

    Raises:
        OptionError: The package mlflow is not installed.
    """

    def __init__(self, experiment: str | None = None, *, run_name: str | None = None) -> None:
        super().__init__("mlflow")
        self.experiment, self.run_name = experiment, run_name

    def on_fit_begin(self, state: TrainingState) -> None:
        """Start or continue a run, and write the settings."""
        import mlflow

        run, again = mlflow.active_run(), self.run_id is not None
        if run is None:
            experiment = None if again or self.experiment is None else _experiment_id(self.experiment)
            run = mlflow.start_run(self.run_id, experiment_id=experiment, run_name=None if again else self.run_name)
            self._is_ours, self._is_finished = True, False
        if not again:
            mlflow.log_params({name: str(value)[:_LONGEST] for name, value in settings(state).items()})
        self.run_id = run.info.run_id

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the values of the epoch."""
        import mlflow

        mlflow.log_metrics(epoch_values(state), step=state.step, run_id=self.run_id)

    def close(self) -> None:
        """End the run if it was started here."""
        if self._is_ours:
            import mlflow

            self._is_ours = False
            mlflow.end_run("FINISHED" if self._is_finished else "FAILED")


def _experiment_id(name: str) -> str:
    import mlflow

    found = mlflow.get_experiment_by_name(name)
    return str(mlflow.create_experiment(name) if found is None else found.experiment_id)


@checks_arguments
class WandbLogger(_RunLogger):
    """Write settings, losses and metrics to a run of Weights & Biases.

    It writes to the open run (``wandb.init()``) and leaves it open; without one it starts a run, which ends with the
    training. A resumed training continues the run of its checkpoint. Needs the package wandb:
    ``pip install wandb``.

    Args:
        project: Name of the project.
        name: Name of the run.
        every: Steps between two values of ``step/loss``; None writes none.
        options: Further arguments of ``wandb.init``, such as ``mode="offline"`` or ``dir="runs"``.

    Attributes:
        run_id: Id of the run, once the training has begun.

    Raises:
        OptionError: The package wandb is not installed, or `every` is not positive.
    """

    def __init__(
        self, project: str | None = None, *, name: str | None = None, every: int | None = 50, **options: Any
    ) -> None:
        super().__init__("wandb")
        self.every = _checked_interval(every, "WandbLogger")
        self._options = {"project": project, "name": name, **options}
        self._run: Any = None

    def on_fit_begin(self, state: TrainingState) -> None:
        """Start or continue a run, and write the settings."""
        import wandb

        self._is_ours, self._is_finished = wandb.run is None, False
        if wandb.run is None:
            again = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
            self._run = wandb.init(**{**self._options, **again})
        else:
            self._run = wandb.run
        self.run_id = self._run.id
        self._run.config.update(settings(state), allow_val_change=True)

    def on_step_end(self, state: TrainingState) -> None:
        """Write the loss of every n-th step."""
        if self.every is not None and state.step % self.every == 0:
            self._run.log({"step/loss": state.loss}, step=state.step)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the values of the epoch."""
        self._run.log(epoch_values(state), step=state.step)

    def close(self) -> None:
        """End the run if it was started here."""
        if self._run is not None and self._is_ours:
            self._run.finish(exit_code=0 if self._is_finished else 1)
        self._run = None
