"""A federation of real processes over the loopback interface, in which clients vanish and lie."""

from __future__ import annotations

import importlib.util
import json
import os
import re
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


def _node_id(processes, part: int) -> str:
    """The id by which Flower knows the node of a client: its own log says it."""
    return re.search(r"Node ID: (\d+)", processes.log(f"client{part}"))[1]


@pytest.mark.parametrize("timeout", [20, 120], ids=["silence", "flower-says-so"])
def test_clients_that_vanish_and_lie(folder, timeout):
    """One client has NaN in its data from the start, one is killed after a round; the third goes on alone.

    A round lists each of the two once, under its own id: where the server stops waiting first, and where Flower notices
    first, after a minute, that the node is gone.
    """
    spoiled = _points(1, 2000, 1)
    spoiled["input"][7] = np.nan
    np.savez(folder / "part1.npz", **spoiled)
    with _federation(folder, 3, {"ROUNDS": "3", "TIMEOUT": str(timeout)}) as processes:
        run = processes.run()
        deadline = time.monotonic() + 200
        while len(_history(folder)) < 2:
            assert run.poll() is None, processes.log("run")
            assert time.monotonic() < deadline, processes.log("run")
            time.sleep(0.05)
        lying, dead = f"The client {_node_id(processes, 1)} ", f"The client {_node_id(processes, 2)} "
        os.killpg(processes.nodes[2].pid, signal.SIGKILL)
        assert run.wait(timeout=400) == 0, processes.log("run")
        log = processes.log("run")
    rows = _history(folder)
    assert [row["round"] for row in rows] == [0, 1, 2, 3], log
    assert rows[0]["left_out"] == []
    for row in rows[1:]:
        (lied,) = (reason for reason in row["left_out"] if reason.startswith(lying))
        assert "holds nan" in lied, rows
    assert len(rows[1]["left_out"]) == 1, rows
    (gone,) = (reason for reason in rows[2]["left_out"] if not reason.startswith(lying))
    assert gone.startswith(dead), rows
    assert (f"did not answer within {timeout} seconds" if timeout < 60 else " failed: ") in gone, rows
    # Flower may ask the dead client once more, or no longer.
    assert all(reason.startswith((lying, dead)) for reason in rows[3]["left_out"]), rows
    assert len(rows[3]["left_out"]) <= 2, rows
    assert rows[-1]["accuracy"] > rows[0]["accuracy"]
    trained = onnxtrain.evaluate(folder / "federated.onnx", folder / "test.npz", loss="softmax_cross_entropy")
    assert trained["loss"] == pytest.approx(rows[-1]["loss"])
