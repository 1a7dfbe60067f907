"""Logs and warnings: onnxtrain's are printed as a line, other libraries' with ``--debug`` only."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxtrain.training.advice import inspection


@pytest.fixture
def noisy(monkeypatch):
    """Let ``inspect`` make some noise, with a control character in it."""
    inspect = inspection.inspect

    def call(*arguments, **options):
        logging.getLogger("onnx_ir.serde").warning("theirs \x1b[31m")
        logging.getLogger("onnxtrain.training").warning("ours \x1b[31m\nof two lines")
        warnings.warn("numbers overflow", RuntimeWarning, stacklevel=1)
        return inspect(*arguments, **options)

    monkeypatch.setattr(inspection, "inspect", call)


@pytest.mark.filterwarnings("default")
def test_what_is_ours_is_a_line(noisy, files, run):
    result = run("inspect", "model.onnx")
    assert result.code == 0
    assert "warning: ours \\x1b[31m of two lines\n" in result.err
    assert "theirs" not in result.err
    assert "\x1b" not in result.err


@pytest.mark.filterwarnings("default")
def test_debug_shows_everything(noisy, files, run):
    result = run("inspect", "model.onnx", "--debug")
    assert "warning: theirs \\x1b[31m\n" in result.err
    assert "warning: numbers overflow\n" in result.err


def test_nothing_stays_behind(files, run):
    before = (logging.getLogger().handlers[:], warnings.showwarning)
    run("inspect", "model.onnx")
    assert (logging.getLogger().handlers, warnings.showwarning) == before


def test_an_attribute_that_is_not_text_does_not_print_onnx_irs_warning(files):
    model = onnx.load(files / "model.onnx")
    model.graph.node[0].attribute.append(helper.make_attribute("note", b"\xff\x1b[31m"))
    onnx.save(model, files / "model.onnx")
    result = subprocess.run(
        [sys.executable, "-m", "onnxtrain", "inspect", "model.onnx"],
        cwd=files, text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert "\x1b" not in result.stdout + result.stderr
    assert len(result.stderr.splitlines()) <= 1


def test_a_compressed_file_gets_a_notice(files, run, monkeypatch):
    monkeypatch.setattr("onnxtrain.data.files._READ_WHOLE_BYTES", 10)
    with np.load(files / "test.npz") as arrays:
        np.savez_compressed(files / "small.npz", **arrays)
    result = run("evaluate", "model.onnx", "--data", "small.npz", "--loss", "softmax_cross_entropy")
    assert result.code == 0
    assert result.err.startswith("warning: array 'input' in 'small.npz' is compressed: ")
