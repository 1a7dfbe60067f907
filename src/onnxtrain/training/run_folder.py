"""Run folder of one training: metrics, charts and a report."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from onnxtrain import __version__
from onnxtrain.data import Batch, Dataset
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.metrics.base import MetricInput, NamedMetric
from onnxtrain.metrics.choice import reader
from onnxtrain.metrics.dataset_metrics import Values
from onnxtrain.model_file.saving import current_folder, reached_from
from onnxtrain.model_file.writing import AtomicFiles, check_writable, only_warns
from onnxtrain.operators import Momentum
from onnxtrain.training.callbacks import Callback, History, TrainingState
from onnxtrain.training.callbacks.history import for_json
from onnxtrain.training.report.charts import curves, stacked
from onnxtrain.training.report.page import page
from onnxtrain.training.report.record import (
    CONFIG,
    CURVES,
    FILES,
    METRICS,
    REPORT,
    RUN,
    Confusion,
    ParameterRow,
    Residuals,
    RunRecord,
)

_WATCHED_BYTES: Final = 256 * 2**20
"""Largest size of all parameters for which a copy is kept, to report their change and gradients."""


class RunFolder(Callback):
    """Callback of ``fit(run=...)`` that records a training in a folder."""

    writes = True
    """True on the rank that writes."""

    waits = False
    """True if the caller of ``fit`` calls :meth:`finish`, once it has saved the model."""

    def __init__(self, path: str | os.PathLike[str], *, title: str = "", command: str = "", settings: str = "") -> None:
        if not os.fspath(path):
            raise OptionError("run is '', which names no folder; give the name of one, such as 'runs/first'.")
        self.path = Path(path)
        self._start = Path()
        self._title, self._command, self._settings = title, command, settings
        self._history = History()
        self._facts: dict[str, str] = {}
        self._names: dict[str, Any] = {}
        self._compared: tuple[Dataset, str] | None = None
        self._batch_size = 1
        self._before: dict[str, np.ndarray] = {}
        self._batch: Batch | None = None
        self._probe: GradientNorms | None = None
        self._norms: list[dict[str, float]] = []
        self._began = self._seconds = self._waited = 0.0
        self._examples = 0

    @property
    def report(self) -> Path:
        """Path of the report."""
        return self.path / REPORT

    def check(self, *, resume: bool) -> None:
        """Check that the folder can be used, before training starts."""
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise OptionError(f"run is {str(self.path)!r}, but {str(existing)!r} is a file, not a folder.")
        if (self.path / RUN).exists() and not resume:
            raise OptionError(
                f"The folder {str(self.path)!r} holds an earlier run; give another folder, or resume=True to go on "
                "with that one."
            )
        try:
            for name in FILES if existing == self.path else (METRICS,):
                check_writable(existing / name)
        except ModelError as error:
            raise OptionError(str(error)) from error

    def describe(
        self,
        history: History,
        trainer: Any,
        data: Dataset,
        validation: Dataset | None,
        batch_size: int,
        schedule: object,
    ) -> None:
        """Record the facts that are known before the first step, and the history that a resumed training continues."""
        self._history, self._batch_size = history, batch_size
        if validation is not None:
            self._compared = validation, "the validation data"
        elif data.size is not None:  # other data cannot be read twice
            self._compared = data, "the training data"
        loss = trainer.objective.loss
        facts = {
            "model": trainer.config.model.path,
            "loss": None if loss is None else loss.name,
            "optimizer": trainer.config.optimizer,
            "examples": data.size,
            "validation examples": None if validation is None else validation.size,
            "batch size": batch_size,
            "schedule": schedule,
            "seed": trainer.config.seed,
        }
        self._names = trainer.data_adapter.names.record()
        self._facts = {name: str(value) for name, value in facts.items() if value is not None}
        self._facts["started"] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
        self._facts["versions"] = (
            f"onnxtrain {__version__}, onnxruntime {onnxruntime.__version__}, NumPy {np.__version__}, "
            f"Python {platform.python_version()}"
        )

    def on_fit_begin(self, state: TrainingState) -> None:
        """Copy the weights, and write first files, so that errors of the file system appear before the first step."""
        self._began = time.perf_counter()
        try:
            self._start = current_folder()
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"The folder {str(self.path)!r} cannot be created: {error.strerror or error}.") from error
        if self._settings:
            self._write(CONFIG, self._settings)
        if sum(array.nbytes for array in state.weights.values()) <= _WATCHED_BYTES:
            self._before = {name: np.array(array) for name, array in state.weights.items()}
        self._save_rows()
        self._write_run(finished=False)

    def on_step_end(self, state: TrainingState) -> None:
        """Keep the first batch, on which gradients are measured."""
        self._examples += state.batch_size
        if self._batch is None and self._before:
            self._batch = state.batch

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the metrics so far, and measure gradients."""
        with only_warns("The run folder lacks this epoch"):
            self._save_rows()
            if self._batch is not None:
                self._probe = self._probe or GradientNorms(state.trainer)
                self._norms.append(self._probe.measure(state.weights, self._batch))

    def on_fit_end(self, state: TrainingState) -> None:
        """Record the time."""
        self._seconds = time.perf_counter() - self._began
        self._waited = state.waited
        if state.stop_reason:
            self._facts["stopped early"] = state.stop_reason

    def finish(self, trainer: Any, *, ema: bool = False) -> None:
        """Compare predictions (of the moving averages, with ``ema``) with targets; write curves and report."""
        self._facts["time"] = f"{self._seconds:.1f} s, {self._examples / max(self._seconds, 1e-9):,.0f} examples/s"
        self._facts["waiting for data"] = f"{self._waited / max(self._seconds, 1e-9):.1%} of the time"
        outcome, said = None, "Nothing is compared: the evaluation failed."
        with only_warns("The report lacks predictions"):
            outcome, said = self._outcome(trainer, ema)
        norms = {name: [row[name] for row in self._norms] for name in (self._norms or [{}])[0]}
        record = RunRecord(
            title=self._title
            or (self.path.name if trainer.config.model.path is None else trainer.config.model.path.name),
            command=self._command,
            facts=self._facts,
            rows=self._history.rows,
            parameters=self._parameters(trainer),
            gradient_norms=norms,
            gradients_of=(
                "The square root of the sum of squares of each parameter's gradient, before clipping, on the first "
                "batch of this training, after every epoch."
                if norms
                else "Not measured: the parameters are too large for copies of them."
            ),
            outcome=[] if outcome is None else outcome.shown(trainer.data_adapter.labels_of(None)),
            outcome_of=said,
            settings=self._settings,
        )
        with only_warns("The run has no curves"):
            self._write(CURVES, stacked(curves(record.rows)))
        with only_warns("The run has no report"):
            self._write(REPORT, page(record))
        with only_warns("The run is not marked as finished"):
            self._write_run(finished=True)

    def _outcome(self, trainer: Any, ema: bool) -> tuple[Outcome | None, str]:
        """Compare predictions with targets; return the outcome and a sentence for the report."""
        heads = trainer.objective.heads
        if self._compared is None or not heads or heads[0].metric_input.predicts is None:
            return None, "Nothing is compared: the loss has no comparable targets, or the data cannot be read twice."
        data, name = self._compared
        size = max(self._batch_size, 64)
        found = trainer.evaluate(data, batch_size=size, metrics=[outcome(heads[0].metric_input)], ema=ema)["outcome"]
        if not isinstance(found, Outcome):
            return None, "Nothing is compared: predictions are NaN, or there are none."
        measured = "the moving averages of the weights" if ema else "the weights"
        return found, found.note or f"On {name}, with {measured} at the end of the training."

    def _parameters(self, trainer: Any) -> list[ParameterRow]:
        last = self._norms[-1] if self._norms else {}
        rows = []
        for name, array in trainer.weights.items():
            values = array.astype(np.float64)
            change = None if name not in self._before else _norm(values - self._before[name].astype(np.float64))
            zeros = float(np.mean(values == 0)) if values.size else 0.0
            rows.append(ParameterRow(name, tuple(array.shape), zeros, _norm(values), change, last.get(name)))
        return rows

    def _write_run(self, *, finished: bool) -> None:
        found = {
            "finished": finished,
            "title": self._title,
            "command": self._command,
            "seconds": round(self._seconds, 3),
            "facts": self._facts,
            **self._names,
            "rows": for_json(self._history.rows),
        }
        self._write(RUN, json.dumps(found, ensure_ascii=False, indent=1) + "\n")

    def _save_rows(self) -> None:
        if self.writes:
            place = reached_from(self._start, self.path)
            place.mkdir(parents=True, exist_ok=True)
            self._history.save(place / METRICS)

    def _write(self, name: str, text: str) -> None:
        if not self.writes:
            return
        try:
            with AtomicFiles() as files, files.create(reached_from(self._start, self.path) / name) as file:
                file.write(text.encode("utf-8", "backslashreplace"))
        except ModelError as error:
            raise OptionError(str(error)) from error


class GradientNorms:
    """Measure the norms of a model's gradients on a batch, by one step of Momentum."""

    def __init__(self, trainer: Any) -> None:
        plain = Momentum(learning_rate=1e-3, alpha=0.0, beta=1.0, norm_coefficient=0.0)
        self._learner = trainer.rebuilt(optimizer=plain, sparsify=None, clip_value=None, clip_norm=None, groups=())
        self._learner.executor.use_features(wanted=trainer.executor.on_features)  # as in the batches of the training

    def measure(self, weights: Mapping[str, np.ndarray], batch: Batch) -> dict[str, float]:
        """Return the gradient norm of each parameter, for these weights on this batch."""
        learner = self._learner
        learner.weights.update(weights)
        momenta = {name: f"{name}/V" for name in learner.parameters}
        for name in momenta.values():  # alpha = 0 times an infinite momentum would be NaN
            learner.executor.states[name] = np.zeros_like(learner.executor.states[name])
        learner.executor.step_batch(batch, learner.learning_rate)
        return {name: _norm(learner.executor.states[state].astype(np.float64)) for name, state in momenta.items()}


def _norm(values: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(values.reshape(-1)))


MOST_CLASSES: Final = 500
"""Largest number of classes for which a matrix is kept."""

MOST_PAIRS: Final = 2000
"""Largest number of pairs that are kept; of more, every second, fourth, ..."""


@dataclass
class Outcome:
    """Comparison of predictions with targets for a report."""

    counts: Values | None = None
    pairs: Values = field(default_factory=lambda: np.zeros((0, 2)))
    every: int = 1
    seen: int = 0
    too_many: int = 0

    @property
    def note(self) -> str:
        """Reason for showing nothing, or ""."""
        return f"A matrix of {self.too_many} classes is not drawn." if self.too_many else ""

    def add(self, pairs: Values) -> None:
        """Add the pairs of the next batch, and thin out evenly."""
        self.pairs = np.concatenate([self.pairs, pairs[-self.seen % self.every :: self.every]])
        self.seen += len(pairs)
        while len(self.pairs) > MOST_PAIRS:
            self.pairs, self.every = self.pairs[::2], self.every * 2

    def joined(self, other: Outcome) -> Outcome:
        """Add the outcome of the next batch."""
        if other.counts is not None:
            self.counts = other.counts if self.counts is None else self.counts + other.counts
        self.too_many = self.too_many or other.too_many
        self.add(other.pairs)
        return self

    def finished(self) -> Outcome:
        """Thin out the pairs of a single batch."""
        self.add(self.pairs[:0])
        return self

    def shown(self, labels: Sequence[str] | None = None) -> list[Confusion | Residuals]:
        """Return the figures of a report."""
        if len(self.pairs):
            return [Residuals(self.pairs[:, 0].tolist(), self.pairs[:, 1].tolist())]
        if self.counts is None:
            return []
        if self.counts.ndim == 2:
            names = labels or [str(index) for index in range(len(self.counts))]
            return [Confusion(self.counts.tolist(), list(names))]
        several = len(self.counts) > 1
        return [
            Confusion(counts.tolist(), list(labels or ("no", "yes")), f"output {index}" if several else "")
            for index, counts in enumerate(self.counts)
        ]


def outcome(metric_input: MetricInput) -> NamedMetric:
    """Return a metric whose value is an :class:`Outcome`."""
    read = reader(metric_input, "outcome", ("classes", "binary", "numbers"))

    def measure(y_true: np.ndarray, y_pred: np.ndarray) -> Outcome:
        found = read(y_true, y_pred)
        if found.kind == "numbers":
            pairs = np.stack([found.truth.reshape(-1), found.scores.reshape(-1)], axis=1)
            return Outcome(pairs=pairs, seen=len(pairs))
        if found.kind == "classes" and found.scores.shape[1] > MOST_CLASSES:
            return Outcome(too_many=found.scores.shape[1])
        return Outcome(found.confusion())

    return NamedMetric("outcome", measure, Outcome.joined, Outcome.finished, counted=metric_input.counted, number=False)
