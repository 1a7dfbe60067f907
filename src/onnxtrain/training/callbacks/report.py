"""Training curves: a PNG through matplotlib, SVG, or a plot in characters."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from onnxtrain.errors import OptionError
from onnxtrain.model_file.writing import AtomicFiles, check_writable
from onnxtrain.training.report.charts import Chart, losses_and_metrics, matplotlib_available, measured, png, stacked

Rows = Sequence[dict[str, float]]
"""One row per epoch, as in :class:`~onnxtrain.callbacks.History`."""

MISSING = "There is no PNG of the training curve, because matplotlib is not installed: pip install matplotlib."


def save_curve(rows: Rows, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw losses and metrics over the epochs, and write them as a PNG, or as SVG."""
    check_curve(path)
    is_svg = Path(path).suffix == ".svg"
    if not is_svg and not matplotlib_available():
        raise OptionError(MISSING)
    check_writable(path)
    with AtomicFiles() as files, files.create(Path(path)) as file:
        file.write(stacked(_charts(rows)).encode() if is_svg else png(_charts(rows), title=title))


def check_curve(path: str | os.PathLike[str]) -> None:
    """Check before a training that its curve can have this name."""
    if Path(path).suffix not in (".png", ".svg"):
        raise OptionError(f"A training curve is saved as .png or .svg, not as {os.fspath(path)!r}.")


def _charts(rows: Rows) -> list[Chart]:
    if not rows:
        raise OptionError("A training curve needs at least one epoch.")
    return measured(rows)


def text_curve(rows: Rows, *, width: int = 60, height: int = 12) -> str:
    """The losses over the epochs in characters: ``*`` training, ``o`` validation.

    Example:
        >>> print(text_curve([{"epoch": 1, "loss": 4.0}, {"epoch": 2, "loss": 1.0}], width=9, height=3))
             4 |*
               |
             1 |        *
               +---------
                1       2  epoch, * training loss
    """
    if not rows:
        raise OptionError("A training curve needs at least one epoch.")
    losses, _ = losses_and_metrics(rows)
    values = [value for series in losses.values() for value in series if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    cells = [[" "] * width for _ in range(height)]
    for mark, series in zip("*o", losses.values(), strict=False):
        for index, value in enumerate(series):
            if math.isfinite(value):
                column = round(index * (width - 1) / max(len(series) - 1, 1))
                line = round((high - value) / (high - low) * (height - 1)) if high > low else 0
                cells[line][column] = mark
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    lines = [f"{labels.get(index, ''):>6} |{''.join(row)}".rstrip() for index, row in enumerate(cells)]
    legend = ", ".join(f"{mark} {name} loss" for mark, name in zip("*o", losses, strict=False))
    first, last = round(rows[0]["epoch"]), round(rows[-1]["epoch"])
    lines.append(f"{'':>6} +{'-' * width}")
    lines.append(f"{'':>8}{first}{last:>{width - len(str(first))}}  epoch, {legend}")
    return "\n".join(lines)
