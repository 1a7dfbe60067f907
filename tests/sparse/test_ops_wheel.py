"""The wheel ``onnxtrain-ops`` is built, needs onnxruntime only, and runs a compiled model."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from pruned_models import mlp, run

import onnxtrain
from onnxtrain.sparse import compile as compiling

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # it compiles all kernels
def test_the_wheel_runs_a_compiled_model(monkeypatch, tmp_path):
    pytest.importorskip("scikit_build_core")
    monkeypatch.setattr(compiling, "_SECONDS", 0.0)
    monkeypatch.setattr(compiling, "_WORTH_IT", 0.0)
    monkeypatch.setattr(compiling, "_WHOLE", 0.0)
    command = ["pip", "wheel", str(ROOT / "ops"), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("onnxtrain_ops-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        needed = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert needed == ["Requires-Dist: onnxruntime>=1.20"]
    onnxtrain.compile_sparse(mlp(), tmp_path / "fast.onnx")
    x = np.random.default_rng(0).standard_normal((8, 512), np.float32)
    np.save(tmp_path / "x.npy", x)
    program = (
        "import sys, numpy, onnxruntime, onnxtrain_ops\n"
        "options = onnxruntime.SessionOptions()\n"
        "options.register_custom_ops_library(onnxtrain_ops.library())\n"
        "session = onnxruntime.InferenceSession('fast.onnx', options, providers=['CPUExecutionProvider'])\n"
        "numpy.save('y.npy', session.run(None, {'x': numpy.load('x.npy')})[0])\n"
        "assert 'onnxtrain' not in sys.modules and 'onnx' not in sys.modules\n"
    )
    environment = {"PYTHONPATH": str(tmp_path / "installed")}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
    expected = run(tmp_path / "fast.onnx", {"x": x}, kernels=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-5, atol=1e-5)
