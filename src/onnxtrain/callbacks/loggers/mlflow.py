"""The course of a training for MLflow."""

from __future__ import annotations

from typing import Any

from onnxtrain.callbacks.base import Callback, TrainingState
from onnxtrain.callbacks.loggers.values import epoch_values, needs, settings
from onnxtrain.spelling import checks_arguments

_LONGEST = 500
"""Characters of a parameter that every store of MLflow takes."""


@checks_arguments
class MLflowLogger(Callback):
    """Writes settings, losses and metrics to a run of MLflow.

    Where a run is active (``mlflow.start_run()``) it goes on with that one and leaves it open; else it starts a run,
    which ends with the training: ``FINISHED``, or ``FAILED`` where an error ended it. A resumed training goes on with
    the run of its checkpoint. Runs are kept where MLflow is told to (``mlflow.set_tracking_uri``). Needs the package
    mlflow, or mlflow-skinny: ``pip install 'onnxtrain[mlflow]'``.

    Args:
        experiment: the name of the experiment, made where there is none; by default the current one of MLflow.
        run_name: what to call the run.

    Attributes:
        run_id: the run, once the training has begun.

    Raises:
        OptionError: mlflow is not installed.
    """

    writes_only = True

    def __init__(self, experiment: str | None = None, *, run_name: str | None = None) -> None:
        needs("mlflow", "MLflowLogger")
        self.experiment, self.run_name = experiment, run_name
        self.run_id: str | None = None
        self._is_open = False  # and ours
        self._is_finished = False

    def on_fit_begin(self, state: TrainingState) -> None:
        """Start a run, or find the one to go on with, and write the settings."""
        import mlflow

        run, again = mlflow.active_run(), self.run_id is not None
        if run is None:
            experiment = None if again or self.experiment is None else _experiment_id(self.experiment)
            run = mlflow.start_run(self.run_id, experiment_id=experiment, run_name=None if again else self.run_name)
            self._is_open, self._is_finished = True, False
        if not again:
            mlflow.log_params({name: str(value)[:_LONGEST] for name, value in settings(state).items()})
        self.run_id = run.info.run_id

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the values of the epoch."""
        import mlflow

        mlflow.log_metrics(epoch_values(state), step=state.step, run_id=self.run_id)

    def on_fit_end(self, state: TrainingState) -> None:
        """Note that the training came to its end."""
        self._is_finished = True

    def close(self) -> None:
        """End the run, where it was started here."""
        if self._is_open:
            import mlflow

            self._is_open = False
            mlflow.end_run("FINISHED" if self._is_finished else "FAILED")

    def record(self) -> dict[str, Any]:
        """The run."""
        return {"run_id": self.run_id}

    def resume(self, record: dict[str, Any]) -> None:
        """Go on with the run of the checkpoint."""
        self.run_id = record["run_id"]


def _experiment_id(name: str) -> str:
    import mlflow

    found = mlflow.get_experiment_by_name(name)
    return str(mlflow.create_experiment(name) if found is None else found.experiment_id)
