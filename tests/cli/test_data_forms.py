"""Data formats on the command line: a CSV file, a folder of images."""

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
    kept = {"columns": {"input": [*"abcd"]}, "left_out": ["kind"], "labels": [*TEXTS]}
    assert json.loads((files / "tuned.labels.json").read_text()) == kept
    measured = json.loads(success("evaluate", "tuned.onnx", *flags, *LOSS, "--json").out)
    assert measured == onnxtrain.evaluate(files / "tuned.onnx", (table["input"], table["label"]), loss=LOSS[1])
    success("predict", "tuned.onnx", *flags, "--output", "p.npy")
    expected = onnxtrain.predict(files / "tuned.onnx", table["input"])
    np.testing.assert_array_equal(np.load(files / "p.npy"), expected)


def _losses(path):
    """The columns of a history that no clock is in."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    return [[cell for name, cell in zip(rows[0], row, strict=True) if "loss" in name] for row in rows]


def test_columns_in_another_order(files, table, success, run):
    """Read by name in every command, after one training with the file as it was."""
    rows = [line.split(",") for line in (files / "d.csv").read_text().splitlines()]
    order = [4, 2, 0, 3, 1]
    (files / "p.csv").write_text("\n".join(",".join(row[place] for place in order) for row in rows))
    (files / "other.csv").write_text((files / "d.csv").read_text().replace("a,b,c,d", "a,b,c,e"))
    flags = ("--target", "kind", *LOSS)
    fit = ("fit", "model.onnx", "--data", "d.csv", *flags, "--validation")
    (files / "v.csv").write_text((files / "d.csv").read_text())
    success(*fit, "v.csv", "--output", "tuned.onnx", "--run", "run", "--history", "first.csv")
    success(*fit, "p.csv", "--output", "again.onnx", "--history", "second.csv")
    assert (files / "tuned.onnx").read_bytes() == (files / "again.onnx").read_bytes()
    assert _losses(files / "first.csv") == _losses(files / "second.csv")
    assert json.loads((files / "run" / "run.json").read_text())["columns"] == {"input": [*"abcd"]}
    measured = [success("evaluate", "tuned.onnx", "--data", name, *flags, "--json").out for name in ("d.csv", "p.csv")]
    assert measured[0] == measured[1]
    for name in ("d.csv", "p.csv"):  # the target is known to be none of the inputs
        success("predict", "tuned.onnx", "--data", name, "--output", f"{name}.npy")
    np.testing.assert_array_equal(np.load(files / "d.csv.npy"), np.load(files / "p.csv.npy"))
    for command in (
        ("evaluate", "tuned.onnx", "--data", "other.csv", *flags),
        ("predict", "tuned.onnx", "--data", "other.csv", "--output", "p.npy"),
        (*fit, "other.csv", "--output", "third.onnx"),
    ):
        result = run(*command)
        assert result.code == 2
        assert "it lacks 'd' and has 'e' besides" in " ".join(result.err.split())
    success("quantize", "tuned.onnx", "--data", "p.csv", "--output", "q.onnx")
    success("evaluate", "q.onnx", "--data", "p.csv", *flags)


def test_more_classes_than_labels_are_a_hint(files, table, run):
    (files / "ten.csv").write_text((files / "d.csv").read_text())
    flags = ("--data", "ten.csv", "--target", "kind", *LOSS, "--output", "tuned.onnx")
    result = run("fit", "model.onnx", *flags, "--new-head", "10")
    assert result.code == 0
    assert "hint: The model has 10 classes, but the targets have 3 labels ('cat', 'dog', 'owl')" in result.err


def test_mistakes_say_the_flags(files, table, run):
    result = run("fit", "model.onnx", "--data", "d.csv", *LOSS)
    assert result.code == 2
    assert "say which is the target: --target kind." in " ".join(result.err.split())
    result = run("predict", "model.onnx", "--data", "d.csv", "--output", "p.npy")
    assert "name the target: --target kind." in " ".join(result.err.split())


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


def test_flags_of_the_readers(files, table, success):
    content = (files / "d.csv").read_text().replace(",", ":").replace(".", ",").replace("cat", "kätzchen")
    (files / "odd.csv").write_text(content, encoding="cp1250")
    flags = ("--data", "odd.csv", "--target", "kind", "--delimiter", ":", "--decimal", ",", "--encoding", "cp1250")
    success("fit", "model.onnx", *flags, *LOSS, "--output", "tuned.onnx")
    assert json.loads((files / "tuned.labels.json").read_text())["labels"] == ["dog", "kätzchen", "owl"]
    success("evaluate", "tuned.onnx", *flags, *LOSS)
    success("predict", "tuned.onnx", *flags, "--output", "p.npy")
    assert np.load(files / "p.npy").shape == (60, 3)


def test_pictures_that_are_normalized_and_broken(files, run):
    image = pytest.importorskip("PIL.Image")
    flat = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 1, 4, 4] image) => (float[N, 16] y) { y = Flatten(image) }'
    )
    onnx.save(flat, files / "flat.onnx")
    (files / "pictures").mkdir()
    image.new("L", (4, 4), 255).save(files / "pictures" / "a.png")
    (files / "pictures" / "b.png").write_bytes(b"")
    flags = ("predict", "flat.onnx", "--data", "pictures", "--output", "p.npy", "--mean", "0.5", "--std", "0.25")
    result = run(*flags)
    assert result.code == 2
    assert "1 of 2 images cannot be read" in result.err
    assert "correct or remove them, or skip them: --skip-broken." in result.err
    result = run(*flags, "--skip-broken")
    assert (result.code, result.err.count("\n")) == (0, 1)
    assert "1 of 2 images cannot be read and are skipped" in result.err
    np.testing.assert_allclose(np.load(files / "p.npy"), np.full((1, 16), 2.0))
    assert "--mean is 'x'; it needs numbers such as 0.5" in run(*flags[:-4], "--mean", "x").err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--data", "train.npz", "--decimal", ","),
            "--decimal is ',', but 'train.npz' is read as arrays; leave it out.",
        ),
        (("--data", "d.csv", "--target", "kind", "--skip-broken"), "--skip-broken, but 'd.csv' is read as a CSV file"),
        (
            ("--data", "d.csv", "--tokenizer", "t.json", "--delimiter", ";"),
            "--delimiter is ';', but 'd.csv' is read as texts",
        ),
    ],
)
def test_settings_for_other_files(files, table, run, flags, message):
    result = run("fit", "model.onnx", *flags, *LOSS)
    assert result.code == 2
    assert message in result.err
