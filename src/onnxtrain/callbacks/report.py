"""Training curves: a PNG by matplotlib, or a plot in characters."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtrain.errors import OptionError
from onnxtrain.model_file.writing import AtomicFiles, check_writable
from onnxtrain.report.axes import spans_orders
from onnxtrain.report.colours import colours
from onnxtrain.report.history_charts import losses_and_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, float]]
"""One row per epoch, as in :class:`~onnxtrain.callbacks.History`."""

MISSING = "There is no PNG of the training curve, because matplotlib is not installed: pip install 'onnxtrain[report]'."


def matplotlib_available() -> bool:
    """Return whether :func:`save_curve` can draw."""
    return importlib.util.find_spec("matplotlib") is not None


def save_curve(rows: Rows, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Plot losses and metrics over the epochs as a PNG.

    Args:
        rows: The rows of a :class:`~onnxtrain.callbacks.History`.
        path: Path of the PNG.
        title: Title of the figure.

    Raises:
        OptionError: The package matplotlib is not installed, or there is no row.
        ModelError: The path cannot be written.
    """
    if not matplotlib_available():
        raise OptionError(MISSING)
    check_writable(path)
    figure = draw(rows, title=title)
    with AtomicFiles() as files, files.create(Path(path)) as file:
        figure.savefig(file, format="png", dpi=150)


def draw(rows: Rows, *, title: str = "") -> Figure:
    """Draw the figure of :func:`save_curve`: losses on the left and, if there are any, metrics on the right.

    Raises:
        OptionError: There is no row.
    """
    from matplotlib.figure import Figure  # pyplot would keep figures and need a display

    if not rows:
        raise OptionError("A training curve needs at least one epoch.")
    found = panels(rows)
    figure = Figure(figsize=(4.6 * len(found) + 0.4, 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        _draw(axes, [row["epoch"] for row in rows], panel)
    if title:
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.02, ha="left")
    return figure


@dataclass(frozen=True)
class Panel:
    """One plot of the figure.

    Attributes:
        title: Title of the plot.
        columns: Values over the epochs by label.
        colours: A colour for each, as in HTML.
        logarithmic: Whether the value axis is logarithmic.
    """

    title: str
    columns: dict[str, list[float]]
    colours: list[str]
    logarithmic: bool = False


def panels(rows: Rows) -> list[Panel]:
    """Return the panels to draw: losses and, if there are any, metrics."""
    losses, metrics = losses_and_metrics(rows)
    logarithmic = spans_orders(value for column in losses.values() for value in column)
    found = [Panel("loss", losses, colours(len(losses)), logarithmic)]
    if metrics:
        title = next(iter(metrics)) if len(metrics) == 1 else "on validation data"
        found.append(Panel(title, metrics, colours(1 + len(metrics))[1:]))
    return found


def _draw(axes: Axes, epochs: Sequence[float], panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    for (name, values), colour in zip(panel.columns.items(), panel.colours, strict=True):
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
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.logarithmic:
        axes.set_yscale("log")
    if len(panel.columns) > 1:
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def text_curve(rows: Rows, *, width: int = 60, height: int = 12) -> str:
    """Plot the losses over the epochs in characters: ``*`` training, ``o`` validation.

    Args:
        rows: The rows of a :class:`~onnxtrain.callbacks.History`.
        width: Width of the plot in characters.
        height: Height of the plot in lines.

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
