"""Whole trainings on a GPU: losses and states equal the CPU's within the rounding of other sums."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import onnxtrain
from cuda_library import TRAINED_WITH
from onnxtrain.errors import OptionError
from onnxtrain.runtime.options import CUDA, RuntimeOptions

OPTIONS = [
    {},
    {"clip_norm": 0.1},
    {"accumulate": 3},
    {"groups": [onnxtrain.Group("*.bias", lr_scale=0.5)]},
]
X, Y = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3

needs_gpu = pytest.mark.skipif(
    CUDA not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu and a GPU"
)
kernels = pytest.mark.parametrize("kernels", [None, False], ids=["kernels", "standard"])


def trainer(provider, optimizer, model=None, *, kernels=None, **options):
    return onnxtrain.Trainer(
        onnxtrain.examples.mlp((4, 8, 3)) if model is None else model,
        loss="softmax_cross_entropy",
        optimizer=optimizer,
        runtime=RuntimeOptions(threads=1, providers=[provider], kernels=kernels if provider != "cpu" else False),
        **options,
    )


@needs_gpu
@kernels
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "clip", "accumulate", "groups"])
@pytest.mark.parametrize("optimizer", TRAINED_WITH)
def test_training_is_that_of_the_cpu(optimizer, options, kernels):
    there, here = (trainer(name, optimizer, kernels=kernels, **options) for name in ("cuda", "cpu"))
    for _ in range(10):
        assert there.train_step(X, Y) == pytest.approx(here.train_step(X, Y), rel=1e-4)
    for name, value in there.executor.states.items():
        np.testing.assert_allclose(value, here.executor.states[name], rtol=1e-3, atol=1e-4, err_msg=name)


@needs_gpu
@kernels
def test_convolutions_are_those_of_the_cpu(kernels):
    images = np.random.default_rng(1).random((8, 1, 28, 28), np.float32)
    there, here = (trainer(name, "adam", onnxtrain.examples.lenet5(), kernels=kernels) for name in ("cuda", "cpu"))
    for _ in range(5):
        assert there.train_step(images, np.arange(8)) == pytest.approx(here.train_step(images, np.arange(8)), rel=1e-3)


@needs_gpu
def test_values_read_and_written_between_steps(tmp_path):
    """A live copy in CPU memory, a file, and a checkpoint hold the states of the device."""
    made = trainer("cuda", "adam(lr=0.05)")
    made.train_step(X, Y)
    weight = made.parameters["layer1.weight"]
    before = weight.copy()
    made.train_step(X, Y)
    assert not np.array_equal(weight, before)
    weight[...] = 0.0
    made.train_step(X, Y)
    assert np.abs(weight).max() <= 0.06
    made.save(tmp_path / "trained.onnx")
    again = trainer("cpu", "adam", str(tmp_path / "trained.onnx"))
    np.testing.assert_array_equal(again.parameters["layer1.weight"], weight)


@needs_gpu
def test_graphs_of_cuda_are_refused():
    """They repeat the first step's learning rate and count."""
    with pytest.raises(OptionError, match="enable_cuda_graph"):
        trainer(("cuda", {"enable_cuda_graph": "1"}), "adam").train_step(X, Y)
