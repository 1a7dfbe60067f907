"""The report of a pruning as a picture: accuracy over sparsity, what is left of each layer, the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.pruning.record import PruneRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BEFORE, _AFTER, _MARK = "#94a3b8", "#2563eb", "#ea580c"
_BINS = 81
_MOST_LAYERS = 24
"""More bars than these cannot be read: then the largest tensors are shown."""


def draw(result: PruneRecord) -> Figure:
    """The figure of a result."""
    from matplotlib.figure import Figure  # not pyplot: it keeps figures, and asks for a display

    layers = min(len(result.layers), _MOST_LAYERS)
    figure = Figure(figsize=(14, max(4.0, 1.6 + 0.28 * layers)), layout="constrained")
    axes = figure.subplots(1, 3)
    _accuracy(axes[0], result)
    _layers(axes[1], result)
    _weights(axes[2], result)
    figure.suptitle(
        f"{result.method}: {result.non_zeros:,} of {result.size:,} weights left ({result.compression:.1f}x)",
        fontsize=12,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    return figure


def _accuracy(axes: Axes, result: PruneRecord) -> None:
    """Accuracy over the density, which a logarithmic axis spreads where it matters."""
    percent = 100.0 if result.metric == "accuracy" else 1.0
    ordered = sorted(result.curve, key=lambda point: point.sparsity)
    axes.plot(
        [1 - point.sparsity for point in ordered],
        [percent * point.value for point in ordered],
        color=_BEFORE,
        marker="o",
        markersize=3,
        label="cut at once, not fine-tuned",
    )
    if len(result.points) > 1:
        axes.plot(
            [1 - point.sparsity for point in result.points],
            [percent * point.value for point in result.points],
            color=_AFTER,
            marker=".",
            label="after each cut",
        )
    left = max(1 - result.sparsity, 0.5 / result.size)
    unit = " %" if result.metric == "accuracy" else ""
    axes.plot(
        [left],
        [percent * result.accuracy_after],
        color=_MARK,
        marker="*",
        markersize=13,
        linestyle="none",
        label=f"result: {percent * result.accuracy_after:.4g}{unit} at {100 * result.sparsity:.4g} % zeros",
    )
    axes.set_xscale("log")
    densities = [1 - point.sparsity for point in (*result.curve, *result.points)] + [left]
    axes.set_xlim(1.15, max(min(densities), 0.5 / result.size) / 1.6)  # dense on the left, sparse on the right
    ticks = [d for d in (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001) if d >= min(densities) / 1.6]
    axes.set_xticks(ticks, [f"{100 * (1 - d):.4g}" for d in ticks])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.axhline(percent * result.accuracy_before, color=_BEFORE, linestyle=":", linewidth=1, label="model as given")
    axes.set_xlabel("zeros, % of weights")
    axes.set_title(f"{result.metric}{unit} on {result.measured_on}", fontsize=10, loc="left")
    axes.legend(framealpha=0.9, edgecolor="white", fontsize=8, loc="lower left" if percent > 1 else "upper left")
    _plain(axes)


def _layers(axes: Axes, result: PruneRecord) -> None:
    """A bar of zeros for each tensor, with what is left written at its end."""
    rows = sorted(result.layers, key=lambda row: -row.size)[:_MOST_LAYERS]
    shown = [row for row in result.layers if row in rows]
    places = range(len(shown))
    axes.barh(places, [100.0] * len(shown), color="#e2e8f0", height=0.7)
    axes.barh(places, [100 * row.sparsity for row in shown], color=_AFTER, height=0.7)
    for place, row in zip(places, shown, strict=True):
        text = f"{row.non_zeros:,} left of {row.size:,}"
        inside = row.sparsity > 0.5  # the bar is long enough to hold the text
        axes.annotate(
            text,
            (0 if inside else 100, place),
            xytext=(4 if inside else -4, 0),
            textcoords="offset points",
            va="center",
            ha="left" if inside else "right",
            fontsize=8,
            color="white" if inside else "black",
        )
    axes.set_yticks(places, [_short(row.name) for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("zeros, % of the tensor")
    some = f" ({len(shown)} largest of {len(result.layers)})" if len(shown) < len(result.layers) else ""
    axes.set_title(f"sparsity per layer{some}", fontsize=10, loc="left")
    _plain(axes)


def _weights(axes: Axes, result: PruneRecord) -> None:
    """Weights before and what is left of them, counted on a logarithmic axis."""
    before = np.concatenate([array.ravel() for array in result.given.values()]).astype(np.float64)
    after = np.concatenate([result.values[name].ravel() for name in result.given]).astype(np.float64)
    after = after[after != 0]
    reach = max(np.abs(before).max(initial=0.0), np.abs(after).max(initial=0.0)) or 1.0
    edges = np.linspace(-reach, reach, _BINS + 1).tolist()
    axes.hist(before, bins=edges, color=_BEFORE, alpha=0.6, label="as given")
    axes.hist(after, bins=edges, color=_AFTER, histtype="step", linewidth=1.4, label="as saved, without its zeros")
    axes.set_yscale("log")
    axes.set_ylim(top=axes.get_ylim()[1] * 12)  # room for the legend
    axes.set_xlabel("weight")
    axes.set_title("number of weights", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.25, axis="both")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"...{name[-(most - 3) :]}"
