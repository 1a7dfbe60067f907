"""Exhausted resources: descriptors, memory, disk space. One sentence, and no partial files."""

from __future__ import annotations

import re
import resource
import subprocess
import sys

import numpy as np
import onnx
import pytest

import onnxtrain

pytestmark = pytest.mark.reliability

FIT = ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--threads", "1", "--quiet")
LIMITED = """
import resource, sys
kind, limit = int(sys.argv[1]), int(sys.argv[2])
import onnx, onnxtrain.cli.app, onnxtrain.training.trainer, onnxtrain.training.checkpoints
import onnxruntime, onnx_ir
if kind == resource.RLIMIT_AS:  # beside what is mapped already
    limit += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
onnx.defs.get_all_schemas()  # where memory ends while it registers them, onnx ends the process
resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
from onnxtrain.cli import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def folder(tmp_path):
    onnx.save(onnxtrain.examples.mlp((4, 300, 300, 3)), tmp_path / "model.onnx")
    points = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    np.savez(tmp_path / "train.npz", input=points, label=points[:, :3].argmax(1))
    return tmp_path


def run(folder, kind: int, limit: int, *line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(kind), str(limit), *line],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def ended_well_or_with_a_sentence(folder, result, *written: str) -> None:
    names = {path.name for path in folder.rglob("*")}
    assert not [name for name in names if ".tmp" in name or ".writing" in name], names
    if result.returncode == 0:
        assert all(name in names for name in written), names
        return
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert re.fullmatch(r"error: [^\n]+\.\n", result.stderr), result.stderr
    assert not any(name in names for name in written)


@pytest.mark.parametrize("limit", [5, 6, 7, 9, 12])
def test_few_descriptors(limit, folder):
    line = (*FIT, "--checkpoint", "kept", "--output", "out.onnx")
    ended_well_or_with_a_sentence(folder, run(folder, resource.RLIMIT_NOFILE, limit, *line), "out.onnx")


@pytest.mark.parametrize("limit", [0, 1000, 200_000, 500_000, 1_200_000])
def test_files_that_may_not_grow(limit, folder):
    line = (*FIT, "--checkpoint", "kept", "--history", "rows.json", "--output", "out.onnx")
    result = run(folder, resource.RLIMIT_FSIZE, limit, *line)
    size = (folder / "model.onnx").stat().st_size  # checkpoints are larger: where these fail, the model is written
    assert result.returncode == (2 if limit < size else 0)
    ended_well_or_with_a_sentence(folder, result, "out.onnx")


@pytest.mark.parametrize("mebibytes", [16, 64, 256])
def test_little_memory(mebibytes, folder):
    result = run(folder, resource.RLIMIT_AS, mebibytes << 20, *FIT, "--output", "out.onnx")
    ended_well_or_with_a_sentence(folder, result, "out.onnx")
