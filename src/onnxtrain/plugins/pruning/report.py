"""Report of a pruning: a table per layer, accuracies and sizes, as text, JSON and a figure."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import math
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
from rich import box
from rich.console import Console
from rich.table import Table

from onnxtrain.data.data_names import write_names
from onnxtrain.errors import OptionError
from onnxtrain.model_file.writing import AtomicFiles, check_writable
from onnxtrain.plugins.pruning.figure import charts
from onnxtrain.plugins.pruning.options import Storage
from onnxtrain.plugins.pruning.record import PruneRecord
from onnxtrain.plugins.pruning.sparse import save_sparse
from onnxtrain.plugins.pruning.thresholds import Probe
from onnxtrain.training.report.charts import matplotlib_available, png

_CHUNK = 1 << 20
_WIDTH = 110


@dataclass(frozen=True)
class Sizes:
    """Bytes of the model by storage, plain and compressed, data files included."""

    dense: int
    sparse: int
    dense_gzip: int
    sparse_gzip: int


class PruneResult(PruneRecord):
    """A pruned model with its record, its files and its report."""

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
        result: dict[str, Any] = _finite(found)
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
                probes = sorted((probe for probe in self.probes if probe.fine_tuned == fine_tuned), key=_sparsity)
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
        with AtomicFiles() as files:
            for name, data in contents.items():
                with files.create(Path(folder) / name) as file:
                    file.write(data)
        return [Path(folder) / name for name in contents]


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


def _sparsity(probe: Probe) -> float:
    return probe.sparsity


def _gzip_size(path: Path) -> int:
    """Return the gzip size of a file in bytes, reading it in blocks."""

    class Counter(io.RawIOBase):
        count = 0

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.count += len(data)
            return len(data)

    counter = Counter()
    with path.open("rb") as file, gzip.GzipFile(fileobj=counter, mode="wb", mtime=0) as stream:
        while chunk := file.read(_CHUNK):
            stream.write(chunk)
    return counter.count


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by ``None``."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
