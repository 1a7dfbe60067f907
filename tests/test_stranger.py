"""A new user's first hour: from a model and data to a tuned model and a report by two commands of the documentation."""

from __future__ import annotations

import csv
import re

import numpy as np
import onnx
import onnxruntime
import pytest

import stranger_runs
from onnxtrain.training.run_folder import FILES


@pytest.mark.parametrize("kind", ["pictures", "flowers"])
def test_two_commands(kind, tmp_path, monkeypatch, capsys):
    if kind == "pictures":
        pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    folder, truth = stranger_runs.run(kind, tmp_path)
    assert {path.name for path in folder.iterdir()} == {*FILES, "model.onnx", "model.labels.json"}
    lines = list(csv.DictReader((tmp_path / "found.csv").read_text().splitlines()))
    assert len(lines) == len(truth) == 30
    right = sum(line["label"] == label for line, label in zip(lines, truth, strict=True))
    assert right >= 27, f"{right} of 30 right"
    assert all(float(line["probability"]) == max(float(line[f"p({name})"]) for name in {*truth}) for line in lines)
    report = (folder / "report.html").read_text()
    for name in {*truth}:
        assert name in report
    assert "confusion matrix" in report
    tuned, given = onnx.load(folder / "model.onnx"), onnx.load(tmp_path / "model.onnx")
    before = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in given.graph.initializer}
    after = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tuned.graph.initializer}
    shared = [name for name in before if name in after and before[name].shape == after[name].shape]
    assert any((before[name] != after[name]).any() for name in shared)
    onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    out = capsys.readouterr().out
    assert re.search(r"report +\S*report\.html", out)
    assert np.isfinite(
        [float(row["loss"]) for row in csv.DictReader((folder / "metrics.csv").read_text().splitlines())]
    ).all()
