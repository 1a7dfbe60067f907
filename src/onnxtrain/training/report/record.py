"""Data of a training's report, and reading the runs in folders."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from onnxtrain.errors import OptionError
from onnxtrain.model_file.small_files import read_json, read_toml

VALIDATION: Final = "val_"
"""Prefix of the metrics of validation data: ``val_loss``, ``val_accuracy``."""

METRICS, CURVES, REPORT, RUN, CONFIG = "metrics.csv", "curves.svg", "report.html", "run.json", "config.toml"
FILES: Final = (METRICS, CURVES, REPORT, RUN, CONFIG)
"""Files of a run folder; only the command line writes the last."""

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
    *("rewards/chosen", "rewards/margins", "concordance", "similarity"),
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


@dataclass(frozen=True)
class Run:
    """A run as described by its folder."""

    path: Path
    finished: bool
    seconds: float
    facts: dict[str, str]
    rows: list[dict[str, float]]
    settings: dict[str, Any]

    @property
    def best(self) -> dict[str, float]:
        """The best value of each measurement; NaN where none is finite."""
        found = {}
        for name in measured_columns(self.rows):
            values = [row.get(name, math.nan) for row in self.rows]
            index = best_epoch(values, name)
            found[name] = math.nan if index is None else values[index]
        return found


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read the runs in folders: each folder is a run, or contains some."""
    found = []
    for path in paths:
        if not path.is_dir():
            raise OptionError(f"There is no folder {str(path)!r}; give folders that fit wrote with run=.")
        folders = [path] if os.path.lexists(path / RUN) else sorted(each.parent for each in path.glob(f"*/{RUN}"))
        if not folders:
            raise OptionError(f"The folder {str(path)!r} holds no run; fit writes them with run=.")
        found += [_read(folder) for folder in folders]
    return found


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for each run the settings that differ between runs; ``None`` where a run lacks one."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    differ = [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]
    return [{name: run.settings.get(name) for name in differ} for run in runs]


def _read(folder: Path) -> Run:
    try:
        found = read_json(folder / RUN)
        config = folder / CONFIG
        settings = read_toml(config) if os.path.lexists(config) else {}
        rows: list[dict[str, float]] = [
            {name: math.nan if value is None else float(value) for name, value in row.items()} for row in found["rows"]
        ]
        facts = {str(name): str(value) for name, value in found["facts"].items()}
        return Run(folder, bool(found["finished"]), float(found["seconds"]), facts, rows, settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise OptionError(f"The run in {str(folder)!r} cannot be read: {reason}.") from error
