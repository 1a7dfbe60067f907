"""A column that names the rows: no input of the model, and written beside the predictions."""

from __future__ import annotations

import csv

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.cli import main

X, Y = (array[:40] for array in onnxtrain.examples.points())
IDS = [f"{number:05}" for number in range(100, 140)]  # texts, whose zeros stay
KINDS = np.array(["iris", "rose", "mallow"])[Y]
FIT = ("--target", "kind", "--loss", "cross_entropy", "--epochs", 1, "--output", "tuned.onnx", "--quiet")


def write(path, ids=IDS, name="customer", kinds=KINDS):
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*"ab", *([] if ids is None else [name]), *"cd", *([] if kinds is None else ["kind"])])
        for number, row in enumerate(X):
            own, kind = ([] if ids is None else [ids[number]]), ([] if kinds is None else [kinds[number]])
            rows.writerow([*row[:2], *own, *row[2:], *kind])


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), "model.onnx")
    write("train.csv")
    write("plain.csv", ids=None)
    write("new.csv", kinds=None)
    return tmp_path


def call(*arguments):
    return main([str(argument) for argument in arguments])


def test_ids_are_no_inputs_and_stand_beside_the_predictions():
    assert call("fit", "model.onnx", "--data", "train.csv", "--id", "customer", *FIT) == 0
    trained = onnx.load("tuned.onnx").SerializeToString()
    assert call("predict", "tuned.onnx", "--data", "new.csv", "--id", "customer", "--output", "found.csv") == 0
    with open("found.csv", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["customer"] for row in found] == IDS
    scores = onnxtrain.predict("tuned.onnx", X)
    assert [row["label"] for row in found] == [sorted({*KINDS})[index] for index in scores.argmax(1)]
    assert call("fit", "model.onnx", "--data", "plain.csv", *FIT) == 0
    assert onnx.load("tuned.onnx").SerializeToString() == trained


def test_ids_of_parquet_keep_their_type():
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    large = 2**60 + np.arange(len(X))
    parquet.write_table(arrow.table({"row": large, **dict(zip("abcd", X.T, strict=True))}), "new.parquet")
    assert call("predict", "model.onnx", "--data", "new.parquet", "--id", "row", "--output", "found.parquet") == 0
    assert parquet.read_table("found.parquet")["row"].to_pylist() == large.tolist()


@pytest.mark.parametrize(
    ("data", "column", "sentence"),
    [
        ("plain.csv", "customer", "'plain.csv' has no column 'customer'"),
        ("arrays.npz", "customer", "--id is 'customer', but 'arrays.npz' is read as arrays"),
        ("label.csv", "label", "the rows are named by the column 'label', which predictions have, too"),
    ],
)
def test_ids_that_are_not_there_or_nobody_could_tell_apart(data, column, sentence, capsys):
    np.savez("arrays.npz", input=X)
    write("label.csv", name="label", kinds=None)
    options = ("--id", column, "--probabilities", "--output", "found.csv")
    assert call("predict", "model.onnx", "--data", data, *options) == 2
    assert sentence in capsys.readouterr().err
