"""Data of a training's report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from onnxtrain.renamed import VALIDATION

Rows = Sequence[Mapping[str, float]]
"""One row per epoch: epoch (from 1), step, loss, learning rate, metrics."""

NOT_MEASURED = ("epoch", "step", "learning_rate")
"""Columns of a row that say where it stands."""


@dataclass(frozen=True)
class ParameterRow:
    """A parameter after a training.

    Attributes:
        name: its name in the model.
        shape: sizes of its axes.
        zeros: the fraction of its elements that are zero.
        norm: the square root of the sum of its squares.
        change: the norm of what the training changed; None where the weights before are not known.
        gradient: the norm of its gradient after the last epoch; None where it was not measured.
    """

    name: str
    shape: tuple[int, ...]
    zeros: float
    norm: float
    change: float | None = None
    gradient: float | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for side in self.shape:
            size *= side
        return size


@dataclass(frozen=True)
class Confusion:
    """Confusion matrix of a classifier.

    Attributes:
        counts: rows are true classes, columns predicted ones.
        labels: the names of the classes.
        title: which question this answers, where there are several.
    """

    counts: Sequence[Sequence[float]]
    labels: Sequence[str]
    title: str = ""


@dataclass(frozen=True)
class Residuals:
    """Predicted numbers and true ones: pairs, of very many evenly chosen ones."""

    truth: Sequence[float]
    predicted: Sequence[float]


@dataclass(frozen=True)
class RunRecord:
    """A training that has ended.

    Attributes:
        title: what the report is called.
        command: the command that made it; "" where it was no command.
        facts: names and values of what else is known: the model, the data, versions, the time.
        rows: one per epoch.
        parameters: all that was trained.
        gradient_norms: the norm of each parameter's gradient after every epoch.
        gradients_of: which examples these are the gradients of, in words, or why there are none.
        outcome: predictions compared with targets: matrices, or residuals; empty where there are none.
        outcome_of: which data these are, in words, or why there are none.
        settings: what would repeat the training, as the text of a configuration file; "" where nothing would.
    """

    title: str
    command: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    rows: Rows = ()
    parameters: Sequence[ParameterRow] = ()
    gradient_norms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    gradients_of: str = ""
    outcome: Sequence[Confusion | Residuals] = ()
    outcome_of: str = ""
    settings: str = ""


_GROWING: Final = ("acc", "precision", "recall", "f1", "iou", "auc", "auroc", "r2", "top_")
"""Parts of the names of metrics of which large values are good."""


def words(name: str) -> str:
    """Return the name of a metric or column for people to read.

    >>> words("val_top_5"), words("learning_rate")
    ('validation top 5', 'learning rate')
    """
    return name.replace(VALIDATION, "validation ", int(name.startswith(VALIDATION))).replace("_", " ")


def large_is_good(name: str) -> bool:
    """Return whether larger values of a metric are better, by its name.

    >>> large_is_good("val_accuracy"), large_is_good("loss")
    (True, False)
    """
    return any(part in name for part in _GROWING)


def best_epoch(values: Sequence[float], name: str) -> int | None:
    """The index of the best of some values; None where none is finite.

    >>> best_epoch([3.0, 1.0, 2.0], "loss")
    1
    """
    known = [(value, index) for index, value in enumerate(values) if math.isfinite(value)]
    if not known:
        return None
    return (max if large_is_good(name) else min)(known, key=lambda pair: pair[0])[1]


def measured_columns(rows: Rows) -> list[str]:
    """The names of all that was measured."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in NOT_MEASURED]
