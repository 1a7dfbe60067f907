"""Data of every form on the command line: a CSV file, a folder of pictures."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from command_files import examples

import onnxtrain
from onnxtrain import layers

LOSS = ("--loss", "softmax_cross_entropy")
TEXTS = np.array(["cat", "dog", "owl"])


@pytest.fixture
def table(files):
    data = examples()
    rows = [f"{','.join(map(str, x))},{TEXTS[label]}" for x, label in zip(data["input"], data["label"], strict=True)]
    (files / "d.csv").write_text("\n".join(["a,b,c,d,kind", *rows]))
    return data


def test_a_csv_file_trains_is_evaluated_and_predicted(files, table, success):
    flags = ("--data", "d.csv", "--target", "kind")
    success("fit", "model.onnx", *flags, *LOSS, "--validation", "0.2", "--output", "tuned.onnx")
    assert json.loads((files / "tuned.labels.json").read_text()) == [*TEXTS]
    measured = json.loads(success("evaluate", "tuned.onnx", *flags, *LOSS, "--json").out)
    assert measured == onnxtrain.evaluate(files / "tuned.onnx", (table["input"], table["label"]), loss=LOSS[1])
    success("predict", "tuned.onnx", *flags, "--output", "p.npy")
    expected = onnxtrain.predict(files / "tuned.onnx", table["input"])
    np.testing.assert_array_equal(np.load(files / "p.npy"), expected)


def test_mistakes_say_the_flags(files, table, run):
    result = run("fit", "model.onnx", "--data", "d.csv", *LOSS)
    assert result.code == 2
    assert "say which is the target: --target kind." in " ".join(result.err.split())
    result = run("predict", "model.onnx", "--data", "d.csv", "--output", "p.npy")
    assert "leave out the target by its name: --target kind." in " ".join(result.err.split())


def test_a_folder_of_pictures(files, success):
    image = pytest.importorskip("PIL.Image")
    flat = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 1, 4, 4] image) => (float[N, 16] y) { y = Flatten(image) }'
    )
    onnx.save(onnxtrain.append(flat, layers.Linear(2)), files / "flat.onnx")
    for name, shade in (("dark", 20), ("light", 220)):
        (files / "pictures" / name).mkdir(parents=True)
        for index in range(4):
            image.new("RGB", (5, 5), (shade + index,) * 3).save(files / "pictures" / name / f"{index}.png")
    flags = ("--data", "pictures", *LOSS)
    success("fit", "flat.onnx", *flags, "--epochs", 30, "--learning-rate", 0.1, "--output", "tuned.onnx")
    measured = json.loads(success("evaluate", "tuned.onnx", *flags, "--metrics", "accuracy", "--json").out)
    assert measured["accuracy"] == 1
    success("predict", "tuned.onnx", "--data", "pictures/light", "--output", "p.npy")
    assert np.load(files / "p.npy").argmax(1).tolist() == [1] * 4
