"""The course of a training as a picture: a PNG through matplotlib, or characters where that is missing."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OptionError
from onnxtrain.model.writing import AtomicFiles, check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, float]]
"""One row per epoch, as in :class:`~onnxtrain.training.callbacks.History`."""

MISSING = "There is no PNG of the training curve, because matplotlib is not installed: pip install 'onnxtrain[report]'."

_NOT_MEASURED = ("epoch", "step", "learning_rate")
_TRAINING, _VALIDATION = "#2563eb", "#ea580c"
_LOGARITHMIC_FROM = 30.0
"""A loss that falls by more than this factor is drawn on a logarithmic axis."""


def matplotlib_available() -> bool:
    """Whether :func:`save_curve` can draw."""
    return importlib.util.find_spec("matplotlib") is not None


def save_curve(rows: Rows, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw losses and metrics over the epochs, and write them as a PNG.

    Args:
        rows: The rows of a :class:`~onnxtrain.training.callbacks.History`.
        path: The PNG.
        title: What stands above.

    Raises:
        OptionError: matplotlib is not installed, or there is no row.
        ModelError: The path cannot be written.
    """
    if not matplotlib_available():
        raise OptionError(MISSING)
    check_writable(path)
    figure = draw(rows, title=title)
    with AtomicFiles() as files, files.create(Path(path)) as file:
        figure.savefig(file, format="png", dpi=150)


def draw(rows: Rows, *, title: str = "") -> Figure:
    """The figure of :func:`save_curve`: losses on the left and, where there are any, metrics on the right.

    Raises:
        OptionError: There is no row.
    """
    from matplotlib.figure import Figure  # not pyplot: it keeps figures, and asks for a display

    if not rows:
        raise OptionError("A training curve needs at least one epoch.")
    losses, metrics = _series(rows)
    panels = 2 if metrics else 1
    figure = Figure(figsize=(4.6 * panels + 0.4, 3.6), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _panel(axes[0], rows, losses, "loss")
    values = [value for series in losses.values() for value in series if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > _LOGARITHMIC_FROM * min(values):
        axes[0].set_yscale("log")
    if metrics:
        _panel(axes[1], rows, metrics, next(iter(metrics)) if len(metrics) == 1 else "on validation data")
    if title:
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.02, ha="left")
    return figure


def _series(rows: Rows) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measured values by what a reader calls them: losses, other metrics."""
    names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_MEASURED)
    columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
    losses = {"training" if n == "loss" else "validation": c for n, c in columns.items() if n.endswith("loss")}
    others = {n.replace("_", " "): c for n, c in columns.items() if not n.endswith("loss")}
    return losses, others


def _panel(axes: Axes, rows: Rows, series: dict[str, list[float]], label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = [row["epoch"] for row in rows]
    colours: list[Any] = [_TRAINING, _VALIDATION] if "training" in series else [_VALIDATION, "#059669", "#7c3aed"]
    for index, (name, values) in enumerate(series.items()):
        colour = colours[index % len(colours)]
        axes.plot(epochs, values, color=colour, label=name, linewidth=1.8, marker="o", markersize=3)
        if math.isfinite(values[-1]):
            axes.annotate(
                f"{values[-1]:.4g}",
                (epochs[-1], values[-1]),
                xytext=(4, 0),
                textcoords="offset points",
                color=colour,
                fontsize=8,
                va="center",
            )
    axes.set_xlabel("epoch")
    axes.set_title(label, fontsize=10, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=9)


def text_curve(rows: Rows, *, width: int = 60, height: int = 12) -> str:
    """The losses over the epochs in characters: ``*`` training, ``o`` validation.

    Args:
        rows: The rows of a :class:`~onnxtrain.training.callbacks.History`.
        width: Characters of the plot.
        height: Its lines.

    Raises:
        OptionError: There is no row.

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
    losses, _ = _series(rows)
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
