"""Base models in files, beside which an adapter is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx

import onnxtrain


def tuned_beside(
    base: onnx.ModelProto, trainer: Callable[[Path], onnxtrain.Trainer], batch: tuple, folder: Path
) -> onnxtrain.Trainer:
    """Train ``base.onnx``, which stays unchanged, for five steps, and save ``tuned.onnx_adapter``."""
    path = folder / "base.onnx"
    onnx.save(base, path)
    before = path.read_bytes()
    learner = trainer(path)
    losses = [learner.train_step(*batch) for _ in range(5)]
    assert losses[-1] < losses[0]
    learner.save(folder / "tuned.onnx_adapter")
    assert path.read_bytes() == before
    return learner
