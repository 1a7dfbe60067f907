"""examples/server.py under load: many threads ask while one learns and saves, with FastAPI where it is installed."""

from __future__ import annotations

import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import onnxtrain

PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "server.py"


@pytest.fixture(scope="module")
def server():
    spec = importlib.util.spec_from_file_location("example_server", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_from_its_users(server, tmp_path):
    found = server.main(tmp_path, threads=6, requests=20)
    assert found["answers"] == 6 * 20 * 8
    assert found["updates"] == 6 * 20
    assert found["saves"] == found["updates"] // 20 + 1  # every 20, and at the end
    assert found["after"] > max(found["before"], 0.7)
    assert list(tmp_path.iterdir()) == [tmp_path / "served.onnx"]


def test_answers_are_those_of_one_update_and_files_are_whole(server, tmp_path):
    service = server.new_service(tmp_path)
    service.save_every = 3
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    states, seen, files = [service.predict(rows.tolist())], [], []
    update = service._update
    done = threading.Event()

    def recorded(*arguments):
        update(*arguments)
        states.append(service.predict(rows.tolist()))

    service._update = recorded

    def ask(_):
        while not done.is_set():
            seen.append(service.predict(rows.tolist()))
            time.sleep(0.002)

    def read():
        while not done.is_set():
            if service.path.exists():
                files.append(saved())
            time.sleep(0.005)

    def saved():
        session = onnxruntime.InferenceSession(service.path, providers=["CPUExecutionProvider"])
        logits = session.run(None, {"input": rows})[0]
        odds = np.exp(logits - logits.max(1, keepdims=True))
        return odds / odds.sum(1, keepdims=True)

    with ThreadPoolExecutor(5) as pool:
        asked = [*pool.map(lambda task: pool.submit(ask, task), range(4)), pool.submit(read)]
        random = np.random.default_rng(1)
        for _ in range(30):
            while not service.tell(random.normal(size=(8, 4)).tolist(), random.integers(0, 3, 8).tolist()):
                time.sleep(0.01)
        service.close()
        done.set()
        for task in asked:
            task.result()
    assert service.error is None
    assert (service.updates, service.saves) == (30, 11)
    known = np.array(states)
    assert len(seen) > 10
    for answer in seen:
        assert np.abs(known - np.array(answer)).max((1, 2)).min() < 1e-6
    assert np.unique([np.abs(known - np.array(answer)).max((1, 2)).argmin() for answer in seen]).size > 1
    np.testing.assert_allclose(saved(), known[-1], atol=1e-5)
    for found in files:
        assert np.abs(known - found).max((1, 2)).min() < 1e-5


def test_what_does_not_fit_is_told_and_the_next_feedback_is_learnt(server, tmp_path):
    service = server.new_service(tmp_path)
    service.tell([[0.0] * 4], [7])
    service.tell([[0.0] * 4], [2])
    service.close()
    assert "label 7" in str(service.error)
    assert service.updates == 1
    assert onnxtrain.predict(service.path, np.zeros((1, 4), np.float32)).shape == (1, 3)


def test_feedback_that_would_wait_too_long_is_refused(server, tmp_path):
    service = server.new_service(tmp_path)
    begun, go = threading.Event(), threading.Event()

    def slow(*_):
        begun.set()
        go.wait()

    service._update = slow
    service.tell([[0.0] * 4], [0])
    begun.wait()
    told = [service.tell([[0.0] * 4], [0]) for _ in range(101)]
    go.set()
    service.close()
    assert told == [True] * 100 + [False]


def test_requests_are_checked(server, tmp_path):
    testing = pytest.importorskip("fastapi.testclient")
    service = server.new_service(tmp_path)
    with testing.TestClient(server.app(service)) as client:
        assert client.post("/predict", json={"rows": [[1, 2, 3]]}).status_code == 422
        assert client.post("/feedback", json={"rows": [[1, 2, 3, 4]], "labels": [3]}).status_code == 422
        assert client.post("/feedback", json={"rows": [[1, 2, 3, 4]], "labels": []}).status_code == 422
        assert client.post("/feedback", json={"rows": [[1, 2, 3, 4]], "labels": [2]}).status_code == 202
    assert service.updates == 1  # the end of the server learns what waits
