"""The wheel's ``session`` takes the kernels where a timing at load favours them, and the dense model elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from pruned_models import mlp, run

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling
from sentences import raises_sentence

sys.path.append(str(Path(__file__).parents[3] / "ops"))

import onnxtrain_ops

X = {"x": np.random.default_rng(0).standard_normal((8, 512), np.float32)}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    for name in ("_SECONDS", "_WORTH_IT", "_WHOLE"):
        monkeypatch.setattr(compiling, name, 0.0)
    monkeypatch.setattr(compiling, "_DOUBT", 1.0)
    monkeypatch.setattr(onnxtrain_ops, "library", lambda: str(onnxtrain.custom_ops_library()))
    onnxtrain.compile_sparse(mlp(), tmp_path / "fast.onnx")
    return tmp_path / "fast.onnx"


@pytest.mark.parametrize(("sparse", "seconds"), [(True, (0.2, 0.1)), (False, (0.1, 0.2)), (False, (0.1, 0.1))])
def test_the_faster_of_both_is_taken(compiled, monkeypatch, sparse, seconds):
    made = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxtrain_ops, "_seconds", lambda one, feeds: seconds[made.index(one)])
    found = onnxtrain_ops.session(compiled, X)
    assert made.index(found) == sparse  # the dense session is made first, without the kernels
    np.testing.assert_array_equal(found.run(None, X)[0], run(compiled, X, kernels=sparse))


def test_the_timing_is_bounded(compiled, monkeypatch):
    monkeypatch.setattr(onnxtrain_ops, "_SECONDS", 0.0)
    timed = []
    monkeypatch.setattr(onnxtrain_ops, "_seconds", lambda one, feeds: timed.append(one) or 0.1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    onnxtrain_ops.session(compiled, X, options)
    assert len(timed) == 2 * 3
    monkeypatch.setattr(onnxtrain_ops, "_SECONDS", 60.0)
    timed.clear()
    onnxtrain_ops.session(compiled, X)
    assert len(timed) == 2 * 25


def test_options_of_another_session_are_refused(compiled):
    options = onnxruntime.SessionOptions()
    onnxtrain_ops.session(compiled, X, options)
    with raises_sentence("kernels_registered_twice"):
        onnxtrain_ops.session(compiled, X, options)
