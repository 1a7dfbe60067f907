"""Tables and figure of the pruning benchmark."""

from __future__ import annotations

import gzip
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from harness import table

import onnxtrain

DENSE = "dense"
METHODS = (DENSE, "magnitude", "ssgd")
DEFAULT = "default"  # prune without settings
COLOURS = {"magnitude": "#64748b", "ssgd": "#2563eb"}

PUBLISHED = [
    ["dense", "1.64", "", "0.80", ""],
    ["Han et al. 2015, magnitude", "1.59", "12x", "0.77", "12x"],
    ["Guo et al. 2016, dynamic network surgery", "1.99", "56x", "0.91", "111x"],
    ["Ullrich et al. 2017, soft weight-sharing", "1.94", "23x", "0.97", "200x"],
    ["Molchanov et al. 2017, sparse variational dropout", "1.92", "68x", "0.75", "280x"],
]


@dataclass(frozen=True)
class Outcome:
    """Result of one stage of a training.

    Attributes:
        data: Name of the data.
        model: Name of the architecture.
        method: One of ``METHODS``, or ``DEFAULT``.
        seed: Seed of the training.
        wanted: Target compression.
        compression: Achieved compression.
        error: Error in percent.
        seconds: Duration of the stage.
    """

    data: str
    model: str
    method: str
    seed: int
    wanted: int
    compression: float
    error: float
    seconds: float


def stages(outcomes: Sequence[Outcome], method: str) -> dict[int, list[Outcome]]:
    """The outcomes of a method by compression."""
    found: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.method == method:
            found.setdefault(outcome.wanted, []).append(outcome)
    return dict(sorted(found.items()))


def results(title: str, outcomes: Sequence[Outcome]) -> str:
    """A row for each method and compression of one model on one set of data."""
    rows = [
        [
            method,
            f"{np.mean([outcome.compression for outcome in group]):.1f}x",
            f"{np.mean([outcome.error for outcome in group]):.2f}",
            " ".join(f"{outcome.error:.2f}" for outcome in group),
            f"{np.mean([outcome.seconds for outcome in group]):.0f}",
        ]
        for method in (*METHODS, DEFAULT)
        for group in stages(outcomes, method).values()
    ]
    return f"{title}\n\n{table(['method', 'weights', 'error, % (mean)', 'of each seed', 'seconds'], rows)}"


def published() -> str:
    """Published results."""
    header = ["published", "LeNet-300-100 error, %", "weights", "LeNet-5 error, %", "weights"]
    return "Published on MNIST\n\n" + table(header, PUBLISHED)


def verdict_of(model: str, goal: tuple[int, float], outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    """Return whether SSGD reached a published compression and error, with a sentence."""
    compression, bound = goal
    means = {
        wanted: np.mean([outcome.error for outcome in group])
        for wanted, group in stages(outcomes, "ssgd").items()
        if wanted >= compression
    }
    said = f"Goal for {model}: {compression}x with at most {bound} % error"
    if not means:
        return f"{said}: not measured.", True
    best = max((wanted for wanted, error in means.items() if round(error, 2) <= bound), default=None)
    return f"{said}: {'missed' if best is None else f'reached, up to {best}x'}.", best is not None


def storage(path: Path, title: str) -> str:
    """File sizes and run times of a pruned model in each storage format."""
    sparse = path.with_suffix(".sparse.onnx")
    onnxtrain.pruning.save_sparse(path, sparse)
    packed = path.with_suffix(".onnx.gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    image = np.zeros((1, 1, 28, 28), np.float32)
    rows = []
    for name, file in (
        ("dense, with its zeros", path),
        ("sparse_initializer", sparse),
        ("dense, read through gzip", packed),
    ):
        data = file.read_bytes()
        loads, runs = [], []
        for _ in range(20):
            begin = time.perf_counter()
            content = gzip.decompress(file.read_bytes()) if file is packed else file.read_bytes()
            session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
            loads.append(time.perf_counter() - begin)
        feeds = {session.get_inputs()[0].name: image}
        for _ in range(200):
            begin = time.perf_counter()
            session.run(None, feeds)
            runs.append(time.perf_counter() - begin)
        zipped = "" if file is packed else f"{len(gzip.compress(data, mtime=0)):,}"
        rows.append([name, f"{len(data):,}", zipped, f"{1e3 * np.median(loads):.2f}", f"{1e6 * np.median(runs):.0f}"])
    header = ["storage", "bytes", "gzipped", "load, ms", "one image, us"]
    return f"{title}, on onnxruntime {onnxruntime.__version__}\n\n{table(header, rows)}"


def draw(outcomes: Sequence[Outcome], goals: Mapping[str, tuple[int, float]], path: Path) -> None:
    """Plot error over compression: a column per model, a row per data set."""
    from matplotlib.figure import Figure

    data = list(dict.fromkeys(outcome.data for outcome in outcomes))
    figure = Figure(figsize=(5.5 * len(goals), 4 * len(data)), layout="constrained")
    grid = figure.subplots(len(data), len(goals), squeeze=False)
    for row, name in zip(grid, data, strict=True):
        for axes, (model, goal) in zip(row, goals.items(), strict=True):
            own = [outcome for outcome in outcomes if (outcome.data, outcome.model) == (name, model)]
            if own:
                _draw_panel(axes, f"{model} on {name}", own, goal if name == data[0] else None)
            else:
                axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Any, title: str, outcomes: Sequence[Outcome], goal: tuple[int, float] | None) -> None:
    wanted: set[int] = set()
    for method, colour in COLOURS.items():
        found = stages(outcomes, method)
        wanted |= set(found)
        means = [np.mean([outcome.error for outcome in group]) for group in found.values()]
        axes.plot(list(found), means, color=colour, marker="o", label=method)
        for compression, group in found.items():
            axes.plot([compression] * len(group), [o.error for o in group], ".", color=colour, alpha=0.4)
    dense = [outcome.error for outcome in outcomes if outcome.method == DENSE]
    if dense:
        axes.axhline(np.mean(dense), color="#94a3b8", linestyle=":", label=DENSE)
    if goal is not None:
        axes.plot(*goal, marker="*", color="#ea580c", markersize=12, linestyle="none", label="published, 2017")
        wanted.add(goal[0])
    axes.set_xscale("log")
    ticks = sorted(wanted)
    axes.set_xticks(ticks, [f"{compression}x" for compression in ticks])
    axes.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
    axes.minorticks_off()
    axes.set_xlabel("all weights / non-zero weights")
    axes.set_ylabel("test error, %")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
