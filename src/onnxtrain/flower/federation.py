"""The model at the server of a federation, from round to round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import DataError
from onnxtrain.flower.records import flower, from_record
from onnxtrain.losses.heads import check_numbers
from onnxtrain.model_file.writing import AtomicFiles
from onnxtrain.trainer import Trainer


class Federation:
    """The model at the server, from round to round.

    Args:
        trainer: Has the weights.
        path: Where the model is written.
        history: Where it is said what was measured, if anywhere.
        rounds: How many rounds there will be.
    """

    def __init__(self, trainer: Trainer, path: Path, history: Path | None, rounds: int) -> None:
        self.trainer = trainer
        self.rounds = rounds
        self.validation: Any = None
        self.metrics: str | Sequence[Any] = ()
        self.target: str | None = None
        self.failures: dict[int, str] = {}
        self._path = path
        self._history = history
        self._rows: list[dict[str, Any]] = []
        self._trained = False

    def take_record(self, round_number: int, record: Any) -> Any:
        """Take over the weights of a round as Flower's record; returns what is measured, if anything, as another."""
        own = dict(self.trainer._trained)
        measured = self.take(round_number, from_record(record, own, "The strategy", averaged=True))
        return flower("flwr.app").MetricRecord(measured) if measured else None

    def take(self, round_number: int, weights: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Take over the weights of a round: measure them, and write the model and the history."""
        own = dict(self.trainer._trained)
        changed = any(not np.array_equal(own[name], value) for name, value in weights.items())
        self._trained = self._trained or changed
        self.trainer.set_weights(weights)
        measured = {}
        if self.validation is not None:
            metrics = self.trainer._objective.resolve_metrics(self.metrics)
            check_numbers(metrics)
            measured = self.trainer.evaluate(self.validation, target=self.target, metrics=metrics)
        self._rows.append({"round": round_number, **measured, "left_out": list(self.failures.values())})
        for reason in self.failures.values():
            flower("flwr.supercore").log(30, "%s", reason)
        self.failures.clear()
        if round_number:
            self.trainer.save(self._path)
        if self._history is not None:
            with AtomicFiles() as files, files.create(self._history) as file:
                file.write(json.dumps(self._rows, indent=1).encode())
        return measured

    def check_trained(self) -> None:
        """Refuse a training in which nothing was learned.

        Raises:
            DataError: No round has changed the weights.
        """
        if not self._trained:
            reasons = dict.fromkeys(reason for row in self._rows for reason in row["left_out"])
            raise DataError(
                f"No client has sent weights that could be averaged in {self.rounds} rounds; the model is as it was. "
                f"{' '.join(list(reasons)[:3])}".strip()
            )
