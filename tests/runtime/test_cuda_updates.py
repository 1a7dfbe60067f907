"""Optimizer updates by CUDA kernels: conditions of their use, and whole trainings.

No GPU is needed: the CPU replaces the CUDA provider, and CMake builds the kernels for the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from test_device_states import FORBIDDING

import onnxtrain
from cuda_library import TRAINED_WITH, built
from onnxtrain.operators.registry import OPTIMIZERS
from onnxtrain.runtime import native
from onnxtrain.runtime.native import CudaUpdates
from onnxtrain.runtime.options import RuntimeOptions
from sentences import raises_sentence, warns_sentence

ON_CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.fixture
def has_cuda(monkeypatch):
    """Make onnxruntime report the CUDA provider."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["DmlExecutionProvider", *ON_CUDA])
    monkeypatch.delenv(native.CUDA_VARIABLE, raising=False)


class TestWhenTheyAreUsed:
    FOUND = CudaUpdates(Path("libonnxtrain_cuda.so"), frozenset({"Adam"}))

    @pytest.fixture
    def library(self, monkeypatch):
        monkeypatch.setattr(native, "find_cuda", lambda: self.FOUND)

    @pytest.mark.parametrize("kernels", [None, True])
    def test_with_cuda_first(self, has_cuda, library, kernels):
        options = RuntimeOptions(providers=["cuda"], kernels=kernels)
        assert options.updates() is self.FOUND
        assert options.uses_kernels() is False

    def test_not_with_another_provider_or_against_the_will(self, has_cuda, library):
        assert RuntimeOptions().updates() is None
        assert RuntimeOptions(providers=["dml", "cuda"]).updates() is None
        assert RuntimeOptions(providers=["cuda"], kernels=False).updates() is None
        with raises_sentence("kernels_on_provider", what="kernels", got="DmlExecutionProvider"):
            RuntimeOptions(providers=["dml"], kernels=True).uses_kernels()

    def test_without_the_library_they_are_in_standard_operators(self, has_cuda, monkeypatch, tmp_path):
        monkeypatch.setattr(native, "cuda_in_package", lambda: tmp_path / "missing.so")
        assert RuntimeOptions(providers=["cuda"]).updates() is None
        for ask in (RuntimeOptions.updates, RuntimeOptions.uses_kernels):
            with raises_sentence("cuda_library_missing", advice="build it on a machine with nvcc"):
                ask(RuntimeOptions(providers=["cuda"], kernels=True))


class TestFinding:
    def test_the_variable_names_no_file(self, monkeypatch, tmp_path):
        monkeypatch.setenv(native.CUDA_VARIABLE, str(tmp_path / "none.so"))
        with raises_sentence(
            "cuda_library_no_file", what="ONNXTRAIN_CUDA_LIBRARY", got=tmp_path / "none.so", advice="build it"
        ):
            native.find_cuda()

    @pytest.mark.parametrize("content", [b"", b"no library"])
    def test_the_variable_names_something_else(self, monkeypatch, tmp_path, content):
        (tmp_path / "other.so").write_bytes(content)
        monkeypatch.setenv(native.CUDA_VARIABLE, str(tmp_path / "other.so"))
        with raises_sentence("cuda_library_cannot_be_loaded", what="ONNXTRAIN_CUDA_LIBRARY", got=tmp_path / "other.so"):
            native.find_cuda()

    def test_the_librarys_of_the_processor_is_not_it(self, monkeypatch):
        monkeypatch.setenv(native.CUDA_VARIABLE, str(onnxtrain.custom_ops_library()))
        with raises_sentence(
            "cuda_library_cannot_be_loaded", what="ONNXTRAIN_CUDA_LIBRARY", reason="onnxtrain_cuda_operators"
        ):
            native.find_cuda()

    def test_one_of_the_package_that_cannot_be_loaded_is_warned_about(self, monkeypatch, tmp_path):
        (tmp_path / "other.so").write_bytes(b"no library")
        monkeypatch.delenv(native.CUDA_VARIABLE, raising=False)
        monkeypatch.setattr(native, "cuda_in_package", lambda: tmp_path / "other.so")
        with warns_sentence("cuda_library_not_used"):
            assert native.find_cuda() is None

    def test_none(self, monkeypatch, tmp_path):
        monkeypatch.delenv(native.CUDA_VARIABLE, raising=False)
        monkeypatch.setattr(native, "cuda_in_package", lambda: tmp_path / "none.so")
        assert native.find_cuda() is None


@pytest.fixture
def stand_in(has_cuda, monkeypatch):
    """Run sessions for CUDA on the CPU, with CUDA kernels built for the CPU; return their graphs."""
    monkeypatch.setenv(native.CUDA_VARIABLE, str(built("PROCESSOR")))
    graphs = []

    class StandIn(onnxruntime.InferenceSession):
        def __init__(self, data, settings, providers, **others):
            self._asked = providers
            graphs.append(onnx.load_model_from_string(data))
            super().__init__(data, settings, providers=["CPUExecutionProvider"], **others)

        def get_providers(self):
            return [name if isinstance(name, str) else name[0] for name in self._asked]

    monkeypatch.setattr(onnxruntime, "InferenceSession", StandIn)
    monkeypatch.setattr("onnxtrain.runtime.states.device_of", lambda providers: None)
    monkeypatch.setattr("onnxtrain.training.executors.executor.device_of", lambda providers: None)
    return graphs


def kinds(graph):
    return Counter(node.op_type for node in graph.graph.node if node.domain)


X, Y = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3


def trainer(providers, optimizer, model=None, masked=(), **options):
    made = onnxtrain.Trainer(
        onnxtrain.examples.mlp((4, 8, 3)) if model is None else model,
        loss="softmax_cross_entropy",
        optimizer=optimizer,
        runtime=RuntimeOptions(threads=1, providers=providers, kernels=None if providers == ["cuda"] else False),
        **options,
    )
    made.set_masks({name: np.random.default_rng(1).random(made.parameters[name].shape) < 0.5 for name in masked})
    return made


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "masked", "fused"),
    [
        ({}, (), False),
        ({"clip_norm": 0.1}, (), True),
        ({"accumulate": 3}, (), True),
        ({}, ("layer1.weight", "layer2.weight"), True),
        ({"groups": [onnxtrain.Group("*.bias", lr_scale=0.5)]}, (), None),
    ],
    ids=["plain", "clip", "accumulate", "masks", "groups"],
)
@pytest.mark.parametrize("optimizer", TRAINED_WITH)
def test_training_is_that_of_standard_operators(stand_in, optimizer, options, masked, fused):
    there = trainer(["cuda"], optimizer, masked=masked, **options)
    losses = [there.train_step(X, Y) for _ in range(4)]
    on_device = sum((kinds(graph) for graph in stand_in), Counter())
    here = trainer(["cpu"], optimizer, masked=masked, **options)
    assert losses == pytest.approx([here.train_step(X, Y) for _ in range(4)], rel=1e-6)
    for name, value in there.executor.states.items():
        np.testing.assert_allclose(value, here.executor.states[name], rtol=1e-5, atol=1e-7)
    assert on_device
    assert set(on_device) <= {f"{form}{name}" for name in OPTIMIZERS for form in ("", "Fused")}
    if fused is not None:
        assert any(name.startswith("Fused") for name in on_device) is fused


@pytest.mark.thorough
def test_an_operator_without_kernels_is_in_standard_operators(stand_in, monkeypatch):
    without = CudaUpdates(native.find_cuda().path, frozenset({"Adam"}))
    monkeypatch.setattr(native, "find_cuda", lambda: without)
    trainer(["cuda"], "momentum(lr=0.1)").train_step(X, Y)
    assert not kinds(stand_in[-1])


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by Linux's mprotect")
def test_nobody_but_the_session_touches_the_memory_of_states():
    """Run the program of test_device_states.py with kernel updates: access to states between runs kills it."""
    instead = """
import onnxruntime
onnxruntime.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
class StandIn(onnxruntime.InferenceSession):
    def __init__(self, data, settings, providers, **others):
        seen.append(data)
        super().__init__(data, settings, providers=["CPUExecutionProvider"], **others)
    def get_providers(self):
        return ["CUDAExecutionProvider"]
seen = []
onnxruntime.InferenceSession = StandIn
import onnxtrain
options = onnxtrain.RuntimeOptions(threads=1, providers=["cuda"], kernels=True)
"""
    program = FORBIDDING.replace("options = onnxtrain.RuntimeOptions(threads=1, kernels=False)\n", instead)
    assert program != FORBIDDING
    program += '\nassert b"Momentum" in seen[0] or b"Adam" in seen[0] or b"SGD" in seen[0]\n'
    environment = {**os.environ, native.CUDA_VARIABLE: str(built("PROCESSOR"))}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    x = np.random.default_rng(0).random((4, 1, 28, 28), np.float32)
    options = RuntimeOptions(threads=1, kernels=False)
    here = onnxtrain.Trainer(onnxtrain.examples.lenet5(), loss="softmax_cross_entropy", runtime=options)
    assert [float(loss) for loss in ran.stdout.split()] == [here.train_step(x, np.arange(4)) for _ in range(5)]
