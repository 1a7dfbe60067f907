"""A federation of real processes over the loopback interface, with clients that vanish or send bad weights."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.training.examples import mlp

pytest.importorskip("flwr", minversion="1.41", reason="Flower 1.41 is not installed: pip install 'onnxtrain[flower]'")
pytestmark = pytest.mark.thorough

_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "federated" / "processes.py"
_PAGE = Path(__file__).resolve().parents[3] / "docs" / "federated.md"


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
    """Read the node id of a client from its log."""
    return re.search(r"Node ID: (\d+)", processes.log(f"client{part}"))[1]


def test_clients_that_vanish_and_lie(folder):
    """One client has NaN in its data from the start, one is killed after a round; the third continues alone.

    A round lists each of the two once, under its own id, although Flower's server, which notices after a minute that a
    node is gone, answers for it in its own name.
    """
    spoiled = _points(1, 2000, 1)
    spoiled["input"][7] = np.nan
    np.savez(folder / "part1.npz", **spoiled)
    with _federation(folder, 3, {"ROUNDS": "3", "TIMEOUT": "120"}) as processes:
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
    assert " failed: " in gone, rows
    # Flower may ask the dead client once more, or no longer.
    assert all(reason.startswith((lying, dead)) for reason in rows[3]["left_out"]), rows
    assert len(rows[3]["left_out"]) <= 2, rows
    assert rows[-1]["accuracy"] > rows[0]["accuracy"]
    trained = onnxtrain.evaluate(folder / "federated.onnx", folder / "test.npz", loss="softmax_cross_entropy")
    assert trained["loss"] == pytest.approx(rows[-1]["loss"])


class _Terminals:
    """Run the commands of docs/federated.md with free ports in the test's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.page = _PAGE.read_text().split("## Quick start")[1].split("\n## ")[0]
        for port in ("8000", "9094", "9095"):
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                self.page = self.page.replace(port, str(found.getsockname()[1]))
        (folder / "home" / ".flwr").mkdir(parents=True)
        (folder / "home" / ".flwr" / "config.toml").write_text(*self.blocks("toml"))
        (make_folder,) = self.blocks("py")
        exec(make_folder.replace("/data/", f"{folder}/"), {})
        self.running: list[subprocess.Popen[bytes]] = []

    def blocks(self, language: str) -> list[str]:
        return re.findall(rf"^```{language}\n(.*?)^```$", self.page, re.MULTILINE | re.DOTALL)

    def open(self, command: str) -> subprocess.Popen[bytes]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FLWR")} | {
            "FEDERATION": str(self.folder),
            "HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "ROUNDS": "2",
        }
        with (self.folder / "terminals.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=_EXAMPLE.parents[2],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def log(self) -> str:
        return (self.folder / "terminals.log").read_text(errors="replace")

    def wait_for_server(self) -> None:
        port = int(re.search(r"127\.0\.0\.1:(\d+)", self.page)[1])
        deadline = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.2)

    def close(self) -> None:
        for process in reversed(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def terminals(tmp_path):
    opened = _Terminals(tmp_path)
    yield opened
    opened.close()


def _check_trained(folder: Path, log: str) -> None:
    rows = _history(folder)
    assert [row["round"] for row in rows] == [0, 1, 2], log
    assert [row["left_out"] for row in rows] == [[], [], []], rows
    assert rows[-1]["accuracy"] > rows[0]["accuracy"], rows
    trained = onnxtrain.evaluate(folder / "federated.onnx", folder / "test.npz", loss="softmax_cross_entropy")
    assert trained["loss"] == pytest.approx(rows[-1]["loss"])


def test_the_commands_of_the_page(terminals):
    server, *nodes, run = terminals.blocks("sh")[:4]
    terminals.open(server)
    terminals.wait_for_server()
    for node in nodes:
        terminals.open(node)
    assert terminals.open(run).wait(timeout=200) == 0, terminals.log()
    _check_trained(terminals.folder, terminals.log())


def test_the_commands_of_the_page_for_a_simulation(terminals):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'flwr[simulation]'")
    server, run = terminals.blocks("sh")[4:]
    terminals.open(server)
    terminals.wait_for_server()
    assert terminals.open(run).wait(timeout=200) == 0, terminals.log()
    _check_trained(terminals.folder, terminals.log())
