"""The generated zoo of the benchmarks: the same forty models every time, of every kind, that train as in PyTorch."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import zoo_models


def test_the_draw_is_the_committed_one() -> None:
    """Tuning must not change what is measured: a change of the zoo changes this number and every earlier table."""
    assert len(zoo_models.ZOO) == zoo_models.DRAWS * len(zoo_models.KINDS) == 40
    described = "\n".join(f"{model.name} {model.size} {model.description}" for model in zoo_models.draw().values())
    assert hashlib.sha256(described.encode()).hexdigest()[:12] == "e00911e0c653"


@pytest.mark.parametrize("name", zoo_models.ZOO)
def test_batches_fit_the_model(name: str) -> None:
    model = zoo_models.ZOO[name]
    inputs, target = model.batch(6)
    assert {key: array.shape[1:] for key, array in inputs.items()} == model.inputs
    assert set(model.integers) <= set(inputs)
    for key, bound in model.integers.items():
        assert inputs[key].dtype == np.int64
        assert inputs[key].max() < (bound or 6)
    assert target.shape == (6, *model.labels)
    again, _ = model.batch(6)
    assert all(np.array_equal(inputs[key], again[key]) for key in inputs)


@pytest.mark.torch
@pytest.mark.sweep
@pytest.mark.parametrize("name", zoo_models.ZOO)
def test_first_steps_agree_with_pytorch(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import harness
    import peers

    task = peers.Task("onnxtrain", name, 8, 1, str(tmp_path))
    peers.OnnxTrain.prepare(task)
    batch = peers.batches(task)
    ours, theirs = (
        harness.Measurement(losses=[peer.step(*batch(step)) for step in range(3)])
        for peer in (peers.OnnxTrain(task), peers.Torch(task))
    )
    assert harness.losses_differ(ours, theirs) == ""
