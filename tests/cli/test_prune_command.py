"""``onnxtrain prune``: files, figures, messages."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.cli import main


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    model = onnxtrain.examples.mlp((5, 16, 3))
    onnx.save(model, "model.onnx")
    y = np.arange(90) % 3
    x = np.random.default_rng(0).normal(size=(90, 5)).astype(np.float32)
    x[np.arange(90), y] += 3
    np.savez("train.npz", **{model.graph.input[0].name: x, "label": y})
    return ["model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy"]


def test_prunes_and_says_so(files, tmp_path, capsys):
    options = ["--validation", "0.2", "--sparsity", "0.75", "--epochs", "4", "--rounds", "2", "--learning-rate", "0.05"]
    assert main(["prune", *files, *options, "--report", "report", "-o", "small.onnx", "--storage", "sparse"]) == 0
    out = capsys.readouterr().out
    for wanted in (
        "training: epoch 4 of 4",
        "cut 2 of 2: 75.00% zeros",
        "fine-tuning: epoch 3 of 3",
        "layer1.weight",
        "75.00%",
        "learning_rate=0.05",
        "alpha=0.9",
        "compression of weights: 4.0x",
        "model: small.onnx",
        "report.png",
    ):
        assert wanted in out
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        *("report.txt", "report.json", "report.png", "config.toml")
    }
    assert main(["inspect", "small.onnx"]) == 0
    assert "zeros" in capsys.readouterr().out


def test_json(files, capsys):
    options = ["--sparsity", "0.5", "--epochs", "1", "--method", "magnitude", "--optimizer", "adam", "--json"]
    assert main(["prune", *files, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["non_zeros"], found["measured_on"]) == ("magnitude", 64, "training data")
    assert found["optimizer"].startswith("Adam(")
    assert onnx.load("model-pruned.onnx").graph.name == onnx.load("model.onnx").graph.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sparsity", "1"], "sparsity is 1.0; it needs a fraction of zeros"),
        ([], "needs either --sparsity or --accuracy-drop"),
        (
            ["--accuracy-drop", "0.1"],
            "--accuracy-drop is measured on validation data, which is missing; give --validation",
        ),
        (["--sparsity", "0.5", "--freeze", "*.weight"], "nothing to prune: no parameter that is trained has rank 2"),
        (["--sparsity", "0.5", "--measure", "scad"], "'scad' cannot be a measure"),
        (["--sparsity", "0.5", "--epsilon", "0"], "epsilon is 0.0, but must be a finite number, above 0"),
        (["--sparsity", "0.5", "--measure", "p-norm", "--p", "3"], "p is 3.0, but must be"),
        (["--sparsity", "0.5", "--method", "guess"], 'Invalid value "guess" for --method'),
        (["--sparsity", "0.5", "--report", "nowhere/report"], "there is no folder 'nowhere'"),
    ],
)
def test_bad_input(files, options, message, capsys):
    assert main(["prune", *files, *options]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_quiet_prints_nothing(files, run):
    found = run(
        "prune", "model.onnx", "--data", "train.npz", "--loss", "cross_entropy", "--sparsity", "0.5", "--epochs", "1",
        "--fine-tune-epochs", "1", "--quiet",
    )  # fmt: skip
    assert (found.code, found.out, found.err) == (0, "", "")
