"""The example in examples/federated_pages: pages in a browser train together, and the server refuses what is wrong."""

from __future__ import annotations

import http.client
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import pytest
from javascript import BROWSER, WEB, last_json, needs_browser, needs_packages, node
from onnx import numpy_helper
from safetensors.numpy import load, save, save_file

import onnxtrain

PROGRAM = Path(__file__).parents[2] / "examples" / "federated_pages" / "serve.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("serve", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(value=1.0):
    return {"w": np.full((2, 3), value, np.float32), "b": np.full(3, 10 * value, np.float32)}


@contextmanager
def serving(program, folder, pages=3, timeout=60.0):
    aggregator = program.Aggregator(weights(0.0), pages, timeout)
    handler = partial(program.Handler, directory=str(folder), aggregator=aggregator)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(method, path, body=None, **headers):
        with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)) as connection:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read(), int(reply.getheader("Round", -1))

    try:
        yield aggregator, ask
    finally:
        server.shutdown()
        aggregator.close()
        server.server_close()


def test_a_page_counts_by_its_examples(program, tmp_path):
    sent = {"a": (10, 1.0), "b": (30, 2.0), "c": (60, -1.0)}
    with serving(program, tmp_path) as (aggregator, ask), ThreadPoolExecutor() as pool:

        def post(page):
            count, value = sent[page]
            return ask("POST", f"/weights?page={page}&round=0&examples={count}", save(weights(value)))

        answers = list(pool.map(post, sent))
        assert sorted(aggregator.wait_for(1)) == [10, 30, 60]
        for status, body, number in (*answers, ask("GET", "/weights")):
            assert (status, number) == (200, 1)
            np.testing.assert_allclose(load(body)["w"], 0.1 * 1 + 0.3 * 2 - 0.6, rtol=1e-6)
            np.testing.assert_allclose(load(body)["b"], 1, rtol=1e-6)


def test_who_is_late_is_left_out_of_the_round(program, tmp_path):
    with serving(program, tmp_path, timeout=0.3) as (_, ask):
        first = ask("POST", "/weights?page=a&round=0&examples=5", save(weights(2.0)))
        assert first[0] == 200
        np.testing.assert_array_equal(load(first[1])["w"], 2)
        status, reason, _ = ask("POST", "/weights?page=b&round=0&examples=5", save(weights()))
        assert (status, reason) == (409, b"These are weights of round 0, but it is round 1; get its.")


def test_a_page_has_one_say_in_a_round(program, tmp_path):
    with serving(program, tmp_path, pages=2) as (aggregator, ask), ThreadPoolExecutor() as pool:
        path = "/weights?page=a&round=0&examples=5"
        twice = [pool.submit(ask, "POST", path, save(weights())) for _ in range(2)]
        refused = next(answer for answer in (done.result() for done in _first(twice)) if answer[0] != 200)
        assert refused[:2] == (409, b"This page has sent its weights of round 0 already.")
        aggregator.close()
        assert {done.result()[0] for done in twice} == {409, 503}


def _first(waiting):
    from concurrent.futures import as_completed

    yield next(as_completed(waiting))


def without(name):
    return {key: array for key, array in weights().items() if key != name}


GOOD = "/weights?page=a&round=0&examples=5"
REFUSED = {
    "no name": ("/weights?round=0&examples=5", save(weights()), 400, "page needs up to 64 letters"),
    "odd name": ("/weights?page=%2e%2e%2f&round=0&examples=5", save(weights()), 400, "page needs up to 64 letters"),
    "no round": ("/weights?page=a&examples=5", save(weights()), 400, "round is ''; it needs a whole number from 0"),
    "no examples": ("/weights?page=a&round=0&examples=0", save(weights()), 400, "examples is '0'; it needs .* from 1"),
    "minus": ("/weights?page=a&round=0&examples=-3", save(weights()), 400, "examples is '-3'; it needs"),
    "too many": ("/weights?page=a&round=0&examples=9999999999", save(weights()), 400, "to 1000000000"),
    "other place": ("/elsewhere", save(weights()), 404, "Weights are sent to /weights"),
    "other round": ("/weights?page=a&round=7&examples=5", save(weights()), 409, "of round 7, but it is round 0"),
    "nothing": (GOOD, b"", 400, "no safetensors file"),
    "no file": (GOOD, b"\xff" * 40, 400, "no safetensors file"),
    "too long": (GOOD, bytes(70_000), 413, "70000 bytes were sent; the weights take at most 65572"),
    "missing": (GOOD, save(without("b")), 400, "The weights 'b' are missing"),
    "unknown": (GOOD, save(weights() | {"c": np.zeros(2, np.float32)}), 400, "The weights 'c' are not trained"),
    "shape": (
        GOOD,
        save(weights() | {"b": np.zeros((3, 1), np.float32)}),
        400,
        r"'b' .* \[3, 1\]; .* float32 .* \[3\]",
    ),
    "type": (GOOD, save(weights() | {"b": np.zeros(3)}), 400, "'b' are float64 .* need to be float32"),
    "nan": (GOOD, save(weights(np.nan)), 400, "NaN or infinite numbers; the training went astray"),
    "infinite": (GOOD, save(weights(np.inf)), 400, "NaN or infinite numbers"),
}


def test_what_cannot_be_averaged_is_refused(program, tmp_path):
    with serving(program, tmp_path) as (aggregator, ask):
        for name, (path, body, status, reason) in REFUSED.items():
            found = ask("POST", path, body)
            assert found[0] == status, (name, found)
            assert re.search(reason, found[1].decode()), (name, found)
        assert aggregator.current()[0] == 0


LENGTHS = {
    "unsaid": ({}, 411, b"The request needs a Content-Length."),
    "too long": ({"Content-Length": "1000000"}, 413, b"1000000 bytes were sent; the weights take at most 65572."),
}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_refusal_arrives_while_the_request_is_still_sent(length, program, tmp_path):
    headers, status, reason = LENGTHS[length]

    def slowly():
        for _ in range(10):
            yield bytes(100_000)
            time.sleep(0.05)  # the answer is on its way by now

    with serving(program, tmp_path) as (_, ask):
        assert ask("POST", GOOD, slowly(), **headers)[:2] == (status, reason)


def test_who_never_ends_a_request_is_left(program, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "LINGER", 0.2)

    def endless():
        while True:
            yield bytes(1000)
            time.sleep(0.01)

    with serving(program, tmp_path) as (_, ask), pytest.raises(ConnectionError):
        ask("POST", GOOD, endless())


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
def test_other_sites_get_nothing(headers, program, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"secret")
    with serving(program, tmp_path) as (_, ask):
        assert ask("GET", "/model.onnx")[:2] == (200, b"secret")
        for method, path, body in (("GET", "/model.onnx", None), ("GET", "/weights", None), ("POST", GOOD, b"")):
            status, found, _ = ask(method, path, body, **headers)
            assert status == 403
            assert b"Only pages of this server" in found
            assert b"secret" not in found


def test_a_wrong_argument():
    command = [sys.executable, PROGRAM, "model.onnx", "-o", "tuned.onnx"]
    done = subprocess.run([*command, "--pages", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--pages is 0; it needs a number of at least 1" in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert re.fullmatch(r".*'model.onnx'.*\n", done.stderr)


@needs_packages
@needs_browser
@pytest.mark.browser
def test_three_pages_learn_what_none_of_them_could_alone(tmp_path):
    """Each page has two of three classes, and 100, 150 or 220 examples."""
    model = tmp_path / "model.onnx"
    onnx.save(onnxtrain.examples.mlp((4, 16, 3)), model)
    x, y = onnxtrain.examples.points(1200)
    files, alone = [], []
    for page, (without_class, count) in enumerate(((0, 100), (1, 150), (2, 220))):
        rows = np.flatnonzero(y != without_class)[page::3][:count]
        files.append(tmp_path / f"page{page}.safetensors")
        save_file({"input": x[rows], "target": y[rows]}, files[-1])
        trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(0.01))
        trainer.fit(x[rows], y[rows], epochs=16, progress=False)
        alone.append(trainer)
    points, labels = onnxtrain.examples.points(600, seed=1)
    test, tuned = tmp_path / "test.npz", tmp_path / "tuned.onnx"
    np.savez(test, input=points, target=labels)
    server = subprocess.Popen(
        [
            *(sys.executable, PROGRAM, model, "-o", tuned, "--pages", "3", "--rounds", "8", "--epochs", "2"),
            *(
                "--batch-size",
                "8",
                "--learning-rate",
                "0.01",
                "--data",
                test,
                "--runtime",
                WEB / "node_modules" / "onnxruntime-web" / "dist",
            ),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        lines = iter(server.stdout.readline, "")
        url = next(line.strip() for line in lines if line.startswith("http://"))
        assert url.startswith("http://127.0.0.1:")
        found = last_json(node("test/federated.mjs", BROWSER, url, *files))["pages"]
        rounds = list(lines)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.stdout.close()
    for page in found:
        assert page["errors"] == []
        assert page["said"].startswith("Done: loss")
        assert [row[0] for row in page["rows"]] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert all(after < before for _, before, after in page["rows"])
    assert [line.partition(":")[0] for line in rounds] == [f"round {number}" for number in range(1, 9)]
    assert all("3 pages, 470 examples, loss " in line for line in rounds)

    def accuracy(prediction):
        return float((prediction.argmax(axis=1) == labels).mean())

    together = accuracy(onnxtrain.predict(tuned, points))
    assert together > 0.8
    assert together > 0.1 + max(accuracy(trainer.predict(points)) for trainer in alone)
    before, after = onnx.load(model), onnx.load(tuned)
    for was, now in zip(before.graph.initializer, after.graph.initializer, strict=True):
        assert (numpy_helper.to_array(was) != numpy_helper.to_array(now)).any()
        now.CopyFrom(was)
    assert before == after, "more than weights changed"
