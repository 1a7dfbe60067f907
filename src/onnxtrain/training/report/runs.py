"""Read run folders to compare them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.model_file.small_files import read_json, read_toml
from onnxtrain.training.report.record import best_epoch, measured_columns

RUN, CONFIG = "run.json", "config.toml"


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
