"""Frozen weights that would fill the memory stay in their file until a step reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.model_file import external

STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="reads the memory of mapped files from Linux's /proc")

WIDTH, LAYERS = 1024, 8
MEBIBYTE = 1 << 20


def mapped() -> int:
    """Bytes of mapped files in memory."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_a_trainer_of_adapters_reads_little_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "free_memory", lambda: 0)
    path = tmp_path / "wide.onnx"
    model = onnxtrain.examples.mlp((WIDTH,) * (LAYERS + 1))
    onnx.save(model, path, save_as_external_data=True, location="wide.data", size_threshold=0)
    arguments = {"loss": "softmax_cross_entropy", "optimizer": "adam"}
    onnxtrain.Trainer(path, lora=onnxtrain.Lora(rank=2), **arguments)  # modules are loaded
    before = mapped()
    trainer = onnxtrain.Trainer(path, lora=onnxtrain.Lora(rank=2), **arguments)
    assert mapped() - before < 4 * MEBIBYTE
    trainer.train_step(np.ones((2, WIDTH), np.float32), np.array([1, 2]))
    assert mapped() - before >= LAYERS * WIDTH * WIDTH * 4 - 4 * MEBIBYTE  # the step reads all 32 MiB
