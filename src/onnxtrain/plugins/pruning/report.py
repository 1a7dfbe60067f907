"""Result of a pruning, and its report: a table per layer, accuracies and sizes, as text, JSON and charts."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import tempfile
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich import box
from rich.console import Console
from rich.table import Table

from onnxtrain.data.data_names import DataNames, write_names
from onnxtrain.errors import OptionError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.writing import check_writable, write_files
from onnxtrain.plugins.pruning.options import Storage
from onnxtrain.plugins.pruning.sparse import save_sparse
from onnxtrain.plugins.pruning.thresholds import Probe
from onnxtrain.training.callbacks.history import for_json
from onnxtrain.training.report.charts import Chart, bar_chart, curve_chart, matplotlib_available, png

_CHUNK = 1 << 20
_WIDTH = 110

_BINS = 81


_MOST_LAYERS = 24
"""Most bars in a readable chart; with more tensors, the largest ones are shown."""


@dataclass(frozen=True)
class LayerRow:
    """Result of the pruning for one tensor."""

    name: str
    shape: tuple[int, ...]
    size: int
    non_zeros: int
    threshold: float
    max_scale: float | None

    @property
    def sparsity(self) -> float:
        """The fraction of zeros."""
        return 1 - self.non_zeros / self.size if self.size else 0.0


@dataclass(frozen=True)
class Point:
    """The accuracy, or the loss, at a sparsity."""

    sparsity: float
    value: float


@dataclass(frozen=True)
class Sizes:
    """Bytes of the model by storage, plain and compressed, data files included."""

    dense: int
    sparse: int
    dense_gzip: int
    sparse_gzip: int


@dataclass(frozen=True)
class PruneResult:
    """A pruned model with its record, its files and its report."""

    method: str
    optimizer: str
    allocation: str
    block: tuple[int, int]
    n_m: tuple[int, int] | None
    metric: str
    measured_on: str
    accuracy_before: float
    accuracy_trained: float
    accuracy_after: float
    layers: tuple[LayerRow, ...]
    points: tuple[Point, ...]
    curve: tuple[Point, ...]
    probes: tuple[Probe, ...]
    masks: dict[str, np.ndarray] = field(repr=False)
    given: dict[str, np.ndarray] = field(repr=False)
    values: dict[str, np.ndarray] = field(repr=False)
    file: ModelFile = field(repr=False)
    names: DataNames = field(default_factory=DataNames, repr=False)
    structure: tuple[str, ...] = ()
    removed_structures: int = 0
    multiply_adds: tuple[int, int] = (0, 0)
    speedup: float = 1.0
    stops: dict[str, str] = field(default_factory=dict)
    shortfall: str = ""

    @property
    def size(self) -> int:
        """Number of weights in the pruned tensors."""
        return sum(row.size for row in self.layers)

    @property
    def non_zeros(self) -> int:
        """Number of remaining weights."""
        return sum(row.non_zeros for row in self.layers)

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in the pruned tensors."""
        return 1 - self.non_zeros / self.size

    @property
    def compression(self) -> float:
        """Number of weights over the number of remaining ones; infinite if none remains."""
        return self.size / self.non_zeros if self.non_zeros else math.inf

    def save(self, path: str | os.PathLike[str], *, storage: Storage = "dense") -> None:
        """Write the model: dense with its zeros, or with ``sparse_initializer`` where that takes fewer bytes.

        Raises:
            ModelError: The path cannot be written.
        """
        self._write(path, storage)
        write_names(Path(path), self.names)

    def _write(self, path: str | os.PathLike[str], storage: Storage) -> None:
        if storage == "sparse":
            save_sparse(self.file, path, self.values, names=[row.name for row in self.layers])
        else:
            self.file.save(path, self.values)

    def model(self, *, storage: Storage = "dense") -> onnx.ModelProto:
        """Return the model with its weights inside."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            self._write(path, storage)
            return onnx.load(path)

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of the model, dense and sparse, plain and compressed by gzip."""
        found = {}
        for storage in ("dense", "sparse"):
            with tempfile.TemporaryDirectory() as folder:
                self._write(Path(folder) / "model.onnx", storage)
                files = [path for path in Path(folder).rglob("*") if path.is_file()]
                found[storage] = sum(path.stat().st_size for path in files)
                found[f"{storage}_gzip"] = sum(_gzip_size(path) for path in files)
        return Sizes(**found)

    def as_dict(self) -> dict[str, Any]:
        """Return all results except the weights as JSON-serializable values."""
        hidden = ("masks", "given", "values", "file", "names", "layers")
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in hidden}
        for name in ("points", "curve", "probes"):
            found[name] = [dataclasses.asdict(item) for item in found[name]]
        found["layers"] = [
            {**dataclasses.asdict(row), "shape": list(row.shape), "sparsity": row.sparsity} for row in self.layers
        ]
        own = ("size", "non_zeros", "sparsity", "compression")
        found |= {name: getattr(self, name) for name in own} | {"sizes": dataclasses.asdict(self.sizes)}
        result: dict[str, Any] = for_json(found)
        return result

    def text(self) -> str:
        """Return the report as text."""
        console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, markup=False)
        console.print(self.table())
        console.print(self.summary())
        if self.shortfall:
            console.print(self.shortfall)
        file = console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()

    def table(self) -> Table:
        """Return the table of layers for a rich console."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("weights", overflow="fold")
        for column in ("shape", "size", "non-zeros", "zeros", "threshold", "max s"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.layers:
            table.add_row(
                row.name,
                " x ".join(map(str, row.shape)),
                f"{row.size:,}",
                f"{row.non_zeros:,}",
                f"{row.sparsity:.2%}",
                f"{row.threshold:.3g}" if math.isfinite(row.threshold) else "none left",
                "-" if row.max_scale is None else f"{row.max_scale:.1f}",
            )
        table.add_row("all", "", f"{self.size:,}", f"{self.non_zeros:,}", f"{self.sparsity:.2%}", "", "", style="bold")
        return table

    def show(self, value: float) -> str:
        """Format an accuracy in percent, or a loss."""
        return f"{value:.2%}" if self.metric == "accuracy" else f"{value:.4f}"

    def form(self) -> str:
        """Return the form of the zeros in words."""
        if self.n_m is not None:
            return f"{self.n_m[0]} of {self.n_m[1]} weights"
        outputs, inputs = self.block
        blocks = "" if self.block == (1, 1) else f" of blocks of {outputs} outputs and {inputs} inputs"
        return f"{self.allocation} cut{blocks}"

    def summary(self) -> str:
        """Return accuracies and sizes as lines of text."""
        show = self.show
        lines = [
            f"method {self.method}, {self.form()}, {self.optimizer}",
            f"{self.metric} on {self.measured_on}: {show(self.accuracy_before)} as given, "
            f"{show(self.accuracy_trained)} before the last cut, {show(self.accuracy_after)} as saved",
            f"compression of weights: {self.compression:.1f}x",
            f"bytes: {self.sizes.dense:,} dense, {self.sizes.sparse:,} sparse; "
            f"{self.sizes.dense_gzip:,} and {self.sizes.sparse_gzip:,} through gzip",
            "Zeros scattered like these save bytes, not time: ONNX Runtime's CPU kernels multiply by them, and sparse "
            "initializers are made dense when a model is loaded.",
        ]
        if self.structure:
            before, after = self.multiply_adds
            lines[-1:] = [
                f"removed {self.removed_structures:,} {' and '.join(self.structure)}: {before:,} multiply-adds became "
                f"{after:,}, and the model runs {self.speedup:.2f} times as fast on this machine",
                *(f"not followed through {operator}: {reason}" for operator, reason in self.stops.items()),
            ]
        if self.probes:
            for fine_tuned, how in ((True, "with"), (False, "without")):
                probes = [probe for probe in self.probes if probe.fine_tuned == fine_tuned]
                probes.sort(key=lambda probe: probe.sparsity)
                tried = ", ".join(f"{probe.sparsity:.2%}: {show(probe.accuracy)}" for probe in probes)
                if tried:
                    lines.insert(2, f"searched (zeros: {self.metric} {how} fine-tuning): {tried}")
        return "\n".join(lines) + "\n"

    def save_report(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write ``report.txt``, ``report.json`` and, where matplotlib is installed, ``report.png``.

        Raises:
            ModelError: The folder cannot be written.
        """
        check_report_folder(folder)
        contents = {
            "report.txt": self.text().encode(),
            "report.json": (json.dumps(self.as_dict(), indent=2) + "\n").encode(),
        }
        if matplotlib_available():
            left = f"{self.non_zeros:,} of {self.size:,} weights left ({self.compression:.1f}x)"
            contents["report.png"] = png(charts(self), title=f"{self.method}: {left}")
        files = {Path(folder) / name: data for name, data in contents.items()}
        write_files(files)
        return list(files)


def check_report_folder(folder: str | os.PathLike[str]) -> None:
    """Check before a pruning that its report can be written, and create the folder."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise OptionError(f"report is {str(path)!r}, which is a file; it needs a folder.")
    if not path.parent.is_dir():
        raise OptionError(f"report is {str(path)!r}, but there is no folder {str(path.parent)!r}; make it first.")
    path.mkdir(exist_ok=True)
    for name in ("report.txt", "report.json", "report.png"):
        check_writable(path / name)


def charts(result: PruneResult) -> list[Chart]:
    """Return the charts of a result."""
    return [_accuracy(result), _layers(result), _weights(result)]


def _accuracy(result: PruneResult) -> Chart:
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


def _layers(result: PruneResult) -> Chart:
    """Draw the fraction of zeros in each tensor, with the number of remaining weights as a note."""
    largest = sorted(result.layers, key=lambda row: -row.size)[:_MOST_LAYERS]
    shown = [row for row in result.layers if row in largest]
    some = f" ({len(shown)} largest of {len(result.layers)})" if len(shown) < len(result.layers) else ""
    notes = {row.name: f"{row.non_zeros:,} left of {row.size:,}" for row in shown}
    return bar_chart({row.name: row.sparsity for row in shown}, title=f"sparsity per layer{some}", notes=notes)


def _weights(result: PruneResult) -> Chart:
    """Draw histograms of all weights before, and of the non-zero weights after, on a logarithmic axis."""
    before, after, edges = counted(result)
    centres = ((edges[1:] + edges[:-1]) / 2).tolist()
    curves = {
        "as given": list(zip(centres, before.tolist(), strict=True)),
        "as saved, without its zeros": list(zip(centres, after.tolist(), strict=True)),
    }
    return curve_chart(curves, title="number of weights", name="weight", logarithmic=(False, True))


def counted(result: PruneResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the histograms of all weights before and of the non-zero weights after, and their bin edges."""
    before = np.concatenate([array.ravel() for array in result.given.values()]).astype(np.float64)
    after = np.concatenate([result.values[name].ravel() for name in result.given]).astype(np.float64)
    after = after[after != 0]
    reach = max(np.abs(before).max(initial=0.0), np.abs(after).max(initial=0.0)) or 1.0
    edges = np.linspace(-reach, reach, _BINS + 1)
    return np.histogram(before, edges)[0], np.histogram(after, edges)[0], edges


def _gzip_size(path: Path) -> int:
    """Return the gzip size of a file in bytes, reading it in blocks."""
    packer, size = zlib.compressobj(9, wbits=31), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(packer.compress(chunk))
    return size + len(packer.flush())
