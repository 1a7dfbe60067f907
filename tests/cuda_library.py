"""Build the CUDA library: with nvcc, or for execution of its kernels on the CPU."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TRAINED_WITH = [
    "adam(lr=0.05)",
    "adagrad",
    "adamw",
    "lamb",
    "lion",
    "momentum(lr=0.1)",
    "rmsprop",
    "sgd(lr=0.1, momentum=0.9)",
    "ssgd(lr=0.1)",
]
"""An optimizer of each kind, for trainings that are compared with the CPU's."""


@functools.cache
def built(how: str, architectures: str = "") -> Path:
    """The library, built as ONNXTRAIN_CUDA says; a test that cannot have it here is skipped with the reason."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs CMake and a compiler for C++20")
    if how == "ON" and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc, the compiler for CUDA")
    folder = Path(tempfile.mkdtemp(prefix=f"cuda-{how}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = [f"-DONNXTRAIN_CUDA={how}", *([f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"] if architectures else [])]
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, *options],
        ["cmake", "--build", folder, "--target", "onnxtrain_cuda", "-j2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (library,) = (folder / "native" / "cuda").glob("libonnxtrain_cuda.*")
    return library
