"""``fit --run`` and ``--config``: a run in one folder, repeated bit for bit, runs in parallel."""

from __future__ import annotations

import csv
import json
import re
import shlex
import tomllib

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.cli.configuration import as_toml
from onnxtrain.data import Batch
from onnxtrain.training.run_folder import FILES, GradientNorms

FIT = ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy")
FLAGS = (
    *FIT,
    "--metrics",
    "accuracy",
    "--validation",
    "0.2",
    "--epochs",
    3,
    "--schedule",
    "warmup(2)+cosine",
    "--no-shuffle",
)


def rows_of(folder):
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def test_a_run_folder_has_everything(files, success):
    out = success(*FLAGS, "--train", "layer2.*", "--run", "runs/first").out
    folder = files / "runs" / "first"
    assert {path.name for path in folder.iterdir()} == {*FILES, "model.onnx"}
    assert "report.html" in out
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    report = (folder / "report.html").read_text()
    for words in (
        shlex.join(["onnxtrain", *map(str, FLAGS)]),
        "confusion matrix",
        "layer2.weight",
        'schedule = "warmup',
    ):
        assert words.replace("'", "&#x27;").replace('"', "&quot;") in report, words
    settings = tomllib.loads((folder / "config.toml").read_text())
    assert settings["train"] == ["layer2.*"]
    assert settings["shuffle"] is False
    assert settings["learning_rate"] == onnxtrain.Adam().learning_rate  # defaults are written, too
    assert not {"run", "output", "config", "debug"} & set(settings)


def test_a_run_repeats_bit_for_bit(files, success):
    success(*FLAGS, "--run", "a")
    success("fit", "--config", "a/config.toml", "--run", "b")
    for name in ("model.onnx", "metrics.csv", "config.toml", "curves.svg"):
        assert (files / "a" / name).read_bytes() == (files / "b" / name).read_bytes(), name
    assert (files / "a" / "model.onnx").read_bytes() != (files / "model.onnx").read_bytes()


def test_the_command_line_decides_over_the_file(files, success):
    (files / "run.toml").write_text(
        'model = "no.onnx"\ndata = "train.npz"\nloss = "softmax_cross_entropy"\nepochs = 9\nbatch-size = 30\n'
        'metrics = ["accuracy"]\nvalidation = "test.npz"\nquiet = true\n'
    )
    success("fit", "model.onnx", "--config=run.toml", "--epochs", 2, "--run", "c", "--metrics", "f1")
    settings = tomllib.loads((files / "c" / "config.toml").read_text())
    assert (settings["model"], settings["epochs"], settings["batch_size"]) == ("model.onnx", 2, 30)
    assert settings["metrics"] == ["f1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", r'Unknown option: "\[epoch\]" from run.toml'),
        ('epochs = "many"', "epochs"),
        ("epochs = ", "'run.toml', which cannot be read as TOML"),
        ("[fit]\nepochs = 3", r"'run.toml' has a table \[fit\]; it needs flags only"),
        (None, "There is no file 'run.toml'; --config needs a .toml file"),
    ],
)
def test_files_that_do_not_fit(files, run, text, message):
    if text is not None:
        (files / "run.toml").write_text(text)
    result = run(*FIT, "--config", "run.toml")
    assert result.code == 2
    assert re.search(message, result.err), result.err
    assert result.err.count("\n") == 1


def test_a_folder_that_is_taken(files, run, success):
    success(*FIT, "--run", "a")
    result = run(*FIT, "--run", "a")
    assert result.code == 2
    assert "The folder 'a' holds an earlier run; give another folder, or --resume to go on" in result.err
    (files / "file").write_text("")
    assert "is a file, not a folder" in run(*FIT, "--run", "file/b").err
    before = (files / "a" / "run.json").read_bytes()
    assert run(*FIT, "--run", "a", "--curve", "a/report.html").code == 2
    assert (files / "a" / "run.json").read_bytes() == before


def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(files, success):
    flags = (*FIT, "--checkpoint", "checkpoints", "--run", "a")
    success(*flags, "--epochs", 2)
    success(*flags, "--epochs", 4, "--resume")
    success(*FIT, "--epochs", 4, "--run", "whole")
    assert (files / "a" / "metrics.csv").read_bytes() == (files / "whole" / "metrics.csv").read_bytes()
    assert (files / "a" / "model.onnx").read_bytes() == (files / "whole" / "model.onnx").read_bytes()


def test_a_figure_that_a_run_does_not_have_is_not_measured(files, success):
    success(*FLAGS, "--run", "runs/a")
    success(*FIT, "--run", "runs/b")
    out = success("runs", "runs").out
    assert out.count("not measured") == 2  # validation loss and accuracy
    assert "nan" not in out


def test_metrics_that_differ_are_shown_as_flags_take_them(files, success):
    success(*FIT, "--validation", "0.2", "--metrics", "accuracy,f1", "--run", "runs/a")
    success(*FIT, "--validation", "0.2", "--metrics", "f1", "--metrics", "accuracy", "--run", "runs/b")
    out = success("runs", "runs").out
    assert "accuracy,f1" in out
    assert "f1,accuracy" in out
    assert "['" not in out


def test_runs_are_compared(files, success, run):
    success(*FLAGS, "--run", "runs/a")
    success(*FLAGS, "--run", "runs/b", "--learning-rate", 0.1, "--seed", 3)
    found = json.loads(success("runs", "runs", "--json").out)
    assert [each["run"] for each in found] == ["runs/a", "runs/b"]
    assert [each["differs"] for each in found] == [
        {"seed": 0, "learning_rate": 0.001},
        {"seed": 3, "learning_rate": 0.1},
    ]
    rows = rows_of(files / "runs" / "b")
    assert found[1]["best"]["val_accuracy"] == max(float(row["val_accuracy"]) for row in rows)
    assert found[1]["best"]["loss"] == min(float(row["loss"]) for row in rows)
    out = success("runs", "runs/b", "runs/a").out
    assert out.index("runs/b") < out.index("runs/a")
    assert "differences" in out
    assert "differences" not in success("runs", "runs/a").out
    assert "There is no folder 'no'" in run("runs", "no").err
    (files / "empty").mkdir()
    assert "The folder 'empty' holds no run; fit writes them with --run." in run("runs", "empty").err
    (files / "runs" / "a" / "run.json").write_text("{}")
    assert "The run in 'runs/a' cannot be read: it has no 'rows'" in run("runs", "runs").err


def test_toml_reads_back():
    values = {
        "a": 'quote " slash \\ tab \t line\n del \x7f é 😀',
        "b": [1, 2.5, 1e-7, float("inf")],
        "c": True,
        "d": None,
        "e": ("x", "y"),
    }
    found = tomllib.loads(as_toml(values))
    assert found == {"a": values["a"], "b": values["b"], "c": True, "e": ["x", "y"]}


def test_from_python(tmp_path):
    """Gradient norms equal the gradient's; a regression has residuals."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 4)).astype(np.float32)
    y = (x[:, :1] * 2).astype(np.float32)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 1)), loss="mse", optimizer=onnxtrain.Adam(0.01))
    history = trainer.fit(x, y, batch_size=32, shuffle=False, epochs=2, run=tmp_path / "run")
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["finished"]
    assert [row["loss"] for row in found["rows"]] == history.column("loss")
    report = (tmp_path / "run" / "report.html").read_text()
    assert "predicted over true" in report
    assert "On the training data" in report
    expected = onnxtrain.Trainer(trainer.model(), loss="mse", optimizer=onnxtrain.SGD(1.0))
    before = expected.get_weights()
    batch = Batch({"input": x}, y, len(x))
    norms = GradientNorms(trainer).measure(trainer.weights, batch)
    expected.train_step(x, y)
    after = expected.get_weights()
    for name, array in before.items():
        np.testing.assert_allclose(norms[name], np.linalg.norm((array - after[name]).ravel()), rtol=1e-4)
        assert f"<bdi>{norms[name]:.4g}</bdi>" in report, name
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_run_without_anything_to_compare(tmp_path):
    """Batches that come once, and a loss that is an output of the model."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 2] x) => (float cost) '
        "<float[2, 1] w = {1.0, 2.0}> { y = MatMul(x, w)\n z = Mul(y, y)\n cost = ReduceMean<keepdims = 0>(z) }"
    )
    trainer = onnxtrain.Trainer(model, loss="output:cost", optimizer="sgd")
    trainer.fit(iter([{"x": np.ones((4, 2), np.float32)}]), run=tmp_path / "run")
    assert "Nothing is compared" in (tmp_path / "run" / "report.html").read_text()
