"""CSV files: equal to the arrays in them, and one sentence for every misfit."""

import csv
import logging
import subprocess
import sys

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.data import CsvFile, TensorSpec, labels, open_dataset
from onnxtrain.data import files as array_files
from onnxtrain.errors import DataError
from peak_memory import PEAK
from sentences import raises_sentence

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
LABELS = RNG.permutation(12) % 3
TEXTS = np.array(["bird", "cat", "dög"])[LABELS]
NAMES = ["a", "b", "c", "d"]
LOSS = "softmax_cross_entropy"
FEATURES = TensorSpec("input", np.dtype(np.float32), ("N", 4))


def write(path, columns, **options):
    encoding = options.pop("encoding", "utf-8")
    decimal = options.pop("decimal", ".")
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, **options)
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow([str(cell).replace(".", decimal) for cell in row])
    return path


def table(**more):
    return {name: X[:, index] for index, name in enumerate(NAMES)} | more


def read(path, specs=(FEATURES,), **options):
    (batch,) = open_dataset(path, specs, **options).batches(1000)
    return batch


def trainer():
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)


def test_training_on_a_file_equals_training_on_its_arrays(tmp_path):
    path = write(tmp_path / "d.csv", table(species=TEXTS))
    ours, theirs = trainer(), trainer()
    rows = ours.fit(path, target="species", epochs=2, batch_size=5, validation=0.3).rows
    assert rows == theirs.fit(X, TEXTS, epochs=2, batch_size=5, validation=0.3).rows
    assert ours.labels == ("bird", "cat", "dög")
    assert ours.evaluate(str(path), target="species") == theirs.evaluate(X, TEXTS)
    np.testing.assert_array_equal(ours.predict(path, target="species"), theirs.predict(X))
    ours.save(tmp_path / "tuned.onnx")
    measured = onnxtrain.evaluate(tmp_path / "tuned.onnx", path, target="species", loss=LOSS)
    assert measured == onnxtrain.evaluate(tmp_path / "tuned.onnx", (X, TEXTS), loss=LOSS)
    features = write(tmp_path / "features.csv", table())
    np.testing.assert_array_equal(onnxtrain.predict(tmp_path / "tuned.onnx", features), ours.predict(X))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delimiter": ";"},
        {"delimiter": ";", "decimal": ","},
        {"delimiter": "\t"},
        {"delimiter": "|"},
        {"encoding": "utf-8-sig"},
        {"encoding": "utf-16"},
        {"encoding": "utf-32"},
        {"encoding": "latin-1"},
        {"lineterminator": "\n\n"},
        {"quoting": csv.QUOTE_ALL},
        {"quoting": csv.QUOTE_ALL, "decimal": ","},
    ],
    ids=str,
)
def test_all_ways_to_write_the_same(tmp_path, options):
    path = write(tmp_path / "d.csv", table(**{"größe": TEXTS}), **options)
    quoted_commas = options == {"quoting": csv.QUOTE_ALL, "decimal": ","}
    found = read(CsvFile(path, decimal=",") if quoted_commas else path, target="größe")
    np.testing.assert_array_equal(found.inputs["input"], X)
    np.testing.assert_array_equal(found.targets, TEXTS)


def test_what_is_given_is_not_guessed(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("a:b,c\n1,5:2\n", encoding="cp037")
    spec = TensorSpec("input", np.dtype(np.float32), ("N", None))
    found = read(CsvFile(path, delimiter=":", encoding="cp037", decimal=","), [spec], target="b,c")
    assert (found.inputs["input"].tolist(), found.targets.tolist()) == ([[1.5]], [2])


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["2", "-1"], np.array([2, -1])),
        (["2", "1.5"], np.array([2, 1.5])),
        (["1e3", "2"], np.array([1e3, 2])),
        (["x ", " 1"], np.array(["x", "1"])),
    ],
)
def test_types_of_targets(tmp_path, cells, expected):
    targets = open_dataset(write(tmp_path / "d.csv", {**table(), "y": cells * 6}), [FEATURES], target="y").targets
    assert targets.dtype == expected.dtype
    np.testing.assert_array_equal(targets, np.tile(expected, 6))


def test_columns_go_to_inputs_by_name_and_type(tmp_path):
    path = write(
        tmp_path / "d.csv",
        {"y": [0, 1], "word": ["a, b", ""], "id": [2**53 + 1, 7], "flag": ["True", "0"], "weight": [0.5, 2]},
    )
    specs = [
        TensorSpec("weight", np.dtype(np.float16), ("N", 1)),
        TensorSpec("id", np.dtype(np.int64), ("N",)),
        TensorSpec("flag", np.dtype(bool), ("N",)),
        TensorSpec("word", np.dtype(object), ("N",)),
    ]
    found = read(path, specs, target="y")
    assert {name: array.tolist() for name, array in found.inputs.items()} == {
        "weight": [[0.5], [2.0]],
        "id": [2**53 + 1, 7],
        "flag": [True, False],
        "word": ["a, b", ""],
    }
    assert found.targets.tolist() == [0, 1]


def test_a_file_larger_than_memory_is_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "MEMORY_BYTES", 100)
    monkeypatch.setattr("onnxtrain.data.csv_file._BLOCK_CELLS", 10)
    data = open_dataset(write(tmp_path / "d.csv", table(y=LABELS)), [FEATURES], target="y")
    (batch,) = data.batches(20)
    assert isinstance(data.values("input"), np.memmap)
    np.testing.assert_array_equal(batch.inputs["input"], X)
    np.testing.assert_array_equal(batch.targets, LABELS)
    (shuffled,) = data.batches(20, shuffle=True)
    order = np.argsort(shuffled.inputs["input"][:, 0])
    np.testing.assert_array_equal(shuffled.inputs["input"][order], X[np.argsort(X[:, 0])])


def test_texts_of_a_file_larger_than_memory_are_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "MEMORY_BYTES", 30)
    monkeypatch.setattr("onnxtrain.data.csv_file._BLOCK_CELLS", 10)
    monkeypatch.setattr(labels, "_BLOCK", 3)
    names = np.array(["violet", "red", "blue"])[LABELS % 3]
    data = open_dataset(write(tmp_path / "d.csv", table(y=names)), [FEATURES], target="y")
    assert isinstance(data.targets, np.memmap)
    np.testing.assert_array_equal(data.targets, names)
    found = labels.learn_labels(data.targets, 3)
    assert found == tuple(sorted(set(names.tolist())))
    np.testing.assert_array_equal(labels.to_indices(data.targets, found), [found.index(name) for name in names])
    with raises_sentence("unknown_label", what="targets", got="violet", wanted=["blue", "red"]):
        labels.to_indices(np.array(["red", "blue", "red", "violet"]), ("blue", "red"))
    numbers = np.array([7, 3, -100, 7])  # -100 where a number was missing
    np.testing.assert_array_equal(labels.to_indices(numbers, ("3", "7"), -100), [1, 0, -100, 1])
    np.testing.assert_array_equal(labels.to_indices(numbers, ("-100", "3", "7"), -100), [2, 1, 0, 2])


def test_latin_1_gets_a_notice(tmp_path, caplog):
    path = write(tmp_path / "d.csv", table(y=TEXTS), encoding="latin-1")
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        read(path, target="y")
    assert "is not in UTF-8; it is read as Latin-1" in caplog.text


HEADER = "a,b,c,d,y\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"d\.csv' is empty; it needs a line of column names"),
        ("\n \n", r"d\.csv' is empty"),
        (HEADER, r"has column names, but no line of data"),
        (
            "a,b,c,y\n1,2,3,0\n",
            r"has 3 columns besides the target 'y' \('a', 'b', 'c'\), but the input 'input' takes 4",
        ),
        ("a,b,c,d,e,y\n1,2,3,4,5,0\n", r"has 5 columns besides the target 'y' .* takes 4"),
        ("a,b,c,d,z\n1,2,3,4,0\n", r"has no column 'y': it has 'a', 'b', 'c', 'd', 'z'"),
        ("a,b,a,d,y\n1,2,3,4,0\n", r"has two columns 'a'"),
        (",b,c,d,y\n1,2,3,4,0\n", r"has no name for column 1 in its first line.*index=False"),
        ("1.5,2,3,4,0\n1,2,3,4,0\n", r"has only numbers in its first line \(1\.5, 2, 3, 4 \.\.\.\)"),
        (HEADER + "1,2,3,4,0\n\n1,2,3,4\n", r"line 4 of '.*d\.csv' has 4 cells, but there are 5 columns"),
        (HEADER + "1,2,3,4,0\n1,,3,4,0\n", r"line 3 of '.*d\.csv' has no value in the column 'b'; fill in a number"),
        (HEADER + "1,2,3,4,0\n1,2,NA,4,0\n", r"line 3 of .* has no value \('NA'\) in the column 'c'"),
        (HEADER + "1,2,nan,4,0\n", r"line 2 of .* has no value \('nan'\) in the column 'c'"),
        (HEADER + "1,2,inf,4,0\n", r"line 2 of .* has 'inf' in the column 'c', which needs a number\."),
        (HEADER + "1,2,3,1e39,0\n", r"has '1e39' in the column 'd', which needs a number that float32 can hold"),
        (HEADER + '"1",2,3,"a\nb",0\n', r"line 3 of .* has 'a\\nb' in the column 'd', which needs a number\."),
        (HEADER + '1,2,3,4,0\n\n"1\r\n",2,3,4,0\n1,x,3,4,0\n', r"line 6 of .* has 'x' in the column 'b'"),
        (HEADER + "1,2,2026_11,4,0\n", r"line 2 of .* has '2026_11' in the column 'c', which needs a number\."),
        (HEADER + "1,2,2026-11-22,4,0\n", r"has '2026-11-22' in the column 'c', which needs a number\."),
        (HEADER + "1,2,3,4,0\n1,2,3,4,bird\n", r"line 3 of .* has 'bird' in the column 'y', which needs a number\."),
        (HEADER + "1,2,3,4,\n", r"d\.csv': 1 of 1 targets are missing \(NaN or empty\), so that there is nothing"),
        (HEADER + "1,2,3,4,nan\n", r"d\.csv': 1 of 1 targets are missing \(NaN or empty\), so that there is nothing"),
        (HEADER + "1,2,3,4,bird\n1,2,3,4,bird\n", r"all targets have the same label, 'bird'"),
        (HEADER + "".join(f"1,2,3,4,{name}\n" for name in "pqrs"), r"4 different labels .* has 3 classes"),
        (HEADER + "1,2,3,4,3\n", r"label 3 at example 0, but labels must be 0 to 2"),
        (HEADER + '1,2,3,4,"' + "x" * 200_000, r"is not a valid CSV file: field larger .*; look for an unclosed quote"),
    ],
    ids=range(26),
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "d.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        trainer().fit(path, target="y")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a,b,c,d,y\n1,2,3,4,0\n".encode("utf-16-le")])
def test_files_that_are_not_text(tmp_path, content):
    path = tmp_path / "d.csv"
    path.write_bytes(content)
    with raises_sentence("csv_zero_bytes", what=f"'{tmp_path}/d.csv'"):
        trainer().fit(path, target="y")


def test_other_mistakes(tmp_path):
    path = write(tmp_path / "d.csv", table(y=TEXTS))
    with pytest.raises(DataError, match="say which is the target: target='y'"):
        trainer().fit(path)
    with raises_sentence("number_of_columns", what="input", got="5 columns", wanted=4, hint="target='y'"):
        trainer().predict(path)
    with pytest.raises(DataError, match=r"missing\.csv' does not exist"):
        trainer().fit(tmp_path / "missing.csv", target="y")
    with pytest.raises(DataError, match=r"is a pipe, a device or a folder"):
        read(CsvFile(tmp_path))
    known = trainer()
    known.fit(path, target="y")
    unseen = write(tmp_path / "unseen.csv", table(y=["bird", "wolf"] * 6))
    with raises_sentence("unknown_label", what="targets", got="wolf", wanted=["bird", "cat", "dög"]):
        known.evaluate(unseen, target="y")
    with raises_sentence("no_columns_for_inputs", what=["p"], got=["a", "b", "c", "d", "y"]):
        read(path, [TensorSpec(name, np.dtype(np.float32), ("N",)) for name in ("a", "p")], target="y")
    with raises_sentence("no_column_of_rank", what="image", wanted=("N", 1, 2, 2), rank=4, needed="(batch, 1, 2, 2)"):
        read(path, [TensorSpec("image", np.dtype(np.float32), ("N", 1, 2, 2))], target="y")
    alone = write(tmp_path / "alone.csv", {"y": TEXTS})
    with raises_sentence("only_target_column", what="input", got="y"):
        read(alone, [TensorSpec("input", np.dtype(np.float32), ("N", None))], target="y")
    with raises_sentence("csv_cell", what="a", got="0.12573022", wanted="an integer that int64 can hold"):
        read(path, [TensorSpec("a", np.dtype(np.int64), ("N",))], target="y")
    with raises_sentence("csv_cell", what="a", got="0.12573022", wanted="true or false"):
        read(path, [TensorSpec("a", np.dtype(bool), ("N",))], target="y")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delimiter": ",,"}, "delimiter is ',,'; it must be one character"),
        ({"decimal": ":"}, "decimal is ':'; it must be '.' or ','"),
        ({"encoding": "utf-9"}, "encoding is 'utf-9', which is not a text encoding of Python"),
        ({"encoding": "base64"}, "encoding is 'base64', which is not a text encoding"),
        ({"encoding": "ascii"}, r"is not in the encoding ascii \(.* at byte \d+\); name its encoding"),
    ],
)
def test_bad_settings(tmp_path, options, message):
    path = write(tmp_path / "d.csv", table(y=TEXTS))
    with pytest.raises(DataError, match=message):
        read(CsvFile(path, **options), target="y")


MEASURE = f"""{PEAK}
import sys
import numpy as np
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.data import files as array_files

array_files.MEMORY_BYTES = 2**20
spec = TensorSpec("input", np.dtype(np.float32), ("N", 100))
open_dataset(sys.argv[1], [spec], target="y", validate=False)  # imports, blocks
before = peak()
data = open_dataset(sys.argv[2], [spec], target="y", validate=False)
total = sum(batch.inputs["input"].sum(dtype=np.float64) for batch in data.batches(1000))
print(data.size, total, peak() - before)
"""


@pytest.mark.slow
def test_a_large_file_is_streamed(tmp_path):
    """Thirty times the lines take no more memory: values go to a mapped temporary file."""
    row = ",".join(f"{value:.4f}" for value in np.arange(100) / 7)
    for name, lines in (("small", 2_000), ("large", 60_000)):
        with (tmp_path / f"{name}.csv").open("w") as file:
            file.write(",".join([*(f"c{index}" for index in range(100)), "y"]) + "\n")
            file.writelines(f"{row},{index % 10}\n" for index in range(lines))
    size = (tmp_path / "large.csv").stat().st_size
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small.csv"), str(tmp_path / "large.csv")]
    count, total, grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(count) == 60_000
    assert float(total) == pytest.approx(60_000 * np.round(np.arange(100) / 7, 4).sum(), rel=1e-5)
    assert size > 40e6
    mapped = 60_000 * 100 * 4  # pages of the map count as long as there is room for them
    assert int(grown) < mapped + 8e6, f"{int(grown) / 1e6:.0f} MB for a file of {size / 1e6:.0f} MB"


def semicolons(tmp_path, *cells, name="d.csv"):
    """A file of two columns and a target, with these lines of cells."""
    (tmp_path / name).write_text("a;b;y\n" + "\n".join(cells) + "\n")
    return tmp_path / name


TWO = [TensorSpec("x", np.dtype(np.float32), ("N", 2))]


@pytest.mark.parametrize(
    "lines",
    [
        ("1,5;2;0", "1.234;3;1"),  # in one column
        ("1,5;1.234;0", "2,5;2.345;1"),  # in two
        ("0.5;2;0", "1.234,5;3;1"),
        ("1,5;2;1.234", "2,5;3;2.345"),  # in the target
        ("1,5;2;0", *("2,5;3;1",) * 70_000, "1.234;3;1"),  # far apart
    ],
)
def test_points_and_commas_in_one_file_ask_for_the_decimal_sign(tmp_path, lines):
    path = semicolons(tmp_path, *lines)
    message = r"has numbers with a point \('.*'\) and numbers with a comma \('.*'\), .*decimal=','"
    with pytest.raises(DataError, match=message):
        open_dataset(path, TWO, target="y")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("1,5;2;0", "1,234;3;1"), [[1.5, 2], [1.234, 3]]),
        (("1.5;2;0", "1.234;3;1"), [[1.5, 2], [1.234, 3]]),
        (("1;2;0", "3;4;1"), [[1, 2], [3, 4]]),
    ],
)
def test_one_mark_is_the_decimal_sign(tmp_path, lines, expected):
    (batch,) = open_dataset(semicolons(tmp_path, *lines), TWO, target="y").batches(10)
    np.testing.assert_array_equal(batch.inputs["x"], np.array(expected, np.float32))


def test_points_group_thousands_where_the_decimal_sign_is_a_comma(tmp_path):
    path = semicolons(tmp_path, "1,5;1.234;0", "-1.234.567,5;12.000;1", "1.000,5e3;0;1")
    (batch,) = open_dataset(CsvFile(path, decimal=","), TWO, target="y").batches(10)
    expected = np.array([[1.5, 1234], [-1234567.5, 12000], [1000.5e3, 0]], np.float32)
    np.testing.assert_array_equal(batch.inputs["x"], expected)
    for wrong in ("1.5", "12.34", "1.2345", "1234.567", ".5"):
        with raises_sentence("csv_cell", what="b", got=wrong, wanted="a number", where=f"line 2 of '{tmp_path}/d.csv'"):
            open_dataset(CsvFile(semicolons(tmp_path, f"1,5;{wrong};0"), decimal=","), TWO, target="y")
    with pytest.raises(DataError, match="has '1,5' in the column 'a'"):
        open_dataset(CsvFile(path, decimal="."), TWO, target="y")


def test_texts_do_not_tell_the_decimal_sign(tmp_path):
    path = semicolons(tmp_path, "1,5;2;v1.5", "2,5;3;v2.5")
    (batch,) = open_dataset(path, TWO, target="y").batches(10)
    assert batch.inputs["x"][0].tolist() == [1.5, 2]


def test_truth_values_are_numbers(tmp_path):
    (tmp_path / "d.csv").write_text("a,b,y\nTrue,0.5,1\nFALSE, 1.5,0\n true ,2,1\n")
    (batch,) = open_dataset(tmp_path / "d.csv", TWO, target="y").batches(10)
    assert batch.inputs["x"].tolist() == [[1, 0.5], [0, 1.5], [1, 2]]
    (tmp_path / "d.csv").write_text("a,b,y\ntrue,0.5,1\n2.5,1.5,0\n")
    with raises_sentence(
        "csv_cell", what="a", got="2.5", wanted="true or false, as the cells above it", where="line 3"
    ):
        open_dataset(tmp_path / "d.csv", TWO, target="y")
    (tmp_path / "d.csv").write_text("a,b,y\n2.5,0.5,1\ntrue,1.5,0\n")
    with raises_sentence("csv_cell", what="a", got="true", wanted="a number", where="line 3"):
        open_dataset(tmp_path / "d.csv", TWO, target="y")


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "mean_squared_error"])
def test_truth_values_are_targets(tmp_path, loss):
    """As numbers where the loss takes numbers, as labels where it takes classes."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2)).astype(np.float32), np.arange(20) % 2
    rows = [f"{a},{b},{['False', 'true'][label]}" for (a, b), label in zip(x, y, strict=True)]
    (tmp_path / "d.csv").write_text("\n".join(["a,b,y", *rows]))
    trainers = [onnxtrain.Trainer(examples.mlp((2, 4, 1)), loss=loss) for _ in range(2)]
    rows = trainers[0].fit(tmp_path / "d.csv", target="y", progress=False).rows
    assert rows == trainers[1].fit(x, y.astype(np.float32), progress=False).rows
    trainer = onnxtrain.Trainer(examples.mlp((2, 4, 2)), loss="cross_entropy")
    trainer.fit(tmp_path / "d.csv", target="y", progress=False)
    assert trainer.labels == ("False", "true")


@pytest.mark.parametrize("word", ["NA", "n/a", "None", "NULL"])
def test_a_missing_first_target_of_numbers_is_no_label(tmp_path, word):
    rows = [",".join(map(str, row)) for row in X[:3]]
    targets = tmp_path / "numbers.csv"
    targets.write_text("\n".join(["a,b,c,d,y", *(f"{row},{y}" for row, y in zip(rows, (word, 0, 1), strict=True))]))
    with pytest.raises(DataError, match="the target array holds nan at example 0"):
        open_dataset(targets, [FEATURES], target="y")
    missing = open_dataset(targets, [FEATURES], target="y", validate=False).targets
    np.testing.assert_array_equal(missing, [np.nan, 0, 1])
    named = tmp_path / "labels.csv"
    named.write_text("\n".join(["a,b,c,d,y", *(f"{row},{y}" for row, y in zip(rows, (word, "EU", "US"), strict=True))]))
    assert open_dataset(named, [FEATURES], target="y").targets.tolist() == [word, "EU", "US"]
