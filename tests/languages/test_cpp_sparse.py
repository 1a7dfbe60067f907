"""A compiled sparse model in C++: the example, built against the library of the onnxruntime wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "plugins" / "sparse"))
from pruned_models import mlp, run  # noqa: E402 - of a neighbouring folder

COMPILER = os.environ.get("CXX") or shutil.which("c++")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.thorough,  # it compiles
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    link = folder / "libonnxruntime.so.1"
    link.symlink_to(library)
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}")
    source = ROOT / "examples" / "run_sparse.cpp"
    subprocess.run([COMPILER, *flags, source, "-o", folder / "run", link, f"-Wl,-rpath,{folder}"], check=True)
    return folder / "run"


@pytest.mark.parametrize("kernels", [True, False])
def test_a_program_runs_it(kernels, program, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_SECONDS", 0.0)
    monkeypatch.setattr(compiling, "_WORTH_IT", 0.0)
    monkeypatch.setattr(compiling, "_WHOLE", 0.0)
    onnxtrain.compile_sparse(mlp(), tmp_path / "fast.onnx")
    x = np.random.default_rng(0).standard_normal((8, 512), np.float32)
    library = [onnxtrain.custom_ops_library()] if kernels else []
    command = [program, tmp_path / "fast.onnx", "x", "8", "512", *library]
    done = subprocess.run(command, input=x.tobytes(), capture_output=True, check=True)
    found = np.frombuffer(done.stdout, np.float32).reshape(8, 512)
    np.testing.assert_array_equal(found, run(tmp_path / "fast.onnx", {"x": x}, kernels=kernels))


def test_errors_are_sentences(program, tmp_path):
    command = [program, tmp_path / "missing.onnx", "x", "1", "1", tmp_path / "none.so"]
    done = subprocess.run(command, input=b"", capture_output=True, text=False, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ONNX Runtime: ")
