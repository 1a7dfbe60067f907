from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from onnxtrain.training import demo
from onnxtrain.training.examples import digits_cnn

pytest.importorskip("sklearn")


def test_reaches_its_goal_and_checks_the_file(run, tmp_path):
    result = run("demo")
    assert result.code == 0, result.out + result.err
    assert result.err == ""
    folder = tmp_path / "onnxtrain-demo"
    assert {path.name for path in folder.iterdir()} == {"digits.onnx", "digits-tuned.onnx", "curve.png"}
    accuracy = re.search(r"ok +accuracy ([\d.]+)% on held-out images, 97% needed", result.out)
    assert accuracy
    found = demo.check_file(folder / "digits.onnx", folder / "digits-tuned.onnx", demo.load_digits())
    assert found.accuracy >= 0.97
    assert f"{found.accuracy:.2%}" == f"{accuracy[1]}%"
    assert "ok     plain onnxruntime and the training agree" in result.out
    assert "ok     all 8 trained initializers changed, and nothing else in the file" in result.out


def test_a_goal_that_is_not_reached_is_reported(run, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setattr(demo, "GOAL", 0.9999)
    result = run("demo", "--folder", tmp_path / "somewhere" / "else")
    assert result.code == 1
    assert "FAILED accuracy" in result.out
    assert result.err == "The demonstration did not reach its goal; see FAILED above.\n"
    assert (tmp_path / "somewhere" / "else" / "curve.png").is_file()


def test_the_check_notices_other_changes(tmp_path):
    model = digits_cnn()
    onnx.save(model, tmp_path / "a.onnx")
    model.doc_string = "changed"
    onnx.save(model, tmp_path / "b.onnx")
    digits = demo.load_digits()
    assert demo.check_file(tmp_path / "a.onnx", tmp_path / "a.onnx", digits).unchanged
    found = demo.check_file(tmp_path / "a.onnx", tmp_path / "b.onnx", digits)
    assert (found.unchanged, found.trained) == (False, ())
    assert found.accuracy < 0.5  # random weights


def test_digits_are_split_by_class():
    digits = demo.load_digits()
    assert digits.train_images.shape == (1347, 1, 8, 8)
    assert digits.test_images.shape == (450, 1, 8, 8)
    assert (digits.train_images.min(), digits.train_images.max()) == (0.0, 1.0)
    shares = [np.bincount(labels) / len(labels) for labels in (digits.train_labels, digits.test_labels)]
    np.testing.assert_allclose(*shares, atol=0.005)


def test_needs_scikit_learn(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    result = run("demo")
    assert result.code == 2
    assert "needs scikit-learn for its images, which is not installed; install it with pip install" in result.err


def test_the_folder_cannot_be_made(run, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("demo", "--folder", "file/folder")
    assert result.code == 2
    assert "--folder is 'file/folder', which cannot be made: Not a directory; choose another" in result.err


def test_without_matplotlib_the_curve_is_text(run, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 2)
    monkeypatch.setattr("onnxtrain.training.report.charts.matplotlib_available", lambda: False)
    result = run("demo")
    assert "There is no PNG of the training curve, because matplotlib is not installed: pip install" in result.out
    assert "epoch, * training loss, o validation loss" in result.out
    assert not (tmp_path / "onnxtrain-demo" / "curve.png").exists()
