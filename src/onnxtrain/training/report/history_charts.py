"""Charts of a training history, for reports, run folders and notebooks."""

from __future__ import annotations

import math

from onnxtrain.training.report.charts import Chart, line_chart
from onnxtrain.training.report.record import Rows, measured_columns, words

_TRAINING, _VALIDATION = "training", "validation"


def losses_and_metrics(rows: Rows) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Group the measurements of all epochs by their display names: losses, and all others.

    >>> losses_and_metrics([{"epoch": 1, "loss": 2.0, "val_loss": 3.0, "val_top_5": 0.5}])
    ({'training': [2.0], 'validation': [3.0]}, {'validation top 5': [0.5]})
    """
    short = {"loss": _TRAINING, "val_loss": _VALIDATION}
    losses: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for name in measured_columns(rows):
        found = losses if name.endswith("loss") else metrics
        found[short.get(name, words(name))] = [row.get(name, math.nan) for row in rows]
    return losses, metrics


def measured(rows: Rows) -> list[Chart]:
    """Return a chart of the losses, and one for each metric."""
    losses, metrics = losses_and_metrics(rows)
    epochs = [row["epoch"] for row in rows]
    found = [line_chart(losses, epochs, title="loss")] if losses else []
    return found + [line_chart({name: column}, epochs, title=name) for name, column in metrics.items()]


def curves(rows: Rows) -> list[Chart]:
    """Return the charts of all measurements and of the learning rate."""
    if not rows:
        return []
    rates = [row.get("learning_rate", math.nan) for row in rows]
    rate = line_chart({"learning rate": rates}, [row["epoch"] for row in rows], title="learning rate")
    return [*measured(rows), rate]


def side_by_side(charts: list[Chart], *, scale: float = 0.75) -> str:
    """Return charts as HTML for a notebook, as many in a row as fit; "" without charts."""
    inside = "".join(chart.svg(scale=scale) for chart in charts)
    return f'<div style="display:flex;flex-wrap:wrap;gap:16px">{inside}</div>' if inside else ""
