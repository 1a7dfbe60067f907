"""``onnxtrain check`` and ``--provider``: output and exit status."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from faulty_provider import add_faulty_provider
from onnxtrain.training.examples import mlp


@pytest.fixture
def faulty(monkeypatch):
    return add_faulty_provider(monkeypatch)


def test_agrees(run, tmp_path):
    onnx.save(mlp((4, 8, 3)), tmp_path / "model.onnx")
    result = run("check", tmp_path / "model.onnx", "--provider", "cpu", "--loss", "softmax_cross_entropy")
    assert result.code == 0
    assert "CPUExecutionProvider runs the step: 14 results" in result.out.replace("\n", " ")


def test_differs(run, tmp_path, faulty):
    faulty[0]["Relu"] = "Softplus"
    onnx.save(mlp((4, 8, 3)), tmp_path / "model.onnx")
    arguments = ["check", tmp_path / "model.onnx", "--provider", "faulty", "--loss", "softmax_cross_entropy"]
    result = run(*arguments)
    assert result.code == 1
    assert "operator Relu (" in result.out
    found = json.loads(run(*arguments, "--json").out)
    assert not found["agrees"]
    assert found["nodes"][0]["operator"] == "Relu"
    faulty[1].add("Gemm")
    failed = run(*arguments)
    assert failed.code == 1
    assert "FaultyExecutionProvider cannot run the step: no kernel for Gemm" in failed.out
    assert json.loads(run(*arguments, "--json").out)["largest"] is None


@pytest.mark.parametrize("command", ["fit", "prune", "evaluate", "predict", "check"])
def test_a_provider_that_is_not_there(run, tmp_path, command):
    onnx.save(mlp((4, 8, 3)), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", input=np.ones((4, 4), np.float32), label=np.arange(4) % 3)
    loss = [] if command == "predict" else ["--loss", "softmax_cross_entropy"]
    output = [] if command in ("evaluate", "check") else ["--output", tmp_path / "out.npz"]
    result = run(
        command, tmp_path / "model.onnx", "--data", tmp_path / "data.npz", *loss, *output, "--provider", "nowhere"
    )
    assert result.code == 2
    assert "The provider 'nowhere' is not available; this onnxruntime has" in result.err.replace("\n", " ")
