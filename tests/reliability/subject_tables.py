"""CSV, Parquet, text, tar and image files, damaged byte by byte and crafted from odd pieces."""

from __future__ import annotations

import io
import random
import tarfile
import warnings
from pathlib import Path

import numpy as np

from reliability.mutation import damage
from reliability.worker import Operations

CELLS = ("1", "0.5", "-1e30", "nan", "inf", "", "a", '"', '"a,b"', "1,5", "1.234", "9" * 400, "\u03bb", " 1", "True",
         "2020-01-01", "\x00", ";", "\t", "1e400", "a" * 5000)  # fmt: skip
ENDS = (b"\n", b"\r\n", b"\r", b"")


class Subject:
    """One file a case, read as the data of a model with one input of four numbers."""

    def __init__(self, shared: Path) -> None:
        warnings.simplefilter("ignore")
        self._parquet = self._picture = self._sound = b""
        try:
            import pyarrow
            import pyarrow.parquet

            table = pyarrow.table({**{f"c{i}": np.arange(6.0) for i in range(4)}, "label": [*"abcabc"]})
            stream = io.BytesIO()
            pyarrow.parquet.write_table(table, stream)
            self._parquet = stream.getvalue()
        except ImportError:
            pass
        try:
            from PIL import Image

            stream = io.BytesIO()
            Image.fromarray(np.zeros((2, 2), np.uint8)).save(stream, "png")
            self._picture = stream.getvalue()
        except ImportError:
            pass

        try:
            import scipy.signal  # noqa: F401 - resamples
            import soundfile

            stream = io.BytesIO()
            soundfile.write(stream, np.zeros((30, 2), np.float32), 8000, format="FLAC")
            self._sound = stream.getvalue()
        except ImportError:
            pass

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Write a file and read it."""
        generator = random.Random(f"tables {seed} {index}")
        warnings.simplefilter("ignore")
        kinds = [self._csv, self._csv, self._tar]
        kinds += [self._columns, self._shards, self._series, self._identified] if self._parquet else []
        kinds += [self._sounds] if self._sound else []
        kinds += [self._images] if self._picture else []
        kind = generator.choice(kinds)
        with np.errstate(all="ignore"):
            operations.run(kind.__name__.strip("_"), lambda: kind(generator, case))

    def _open(self, source: object, shape: tuple[int | str, ...]) -> None:
        """Read data of a plugin."""
        from onnxtrain.data import TensorSpec, open_dataset

        spec = TensorSpec("input", np.dtype(np.float32), shape)
        dataset = open_dataset(source, [spec], target="label" if "N" in shape else None)
        for batch in dataset.batches(4, shuffle=True):
            np.array(batch.inputs["input"])

    def _table(self, generator: random.Random, path: Path) -> None:
        """Write a CSV file that is mostly in order, or a Parquet file that is damaged half of the time."""
        if path.suffix == ".parquet":
            path.write_bytes(damage(self._parquet, generator) if generator.random() < 0.5 else self._parquet)
            return
        rows = [[f"c{i}" for i in range(4)] + ["label"]]
        rows += [[generator.choice(CELLS if generator.random() < 0.05 else ("1", "2")) for _ in range(5)]
                 for _ in range(generator.randrange(8))]  # fmt: skip
        path.write_bytes("\n".join(",".join(row) for row in rows).encode("utf-8", "surrogatepass"))

    def _shards(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.tables import Shards

        ending = generator.choice((".csv", ".parquet"))
        (case / "shards").mkdir()
        for number in range(3):
            self._table(generator, case / "shards" / f"{number}{ending}")
        self._open(Shards(case / "shards", buffer=3), ("N", 4))

    def _series(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.tables import Windows

        path = case / generator.choice(("d.csv", "d.parquet"))
        self._table(generator, path)
        self._open(Windows(path, generator.randrange(1, 3), 1), ("N", "T", "F"))

    def _identified(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.data import CsvFile, ParquetFile
        from onnxtrain.plugins.tables.identified import IdentifiedRows

        path = case / generator.choice(("d.csv", "d.parquet"))
        self._table(generator, path)
        source = CsvFile(path) if path.suffix == ".csv" else ParquetFile(path)
        self._open(IdentifiedRows(source, generator.choice(("c0", "c3", "absent"))), ("N", 3))

    def _sounds(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.audio import SoundFolder

        for label in "ab":
            (case / "sounds" / label).mkdir(parents=True)
            data = damage(self._sound, generator) if generator.random() < 0.7 else self._sound
            (case / "sounds" / label / "1.flac").write_bytes(data)
        self._open(SoundFolder(case / "sounds", generator.choice((None, 8000, 4000))), ("batch", 20))

    def _read(self, source: Path, shape: tuple[int | str, ...] = ("N", 4)) -> None:
        from onnxtrain.data import TensorSpec, open_dataset

        for batch in open_dataset(source, [TensorSpec("input", np.dtype(np.float32), shape)]).batches(4):
            np.array(batch.inputs["input"])

    def _csv(self, generator: random.Random, case: Path) -> None:
        end, separator = generator.choice(ENDS), generator.choice(",;\t")
        rows = [[f"c{i}" for i in range(4)] + ["label"]]
        rows += [[generator.choice((*CELLS, "1", "2", "3") if generator.random() < 0.2 else ("1", "2"))
                  for _ in range(5)] for _ in range(generator.randrange(8))]  # fmt: skip
        data = end.join(separator.join(row).encode() for row in rows)
        (case / "d.csv").write_bytes(damage(data, generator) if data and generator.random() < 0.4 else data)
        self._read(case / "d.csv")

    def _columns(self, generator: random.Random, case: Path) -> None:
        (case / "d.parquet").write_bytes(damage(self._parquet, generator))
        self._read(case / "d.parquet")

    def _images(self, generator: random.Random, case: Path) -> None:
        for label in "ab":
            (case / "images" / label).mkdir(parents=True)
            data = damage(self._picture, generator) if generator.random() < 0.5 else self._picture
            (case / "images" / label / "1.png").write_bytes(data)
        self._read(case / "images", ("N", 1, 2, 2))

    def _tar(self, generator: random.Random, case: Path) -> None:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for number in range(3):
                array = io.BytesIO()
                np.save(array, np.ones(4, np.float32))
                for name, data in ((f"{number}.npy", array.getvalue()), (f"{number}.cls", b"1")):
                    info = tarfile.TarInfo(generator.choice((name, name, name, "../up.npy", "/abs.cls", "a/" + name)))
                    data = damage(data, generator) if generator.random() < 0.2 else data
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        content = stream.getvalue()
        (case / "d.tar").write_bytes(damage(content, generator) if generator.random() < 0.5 else content)
        self._read(case / "d.tar")
