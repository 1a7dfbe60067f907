"""The course of a training for Weights & Biases."""

from __future__ import annotations

from typing import Any

from onnxtrain.callbacks.base import Callback, TrainingState
from onnxtrain.callbacks.loggers.values import epoch_values, needs, settings
from onnxtrain.errors import OptionError
from onnxtrain.spelling import checks_arguments


@checks_arguments
class WandbLogger(Callback):
    """Writes settings, losses and metrics to a run of Weights & Biases.

    Where a run is open (``wandb.init()``) it goes on with that one and leaves it open; else it starts a run, which ends
    with the training. A resumed training goes on with the run of its checkpoint. Needs the package wandb:
    ``pip install 'onnxtrain[wandb]'``.

    Args:
        project: the name of the project.
        name: what to call the run.
        every: steps between two values within an epoch (``step/loss``); None writes none.
        options: further arguments of ``wandb.init``, such as ``mode="offline"`` or ``dir="runs"``.

    Attributes:
        run_id: the run, once the training has begun.

    Raises:
        OptionError: wandb is not installed, or `every` is not positive.
    """

    writes_only = True

    def __init__(
        self, project: str | None = None, *, name: str | None = None, every: int | None = 50, **options: Any
    ) -> None:
        needs("wandb", "WandbLogger")
        if every is not None and every < 1:
            raise OptionError(f"every of WandbLogger is {every}; it needs a number of steps of at least 1.")
        self.every = every
        self.run_id: str | None = None
        self._options = {"project": project, "name": name, **options}
        self._run: Any = None
        self._is_ours = False
        self._is_finished = False

    def on_fit_begin(self, state: TrainingState) -> None:
        """Start a run, or find the one to go on with, and write the settings."""
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
        """Write the loss of the step, now and then."""
        if self.every is not None and state.step % self.every == 0:
            self._run.log({"step/loss": state.loss}, step=state.step)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the values of the epoch."""
        self._run.log(epoch_values(state), step=state.step)

    def on_fit_end(self, state: TrainingState) -> None:
        """Note that the training came to its end."""
        self._is_finished = True

    def close(self) -> None:
        """End the run, where it was started here."""
        if self._run is not None and self._is_ours:
            self._run.finish(exit_code=0 if self._is_finished else 1)
        self._run = None

    def record(self) -> dict[str, Any]:
        """The run."""
        return {"run_id": self.run_id}

    def resume(self, record: dict[str, Any]) -> None:
        """Go on with the run of the checkpoint."""
        self.run_id = record["run_id"]
