"""Parquet and Arrow files: equal to the arrays in them, and one sentence for every misfit."""

import builtins
import datetime

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.data import files as array_files
from onnxtrain.errors import DataError
from sentences import raises_sentence

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4))
LABELS = RNG.permutation(12) % 3
TEXTS = np.array(["bird", "cat", "dog"])[LABELS]
FEATURES = TensorSpec("input", np.dtype(np.float32), ("N", 4))


def columns(**more):
    return {name: X[:, index] for index, name in enumerate("abcd")} | more


def write(path, **columns):
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=5)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=5)
    return path


def trainer():
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
@pytest.mark.parametrize("species", [TEXTS, pa.array(TEXTS).dictionary_encode()], ids=["texts", "categories"])
def test_training_on_a_file_equals_training_on_its_arrays(tmp_path, name, species, monkeypatch):
    monkeypatch.setattr(array_files, "MEMORY_BYTES", 100)
    path = write(tmp_path / name, **columns(species=species))
    ours, theirs = trainer(), trainer()
    rows = ours.fit(path, target="species", epochs=2, batch_size=5).rows
    assert rows == theirs.fit(X, TEXTS, epochs=2, batch_size=5).rows
    assert ours.labels == ("bird", "cat", "dog")
    np.testing.assert_array_equal(ours.predict(path, target="species"), theirs.predict(X))


def test_columns_go_to_inputs_by_name_and_type(tmp_path):
    path = write(
        tmp_path / "d.parquet", id=[2**53 + 1, 7], word=["a", ""], flag=[True, False], weight=[1, 2], y=[0.5, 1]
    )
    specs = [
        TensorSpec(name, np.dtype(dtype), ("N", 1))
        for name, dtype in (("weight", np.float32), ("id", np.int64), ("flag", bool), ("word", object))
    ]
    (batch,) = open_dataset(path, specs, target="y").batches(5)
    assert {name: array.ravel().tolist() for name, array in batch.inputs.items()} == {
        "weight": [1.0, 2.0],
        "id": [2**53 + 1, 7],
        "flag": [True, False],
        "word": ["a", ""],
    }
    assert batch.targets.tolist() == [0.5, 1]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (columns(), r"has no column 'y': it has 'a', 'b', 'c', 'd'"),
        (columns(y=LABELS, e=LABELS), r"has 5 columns besides the target 'y' .* takes 4"),
        ({"a": X[:, 0], "y": LABELS}, r"has 1 column besides the target 'y' .* takes 4"),
        (columns(y=LABELS, d=TEXTS), r"the column 'd' holds string, not numbers; convert it"),
        (columns(y=LABELS, d=[[1.0]] * 12), r"the column 'd' holds list<.*double>, not numbers"),
        (columns(y=LABELS, d=[datetime.date(2026, 11, 22)] * 12), r"the column 'd' holds date32\[day\], not numbers"),
        (columns(y=LABELS, d=[1.0] * 7 + [None] + [2.0] * 4), r"the column 'd' has no value at example 7"),
        (columns(y=LABELS, d=[1.0] * 7 + [np.nan] + [2.0] * 4), r"input 'input' holds nan at example 7"),
        (columns(y=["a", None] * 6), r"all targets have the same label, 'a'"),
        ({name: np.empty(0) for name in "abcdy"}, r"has columns, but no rows"),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_files_that_do_not_fit(tmp_path, name, found, message):
    with pytest.raises(DataError, match=message):
        trainer().fit(write(tmp_path / name, **found), target="y")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no such file"])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "d.parquet"
    with raises_sentence("no_parquet_file", what=f"'{tmp_path}/d.parquet'"):
        trainer().fit(path, target="y")
    path.write_bytes(content)
    with raises_sentence("not_parquet", what=f"'{tmp_path}/d.parquet'"):
        trainer().fit(path, target="y")


def test_without_pyarrow(tmp_path, monkeypatch):
    original = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "pyarrow":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with raises_sentence("pyarrow_missing_to_read"):
        open_dataset(tmp_path / "d.parquet", [FEATURES])
