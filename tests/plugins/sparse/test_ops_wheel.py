"""The wheel ``onnxtrain-ops`` is built, needs onnxruntime only, and runs a compiled model."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from pruned_models import mlp, run

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling

ROOT = Path(__file__).parents[3]


@pytest.mark.slow  # it compiles all kernels
def test_the_wheel_runs_a_compiled_model(monkeypatch, tmp_path):
    for name in ("_SECONDS", "_WORTH_IT", "_WHOLE"):
        monkeypatch.setattr(compiling, name, 0.0)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    python = str(next((tmp_path / "fresh").glob("[bS]*/python*")))
    needed = [python, "-m", "pip", "install", "-q", "onnxruntime", "scikit-build-core"]
    if subprocess.run(needed, capture_output=True, check=False).returncode:
        pytest.skip("there is no package index to install onnxruntime and scikit-build-core from")
    wheels = ["--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([python, "-m", "pip", "wheel", str(ROOT / "ops"), *wheels], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("onnxtrain_ops-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        required = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert required == ["Requires-Dist: onnxruntime>=1.20"]
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True)
    onnxtrain.compile_sparse(mlp(), tmp_path / "fast.onnx")
    x = np.random.default_rng(0).standard_normal((8, 512), np.float32)
    np.save(tmp_path / "x.npy", x)
    program = (
        "import importlib.util, numpy, onnxruntime, onnxtrain_ops\n"
        "x = {'x': numpy.load('x.npy')}\n"
        "options = onnxruntime.SessionOptions()\n"
        "options.register_custom_ops_library(onnxtrain_ops.library())\n"
        "session = onnxruntime.InferenceSession('fast.onnx', options, providers=['CPUExecutionProvider'])\n"
        "numpy.save('y.npy', session.run(None, x)[0])\n"
        "numpy.save('faster.npy', onnxtrain_ops.session('fast.onnx', x).run(None, x)[0])\n"
        "assert not any(map(importlib.util.find_spec, ('onnxtrain', 'onnx', 'torch')))\n"
    )
    subprocess.run([python, "-c", program], check=True, cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    expected = run(tmp_path / "fast.onnx", {"x": x}, kernels=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.load(tmp_path / "faster.npy"), expected, rtol=1e-3, atol=1e-4)
