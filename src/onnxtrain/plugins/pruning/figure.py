"""Charts of a pruning: accuracy over sparsity, sparsity of each layer, weights before and after."""

from __future__ import annotations

import numpy as np

from onnxtrain.plugins.pruning.record import PruneRecord
from onnxtrain.training.report.charts import Chart, bar_chart, curve_chart

_BINS = 81
_MOST_LAYERS = 24
"""Most bars in a readable chart; with more tensors, the largest ones are shown."""


def charts(result: PruneRecord) -> list[Chart]:
    """Return the charts of a result."""
    return [_accuracy(result), _layers(result), _weights(result)]


def _accuracy(result: PruneRecord) -> Chart:
    """Draw accuracy over the density on a logarithmic axis, which spreads the low densities."""
    percent, unit = (100.0, " %") if result.metric == "accuracy" else (1.0, "")
    left = max(1 - result.sparsity, 0.5 / result.size)
    after = percent * result.accuracy_after
    ordered = sorted(result.curve, key=lambda point: point.sparsity)
    curves = {"cut at once, not fine-tuned": [(100 * (1 - point.sparsity), percent * point.value) for point in ordered]}
    if len(result.points) > 1:
        curves["after each cut"] = [(100 * (1 - point.sparsity), percent * point.value) for point in result.points]
    curves[f"result: {after:.4g}{unit} at {100 * result.sparsity:.4g} % zeros"] = [(100 * left, after)]
    densities = [x for line in curves.values() for x, _ in line if x > 0]
    before = percent * result.accuracy_before
    curves["model as given"] = [(x, before) for x in (max(densities), min(densities))]
    title = f"{result.metric}{unit} on {result.measured_on}"
    name = "weights left, %"
    return curve_chart(curves, title=title, name=name, falling=True, logarithmic=(True, False))


def _layers(result: PruneRecord) -> Chart:
    """Draw the fraction of zeros in each tensor, with the number of remaining weights as a note."""
    largest = sorted(result.layers, key=lambda row: -row.size)[:_MOST_LAYERS]
    shown = [row for row in result.layers if row in largest]
    some = f" ({len(shown)} largest of {len(result.layers)})" if len(shown) < len(result.layers) else ""
    notes = {row.name: f"{row.non_zeros:,} left of {row.size:,}" for row in shown}
    return bar_chart({row.name: row.sparsity for row in shown}, title=f"sparsity per layer{some}", notes=notes)


def _weights(result: PruneRecord) -> Chart:
    """Draw histograms of all weights before, and of the non-zero weights after, on a logarithmic axis."""
    before, after, edges = counted(result)
    centres = ((edges[1:] + edges[:-1]) / 2).tolist()
    curves = {
        "as given": list(zip(centres, before.tolist(), strict=True)),
        "as saved, without its zeros": list(zip(centres, after.tolist(), strict=True)),
    }
    return curve_chart(curves, title="number of weights", name="weight", logarithmic=(False, True))


def counted(result: PruneRecord) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the histograms of all weights before and of the non-zero weights after, and their bin edges."""
    before = np.concatenate([array.ravel() for array in result.given.values()]).astype(np.float64)
    after = np.concatenate([result.values[name].ravel() for name in result.given]).astype(np.float64)
    after = after[after != 0]
    reach = max(np.abs(before).max(initial=0.0), np.abs(after).max(initial=0.0)) or 1.0
    edges = np.linspace(-reach, reach, _BINS + 1)
    return np.histogram(before, edges)[0], np.histogram(after, edges)[0], edges
