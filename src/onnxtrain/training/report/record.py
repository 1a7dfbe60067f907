"""Data of a training's report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

VALIDATION: Final = "val_"
"""Prefix of the metrics of validation data: ``val_loss``, ``val_accuracy``."""

Rows = Sequence[Mapping[str, float]]
"""One row per epoch: epoch (from 1), step, loss, learning rate, metrics."""

NOT_MEASURED = ("epoch", "step", "learning_rate")
"""Columns of a row that are not measurements."""


@dataclass(frozen=True)
class ParameterRow:
    """A parameter after a training."""

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
    """Confusion matrix of a classifier."""

    counts: Sequence[Sequence[float]]
    labels: Sequence[str]
    title: str = ""


@dataclass(frozen=True)
class Residuals:
    """Pairs of predicted and true numbers; an even selection of them where there are very many."""

    truth: Sequence[float]
    predicted: Sequence[float]


@dataclass(frozen=True)
class RunRecord:
    """A training that has ended."""

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


_GROWING: Final = (
    *("acc", "precision", "recall", "f1", "iou", "auc", "auroc", "r2", "top_", "per_second"),
    *("rewards/chosen", "rewards/margins"),
)
"""Parts of the names of metrics for which larger values are better."""

_GROWING_ENDS: Final = ("_map", "_map_50")
"""Ends of such names that are parts of others: "mape" is better if small."""


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
    return any(part in name for part in _GROWING) or f"_{name}".endswith(_GROWING_ENDS)


def best_epoch(values: Sequence[float], name: str) -> int | None:
    """Return the index of the best of some values; ``None`` where none is finite.

    >>> best_epoch([3.0, 1.0, 2.0], "loss")
    1
    """
    known = [(value, index) for index, value in enumerate(values) if math.isfinite(value)]
    if not known:
        return None
    return (max if large_is_good(name) else min)(known, key=lambda pair: pair[0])[1]


def measured_columns(rows: Rows) -> list[str]:
    """Return the names of all measurements."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in NOT_MEASURED]
