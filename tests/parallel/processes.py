"""Run scripts in several processes with mpiexec."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from child_processes import child_process
from onnxtrain.runtime.native import kernels_available

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpi4py or mpiexec is not installed: pip install mpi4py mpich",
)


needs_kernels = pytest.mark.skipif(not kernels_available(), reason="gradients are announced by a native operator")


def mpiexec(
    ranks: int, *arguments: object, timeout: float = 120, cwd: Path | str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments in several processes."""
    assert MPIEXEC is not None
    command = [MPIEXEC, "-n", str(ranks), sys.executable, *map(str, arguments)]
    with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd) as process:
        out, errors = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def script(folder: Path, text: str) -> Path:
    """Write a script to a file."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def run_script(folder: Path, ranks: int, text: str, *arguments: object, cwd: Path | str | None = None) -> str:
    """Run a script in several processes; return their output."""
    done = mpiexec(ranks, script(folder, text), *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
