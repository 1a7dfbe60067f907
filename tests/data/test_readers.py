"""Readers that a path's suffix chooses: each reads what its row writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.data.opening import readers
from onnxtrain.errors import DataError

X = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
X[2, 1] = 0
LABELS = np.array([0, 2, 1, 1, 0, 2, 2])
SPEC = TensorSpec("x", np.dtype(np.float32), (None, 3))


def write_csv(path: Path) -> None:
    rows = [",".join(map(str, [*row.tolist(), label])) for row, label in zip(X, LABELS, strict=True)]
    path.write_text("\n".join(["a,b,c,kind", *rows]))


def write_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    columns = {**dict(zip("abc", X.T, strict=True)), "kind": LABELS}
    table = __import__("pyarrow").table(columns)
    pyarrow.write_table(table, path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "CsvFile": write_csv,
    "ParquetFile": write_parquet,
}
"""A function for each reader that writes the rows of X, and LABELS as the column ``kind`` where columns have names."""

SUFFIXES = {reader.__name__: reader.suffixes[0] for reader in readers() if reader.suffixes}


def test_every_reader_has_a_row():
    missing = SUFFIXES.keys() - WRITERS.keys()
    assert not missing, f"{missing} need rows in WRITERS of tests/data/test_readers.py"


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_is_read(name, tmp_path):
    path = tmp_path / f"data{SUFFIXES[name].upper()}"
    WRITERS[name](path)
    (batch,) = open_dataset(path, [SPEC], target="kind").batches(len(X))
    np.testing.assert_allclose(batch.inputs["x"], X, rtol=1e-6)
    np.testing.assert_array_equal(batch.targets, LABELS)


@pytest.mark.parametrize("name", WRITERS)
def test_other_content_is_an_error_that_names_the_file(name, tmp_path):
    path = tmp_path / f"data{SUFFIXES[name]}"
    path.write_bytes(b"\x00\xff\x01 no data")
    for wrong in (path, tmp_path / f"absent{SUFFIXES[name]}"):
        with pytest.raises(DataError, match=wrong.name):
            open_dataset(wrong, [SPEC], target="kind")
