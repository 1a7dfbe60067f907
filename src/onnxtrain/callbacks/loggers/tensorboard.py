"""The course of a training for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from onnxtrain.callbacks.base import Callback, TrainingState
from onnxtrain.callbacks.loggers.values import epoch_values, needs
from onnxtrain.errors import OptionError
from onnxtrain.spelling import checks_arguments


@checks_arguments
class TensorBoardLogger(Callback):
    """Writes loss, learning rate and metrics to event files, which ``tensorboard --logdir FOLDER`` shows.

    Values of epochs are ``training/loss``, ``training/learning_rate`` and ``validation/...``; between them
    ``step/loss`` is the loss of a step. All are drawn over the number of steps. A resumed training adds a file to the
    folder. Needs the package tensorboard and nothing else: ``pip install 'onnxtrain[tensorboard]'``.

    Args:
        folder: where the event files go; one for each training.
        every: steps between two values within an epoch; None writes none.

    Raises:
        OptionError: tensorboard is not installed, or `every` is not positive.
    """

    writes_only = True

    def __init__(self, folder: str | os.PathLike[str], every: int | None = 50) -> None:
        needs("tensorboard", "TensorBoardLogger")
        if every is not None and every < 1:
            raise OptionError(f"every of TensorBoardLogger is {every}; it needs a number of steps of at least 1.")
        self.folder = os.fspath(folder)
        self.every = every
        self._writer: Any = None

    def on_fit_begin(self, state: TrainingState) -> None:
        """Open an event file.

        Raises:
            OptionError: the folder cannot be written to.
        """
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        try:
            self._writer = EventFileWriter(self.folder)
        except OSError as error:
            raise OptionError(f"TensorBoardLogger cannot write to {self.folder!r}: {error.strerror}.") from error

    def on_step_end(self, state: TrainingState) -> None:
        """Write the loss of the step, now and then."""
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
