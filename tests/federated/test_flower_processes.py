"""A federation of real processes over the loopback interface, in which clients vanish and lie."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.examples import mlp

pytest.importorskip("flwr", minversion="1.41", reason="Flower 1.41 is not installed: pip install 'onnxtrain[flower]'")
pytestmark = pytest.mark.thorough

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "federated" / "processes.py"


def _federation(*arguments):
    spec = importlib.util.spec_from_file_location("processes", _EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.federation(*arguments)


def _points(seed: int, count: int, likely: int | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    if likely is not None:
        labels = np.where(rng.random(count) < 0.8, likely, labels)
    return {"input": (np.eye(4)[labels] + 0.3 * rng.normal(size=(count, 4))).astype(np.float32), "label": labels}


@pytest.fixture
def folder(tmp_path):
    onnx.save(mlp((4, 16, 3)), tmp_path / "model.onnx")
    for part in range(3):
        np.savez(tmp_path / f"part{part}.npz", **_points(part, 2000, part))
    np.savez(tmp_path / "test.npz", **_points(9, 500))
    return tmp_path


def _history(folder: Path) -> list[dict]:
    path = folder / "history.json"
    return json.loads(path.read_text()) if path.exists() else []


def test_clients_that_vanish_and_lie(folder):
    """One client has NaN in its data from the start, one is killed after a round; the third goes on alone."""
    spoiled = _points(1, 2000, 1)
    spoiled["input"][7] = np.nan
    np.savez(folder / "part1.npz", **spoiled)
    with _federation(folder, 3, {"ROUNDS": "3", "TIMEOUT": "40"}) as processes:
        run = processes.run()
        deadline = time.monotonic() + 200
        while len(_history(folder)) < 2:
            assert run.poll() is None, processes.log("run")
            assert time.monotonic() < deadline, processes.log("run")
            time.sleep(0.05)
        os.killpg(processes.nodes[2].pid, signal.SIGKILL)
        assert run.wait(timeout=300) == 0, processes.log("run")
        log = processes.log("run")
    rows = _history(folder)
    assert [row["round"] for row in rows] == [0, 1, 2, 3], log
    assert all(any("holds nan" in reason for reason in row["left_out"]) for row in rows[1:]), rows
    assert not any("did not answer" in reason for reason in rows[1]["left_out"]), rows
    gone = [reason for row in rows[2:] for reason in row["left_out"] if "holds nan" not in reason]
    assert any("did not answer within 40 seconds" in reason or " failed: " in reason for reason in gone), rows
    assert rows[-1]["accuracy"] > rows[0]["accuracy"]
    trained = onnxtrain.evaluate(folder / "federated.onnx", folder / "test.npz", loss="softmax_cross_entropy")
    assert trained["loss"] == pytest.approx(rows[-1]["loss"])
