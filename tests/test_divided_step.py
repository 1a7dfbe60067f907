"""The benchmark that splits the backward pass into sessions: bit-identical to one session."""

import sys
from pathlib import Path

import numpy as np
import pytest

import onnxtrain
from onnxtrain.runtime.native import kernels_available
from onnxtrain.training.executors import data_parallel as buckets

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import divided_step


@pytest.mark.skipif(not kernels_available(), reason="gradients are announced by a native operator")
@pytest.mark.parametrize("count", [2, 3])
def test_several_sessions_compute_the_same_as_one(monkeypatch, count):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 16 * 16)
    model = onnxtrain.examples.mlp((8, 16, 16, 16, 4))
    rng = np.random.default_rng(0)
    whole, cut = divided_step.trainer(model), divided_step.trainer(model)
    feeds = {"input": rng.normal(size=(6, 8)).astype(np.float32), whole.objective.names.target: np.arange(6) % 4}
    steps, pieces = divided_step.divided_steps(whole), divided_step.CutStep(cut, count)
    assert len(pieces._pieces) == count
    for _ in range(3):
        assert pieces.step(feeds) == steps.step(feeds, divided_step.LEARNING_RATE)
    assert pieces.bytes_between >= 4 * 6 * 16  # an activation at least
    for name in steps.checkpoint_names:
        np.testing.assert_array_equal(pieces._states[name], steps.states[name], err_msg=name)
