"""``predict`` to CSV and Parquet: labels and probabilities, or raw outputs."""

from __future__ import annotations

import csv
import json

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.training.inference.prediction_table import prediction_table

FLAGS = ("predict", "model.onnx", "--data", "test.npz")


def lines(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.fixture
def scores(files):
    return onnxtrain.predict(files / "model.onnx", np.load(files / "test.npz")["input"]).astype(np.float64)


@pytest.fixture
def softmax(scores):
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def test_outputs_as_they_are(files, success, scores):
    out = success(*FLAGS, "--output", "p.csv").out
    found = lines(files / "p.csv")
    assert [*found[0]] == ["example", "logits[0]", "logits[1]", "logits[2]"]
    assert [row["example"] for row in found] == [str(index) for index in range(30)]
    values = np.array([[row[f"logits[{index}]"] for index in range(3)] for row in found], np.float32)
    np.testing.assert_array_equal(values, scores.astype(np.float32))
    assert "lines" in out
    assert "30" in out


def test_probabilities_where_they_are_asked_for(files, success, softmax):
    success(*FLAGS, "--output", "p.csv", "--probabilities")
    found = lines(files / "p.csv")
    assert [*found[0]] == ["example", "label", "probability", "p(0)", "p(1)", "p(2)"]
    np.testing.assert_allclose([[float(row[f"p({index})"]) for index in range(3)] for row in found], softmax, rtol=1e-9)
    assert [int(row["label"]) for row in found] == softmax.argmax(1).tolist()
    np.testing.assert_allclose([float(row["probability"]) for row in found], softmax.max(1), rtol=1e-9)


def test_labels_of_a_model_that_was_trained_on_texts(files, success, softmax):
    (files / "model.labels.json").write_text(json.dumps(["ant", "bee, honey", "kätzchen"]))
    success(*FLAGS, "--output", "p.csv")
    found = lines(files / "p.csv")
    assert [row["label"] for row in found] == [["ant", "bee, honey", "kätzchen"][index] for index in softmax.argmax(1)]
    assert "p(bee, honey)" in found[0]


def test_parquet(files, success, softmax):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    (files / "model.labels.json").write_text(json.dumps(["ant", "bee", "cow"]))
    success(*FLAGS, "--output", "p.parquet")
    table = parquet.read_table(files / "p.parquet")
    assert table.column_names == ["example", "label", "probability", "p(ant)", "p(bee)", "p(cow)"]
    np.testing.assert_allclose(table["p(bee)"].to_numpy(), softmax[:, 1])
    assert table["label"].to_pylist() == [["ant", "bee", "cow"][index] for index in softmax.argmax(1)]


def test_pictures_are_named(files, success):
    image = pytest.importorskip("PIL.Image")
    flat = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 1, 2, 2] image) => (float[N, 4] y) { y = Flatten(image) }'
    )
    onnx.save(flat, files / "flat.onnx")
    (files / "pictures" / "inner").mkdir(parents=True)
    image.new("L", (2, 2), 255).save(files / "pictures" / "b.png")
    image.new("L", (2, 2), 0).save(files / "pictures" / "inner" / "a.png")
    success("predict", "flat.onnx", "--data", "pictures", "--output", "p.csv")
    found = lines(files / "p.csv")
    assert [(row["file"], float(row["y[0]"])) for row in found] == [
        ("pictures/b.png", 1.0),
        ("pictures/inner/a.png", 0.0),
    ]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (np.array([[0.2, 0.8], [1.0, 0.0]]), [0.8, 0.0]),  # distributions already
        (np.array([[0.0], [np.log(3)], [-1000.0]]), [0.5, 0.75, 0.0]),
        (np.array([0.25, 1.0]), [0.25, 1.0]),
        (np.array([[1000.0, 0.0]]), [0.0]),
    ],
)
def test_forms_of_scores(scores, expected):
    found = prediction_table({"y": scores}, labels=["no", "yes"])
    np.testing.assert_allclose(found["p(yes)"], expected, atol=1e-12)
    np.testing.assert_allclose(found["p(no)"] + found["p(yes)"], 1)


def test_other_outputs():
    found = prediction_table({"a": np.arange(2.0), "b": np.arange(8).reshape(2, 2, 2), "c": np.array([["x"], ["y"]])})
    assert [*found] == ["example", "a", "b[0,0]", "b[0,1]", "b[1,0]", "b[1,1]", "c"]
    with pytest.raises(OptionError, match=r"the output 'b' has the shape \(3,\), not one entry for each example"):
        prediction_table({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(OptionError, match=r"'a' is int64 \[2, 3\]; probabilities need scores"):
        prediction_table({"a": np.zeros((2, 3), int)}, probabilities=True)
    with pytest.raises(OptionError, match="has 3 classes, but there are 4 labels"):
        prediction_table({"a": np.zeros((2, 3))}, labels=[*"wxyz"])
    fewer = prediction_table({"a": np.zeros((2, 3))}, labels=["x", "y"])
    assert [*fewer] == ["example", "label", "probability", "p(x)", "p(y)", "p(2)"]


def test_mistakes(files, run, monkeypatch):
    assert (
        "--output is 'p.txt'; it needs a file that ends in .csv, .parquet, .npz, .npy."
        in run(*FLAGS, "-o", "p.txt").err
    )
    assert "--probabilities go to a .csv or .parquet file" in run(*FLAGS, "-o", "p.npz", "--probabilities").err
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    result = run(*FLAGS, "--output", "p.parquet")
    assert result.code == 2
    assert "writing Parquet needs pyarrow; install it: pip install 'onnxtrain[parquet]'" in result.err
    assert not (files / "p.parquet").exists()
