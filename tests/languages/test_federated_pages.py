"""examples/federated_pages: pages in a browser train together, and the server refuses invalid requests."""

from __future__ import annotations

import http.client
import importlib
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from javascript import BROWSER, WEB, last_json, needs_browser, needs_packages, node
from onnx import numpy_helper
from safetensors.numpy import load, save, save_file

import onnxtrain
from onnxtrain.errors import OptionError

PROGRAM = Path(__file__).parents[2] / "examples" / "federated_pages" / "serve.py"


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        yield importlib.import_module("page_server")
    finally:
        sys.path.remove(str(PROGRAM.parent))


def weights(value=1.0):
    return {"w": np.full((2, 3), value, np.float32), "b": np.full(3, 10 * value, np.float32)}


@contextmanager
def serving(program, folder, pages=3, timeout=60.0, rounds=3, tls=None, value=0.0, most=100, update=100.0):
    rounds_of = importlib.import_module("page_rounds")
    limits = rounds_of.Bounds(pages=most, update=update)
    aggregator = rounds_of.Aggregator(weights(value), pages, timeout, rounds, limits)
    server = program.PageServer("127.0.0.1", 0, folder, aggregator, tls)

    def average():
        for _ in range(rounds):
            aggregator.next_round()

    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()  # seconds until it sees its end
    threading.Thread(target=average, daemon=True).start()

    def ask(method, path, body=None, **headers):
        given = {"Authorization": f"Bearer {server.token}"} | headers
        with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)) as connection:
            connection.request(method, path, body, {name: text for name, text in given.items() if text is not None})
            reply = connection.getresponse()
            return reply.status, reply.read(), int(reply.getheader("Round", -1))

    ask.server = server
    try:
        yield aggregator, ask
    finally:
        server.stop()


def test_pages_are_weighted_by_their_examples(program, tmp_path):
    sent = {"a": (10, 1.0), "b": (30, 2.0), "c": (60, -1.0)}
    with serving(program, tmp_path) as (_, ask), ThreadPoolExecutor() as pool:

        def post(page):
            count, value = sent[page]
            return ask("POST", f"/weights?page={page}&round=0&examples={count}", save(weights(value)))

        answers = list(pool.map(post, sent))
        for status, body, number in (*answers, ask("GET", "/weights?page=a")):
            assert (status, number) == (200, 1)
            np.testing.assert_allclose(load(body)["w"], 0.1 * 1 + 0.3 * 2 - 0.6, rtol=1e-6)
            np.testing.assert_allclose(load(body)["b"], 1, rtol=1e-6)


def test_a_late_page_is_left_out_of_the_round(program, tmp_path):
    with serving(program, tmp_path, timeout=0.3) as (_, ask):
        first = ask("POST", "/weights?page=a&round=0&examples=5", save(weights(2.0)))
        assert first[0] == 200
        np.testing.assert_array_equal(load(first[1])["w"], 2)
        status, reason, _ = ask("POST", "/weights?page=b&round=0&examples=5", save(weights()))
        assert (status, reason) == (
            409,
            b"These are weights of round 0, but it is round 1; get the weights of that round.",
        )


def test_a_page_sends_once_per_round(program, tmp_path):
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
    "no round": ("/weights?page=a&examples=5", save(weights()), 400, "round is ''; it needs an integer from 0"),
    "no examples": ("/weights?page=a&round=0&examples=0", save(weights()), 400, "examples is '0'; it needs .* from 1"),
    "minus": ("/weights?page=a&round=0&examples=-3", save(weights()), 400, "examples is '-3'; it needs"),
    "too many": ("/weights?page=a&round=0&examples=9999999999", save(weights()), 400, "to 1000000000"),
    "more than a page may claim": (
        "/weights?page=a&round=0&examples=100001",
        save(weights()),
        400,
        r"examples is 100001; a page counts for at most 100000 \(--max-examples\)",
    ),
    "too far": (
        GOOD,
        save(weights(20.0)),
        400,
        r"norm 3\d\d.\d*; at most 100 is accepted \(--max-update 100, relative",
    ),
    "out of range": (GOOD, save(weights(3e37)), 400, r"norm .*; at most 100 is accepted"),
    "other place": ("/elsewhere", save(weights()), 404, "Weights are sent to /weights"),
    "other round": ("/weights?page=a&round=7&examples=5", save(weights()), 409, "of round 7, but it is round 0"),
    "nothing": (GOOD, b"", 400, "not a safetensors file"),
    "no file": (GOOD, b"\xff" * 40, 400, "not a safetensors file"),
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
    "nan": (GOOD, save(weights(np.nan)), 400, "NaN or infinite values; the training diverged"),
    "infinite": (GOOD, save(weights(np.inf)), 400, "NaN or infinite values"),
}


def test_weights_that_cannot_be_averaged_are_refused(program, tmp_path):
    with serving(program, tmp_path) as (aggregator, ask):
        for name, (path, body, status, reason) in REFUSED.items():
            found = ask("POST", path, body)
            assert found[0] == status, (name, found)
            assert re.search(reason, found[1].decode()), (name, found)
        assert aggregator.round == 0


LENGTHS = {
    "unsaid": ({}, 411, b"The request needs a Content-Length."),
    "too long": ({"Content-Length": "1000000"}, 413, b"1000000 bytes were sent; the weights take at most 65572."),
}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_refusal_arrives_before_the_request_is_complete(length, program, tmp_path):
    headers, status, reason = LENGTHS[length]

    def slowly():
        for _ in range(10):
            yield bytes(100_000)
            time.sleep(0.05)  # the answer is on its way by now

    with serving(program, tmp_path) as (_, ask):
        assert ask("POST", GOOD, slowly(), **headers)[:2] == (status, reason)


def test_an_unfinished_request_is_closed(program, tmp_path, monkeypatch):
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
        for method, path, body in (("GET", "/model.onnx", None), ("GET", "/weights?page=a", None), ("POST", GOOD, b"")):
            status, found, _ = ask(method, path, body, **headers)
            assert status == 403
            assert b"Only pages of this server" in found
            assert b"secret" not in found


def test_a_wrong_argument():
    command = [sys.executable, PROGRAM, "model.onnx", "-o", "tuned.onnx"]
    done = subprocess.run([*command, "--pages", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "argument --pages: '0' is given; it needs an integer of at least 1" in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert re.fullmatch(r".*'model.onnx'.*\n", done.stderr)


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {}", "Bearer {}x", "Bearer \xe4"]
)
def test_without_a_token_only_programs_are_served(given, program, tmp_path):
    for name in ("index.html", "model.onnx", "states.safetensors", "training.json"):
        (tmp_path / name).write_bytes(b"content")
    with serving(program, tmp_path) as (aggregator, ask):
        header = given and given.format(ask.server.token)
        assert ask("GET", "/", Authorization=header)[:2] == (200, b"content")
        names = ("model.onnx", "states.safetensors", "training.json", "other.json")
        asked = [("GET", f"/{name}", None) for name in names]
        for method, path, body in (*asked, ("GET", "/weights?page=a", None), ("POST", GOOD, save(weights()))):
            status, reason, _ = ask(method, path, body, Authorization=header)
            assert status == 401, path
            assert reason.startswith(b"The join token is wrong or missing; open the address")
        assert not aggregator._joined
        assert not aggregator._sent
        assert ask("GET", "/model.onnx")[:2] == (200, b"content")


def test_each_server_has_a_token_of_its_own(program, tmp_path):
    with serving(program, tmp_path) as (_, first), serving(program, tmp_path) as (_, second):
        assert first.server.token != second.server.token
        assert second("GET", "/weights?page=a", Authorization=f"Bearer {first.server.token}")[0] == 401
        assert first.server.url == f"http://127.0.0.1:{first.server.server_port}/#token={first.server.token}"


def test_the_number_of_pages_is_bounded(program, tmp_path):
    with serving(program, tmp_path, pages=1, most=2) as (_, ask):
        assert [ask("GET", f"/weights?page={page}")[0] for page in "abab"] == [200] * 4
        for method, path, body in (("GET", "/weights?page=c", None), ("POST", GOOD.replace("=a", "=c"), b"")):
            status, reason, _ = ask(method, path, body)
            assert status == 403
            assert reason.startswith(b"2 pages have joined, and no more may take part")
        assert ask("POST", GOOD, save(weights()))[0] == 200


def test_an_update_is_bound_relative_to_the_weights(program, tmp_path):
    """The norm of the weights is 17.5 times their value."""
    with serving(program, tmp_path, pages=1, value=2.0, update=0.5) as (_, ask):
        assert ask("POST", GOOD, save(weights(3.1)))[0] == 400
        assert ask("POST", GOOD, save(weights(2.9)))[0] == 200
        far = ask("POST", GOOD.replace("round=0", "round=1"), save(weights(1.4)))
        assert far[0] == 400
        assert re.fullmatch(
            rb"The update has the norm 26.\d+; at most 25.\d+ is accepted \(--max-update 0.5, relative to the norm of "
            rb"the weights\). Train with a smaller learning rate.",
            far[1],
        )


def test_no_weights_are_accepted_after_the_last_round(program, tmp_path):
    with serving(program, tmp_path, pages=1, rounds=2) as (aggregator, ask):
        for number in range(2):
            path = GOOD.replace("round=0", f"round={number}")
            assert ask("POST", path, save(weights(number + 1.0)))[::2] == (200, number + 1)
        for number in range(5):
            status, reason, _ = ask("POST", GOOD.replace("round=0", f"round={number}"), save(weights(9.0)))
            assert (status, reason.partition(b" and")[0]) == (409, b"The training ended after 2 rounds")
        status, final, number = ask("GET", "/weights?page=b")
        assert (status, number) == (200, 2)
        np.testing.assert_array_equal(load(final)["w"], 2)
        assert aggregator.round == 2


PATHS = {
    "/%00": 400, "/a%00.js": 400, "/weights%00?page=a": 400, "/%ff": 400, "/%0a": 400, "/index.html?x=%ff": 400,
    "/..%2f..%2fetc/passwd": 404, "/../serve.py.html": 404, "//[.js": 404, "/%2e%2e/": 404, "/.": 404, "/%": 404,
    "/%zz": 404, "/index.html/": 404, "/" + "a/" * 10000: 404, "/?" + "a=1&" * 1000: 400, "*": 404,
    "/weights?page=%00": 400, "/weights?page=" + "a" * 65: 400, "/folder": 404, "/link.js": 200, "/%F0%9F%98%80": 404,
}  # fmt: skip


def test_odd_addresses_get_an_answer(program, tmp_path, capfd):
    (tmp_path / "index.html").touch()
    (tmp_path / "link.js").touch()
    (tmp_path / "folder").mkdir()
    with serving(program, tmp_path) as (_, ask):
        for path, status in PATHS.items():
            assert ask("GET", path)[0] == status, path[:60]
            assert ask("POST", path, b"")[0] in (400, 404), path[:60]
        with closing(socket.create_connection(("127.0.0.1", ask.server.server_port), timeout=30)) as connection:
            connection.sendall(b"GET http://[x/ HTTP/1.0\r\nHost: localhost:1\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100).startswith(b"HTTP/1.0 401 ")
    assert capfd.readouterr() == ("", "")


def test_damaged_requests_do_no_harm(program, tmp_path, capfd):
    (tmp_path / "index.html").touch()
    rng = random.Random(0)
    with serving(program, tmp_path, pages=1) as (aggregator, ask):
        body = save(weights(0.5))
        token = f"Authorization: Bearer {ask.server.token}"
        whole = (
            f"POST {GOOD} HTTP/1.1\r\nHost: localhost:1\r\n{token}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        pieces = (
            b"%00",
            b"\x00",
            b"\xff",
            b"-1",
            b"9" * 20,
            b"\r\n",
            b" ",
            b"?",
            b"//[",
            b": ",
            b"chunked",
            b"\r\n" * 200,
        )
        for _ in range(150):
            request = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                where = rng.randrange(250 if rng.random() < 0.8 else len(request))
                request[where : where + rng.choice((0, 1, 8))] = rng.choice(pieces)
            with closing(socket.create_connection(("127.0.0.1", ask.server.server_port), timeout=30)) as connection:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while connection.recv(65536):
                        pass
        assert ask("GET", "/")[0] == 200
        assert aggregator.round <= 3
        assert all(np.isfinite(array).all() for array in aggregator.weights.values())
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
def test_a_slow_sender_is_disconnected(program, tmp_path, monkeypatch):
    """One byte now and then keeps no connection beyond its time."""
    monkeypatch.setattr(program, "HEAD_TIME", 0.5)
    monkeypatch.setattr(program, "CONNECTIONS", 3)
    (tmp_path / "index.html").touch()
    with serving(program, tmp_path, pages=1) as (_, ask):
        slow = [socket.create_connection(("127.0.0.1", ask.server.server_port)) for _ in range(150)]
        begun = time.monotonic()
        while time.monotonic() - begun < 1.5:
            for connection in slow:
                with suppress(OSError):
                    connection.send(b"G")
            time.sleep(0.1)
        assert len(ask.server._open) <= 103
        assert ask("GET", "/")[0] == 200
        for connection in slow:
            connection.close()


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make certificates")


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    """Two certificates for localhost with their keys, and an encrypted key."""
    folder = tmp_path_factory.mktemp("pems")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("own", "other"):
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
        )
    openssl("pkey", "-in", "own.key", "-aes256", "-passout", "pass:secret", "-out", "encrypted.key")
    own = (folder / "own.pem").read_text()
    (folder / "both.pem").write_text(own + (folder / "own.key").read_text())
    (folder / "damaged.pem").write_text(own[:80] + "AAAA" + own[90:])
    (folder / "text.pem").write_text("certificate")
    os.mkfifo(folder / "fifo.pem")
    return folder


@needs_openssl
@pytest.mark.parametrize("files", [("own.pem", "own.key"), ("both.pem", None)])
def test_connections_are_encrypted(files, program, tmp_path, pems):
    tls = program.encryption(*(name and pems / name for name in files))
    (tmp_path / "index.html").write_bytes(b"page")
    trusting = ssl.create_default_context(cafile=pems / "own.pem")
    with serving(program, tmp_path, pages=1, tls=tls) as (_, ask):
        assert ask.server.url.startswith("https://127.0.0.1:")
        port, token = ask.server.server_port, {"Authorization": f"Bearer {ask.server.token}"}
        silent = socket.create_connection(("127.0.0.1", port))  # no handshake: others are served all the same

        def encrypted(method, path, body=None, **headers):
            with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=trusting)) as connection:
                connection.request(method, path, body, token | headers)
                reply = connection.getresponse()
                return reply.status, reply.read()

        assert encrypted("GET", "/") == (200, b"page")
        assert encrypted("POST", GOOD, save(weights()), Origin=f"https://127.0.0.1:{port}")[0] == 200
        assert encrypted("GET", "/", Origin=f"http://127.0.0.1:{port}")[0] == 403
        assert encrypted("POST", GOOD, bytes(70_000))[0] == 409
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask("GET", "/")
        silent.close()


BAD_FILES = {
    "key alone": (None, "own.key", "--key is given without --certificate; give both for TLS."),
    "missing": ("none.pem", "own.key", "--certificate '.*none.pem' cannot be read: No such file or directory."),
    "missing key": ("own.pem", "none.key", "--key '.*none.key' cannot be read: No such file or directory."),
    "no key": ("own.pem", None, "--key '.*own.pem' has no private key in PEM form .*, or give its file as --key."),
    "mismatched": ("own.pem", "other.key", "--certificate .* the key is of another certificate; give the key that .*"),
    "swapped": ("own.key", "own.pem", "--certificate '.*own.key' has no certificate in PEM form .*"),
    "text": ("text.pem", "own.key", "--certificate '.*text.pem' has no certificate in PEM form .*"),
    "damaged": ("damaged.pem", "own.key", "--certificate .* cannot be used: they are damaged or too weak .*"),
    "encrypted": ("own.pem", "encrypted.key", ".* the key is encrypted; decrypt it with 'openssl pkey'."),
    "folder": (".", "own.key", "--certificate '.*' needs to be a regular file of at most 1048576 bytes."),
    "fifo": ("fifo.pem", "own.key", "--certificate '.*' needs to be a regular file of at most 1048576 bytes."),
}


@needs_openssl
@pytest.mark.parametrize("case", BAD_FILES)
def test_certificates_that_cannot_be_used(case, program, pems):
    certificate, key, sentence = BAD_FILES[case]
    with pytest.raises(OptionError) as refused:
        program.encryption(certificate and pems / certificate, key and pems / key)
    assert re.fullmatch(sentence, str(refused.value)), refused.value


def test_a_port_in_use_is_refused(program, tmp_path):
    with serving(program, tmp_path) as (aggregator, ask):
        for host, port in (("127.0.0.1", ask.server.server_port), ("127.0.0.1", 70000), ("no such host", 0)):
            with pytest.raises(OptionError, match=f"Cannot listen on '{host}', port {port}: .*; see --host and --port"):
                program.PageServer(host, port, tmp_path, aggregator)


@contextmanager
def process(folder, *arguments):
    """The program; gives the process, and a function that asks it."""
    model = folder / "model.onnx"
    onnx.save(onnxtrain.examples.mlp((4, 16, 3)), model)
    server = subprocess.Popen(
        [sys.executable, PROGRAM, model, "-o", folder / "tuned.onnx", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = next((line for line in server.stdout if line.startswith("http")), None)
        assert line, server.stderr.read()
        found = re.fullmatch(r"(https?)://127.0.0.1:(\d+)/#token=([-\w]+)\n", line)
        port = int(found[2])

        def ask(method, path, body=None):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                connection.request(method, path, body, {"Authorization": f"Bearer {found[3]}"})
                reply = connection.getresponse()
                return reply.status, reply.read()

        ask.port, ask.token = port, found[3]
        yield server, ask
    finally:
        server.kill()
        server.communicate()


@pytest.mark.thorough
def test_ctrl_c_ends_the_server_while_clients_are_connected(tmp_path):
    with process(tmp_path, "--pages", "2") as (server, ask), ThreadPoolExecutor() as pool:
        own = ask("GET", "/weights?page=a")[1]
        waiting = pool.submit(ask, "POST", GOOD, own)  # until the other page has sent its weights
        hanging = [socket.create_connection(("127.0.0.1", ask.port)) for _ in range(40)]
        for index, connection in enumerate(hanging):
            connection.sendall(
                (b"", b"G", b"GET /onnxtrain-web.js HTTP/1.0\r\n\r\n", b"POST /weights HTTP/1.0\r\n")[index % 4]
            )
        time.sleep(0.3)
        begun = time.monotonic()
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 130
        assert time.monotonic() - begun < 2
        assert server.stderr.read() == "Interrupted: the rounds printed above are saved.\n"
        with suppress(OSError, http.client.HTTPException):
            assert waiting.result()[0] == 503
        for connection in hanging:
            connection.close()


@pytest.mark.thorough
def test_the_process_stops_after_its_rounds_and_refuses_late_pages(tmp_path):
    with process(tmp_path, "--pages", "2", "--rounds", "2", "--timeout", "0.5") as (server, ask):
        own = ask("GET", "/weights?page=a")[1]
        for number in range(2):
            assert ask("POST", GOOD.replace("round=0", f"round={number}"), own)[0] == 200
        late = ask("POST", GOOD.replace("=a", "=b"), own)
        assert late[0] == 409
        assert late[1].startswith(b"The training ended after 2 rounds and accepts no more weights")
        assert ask("GET", "/weights?page=b")[0] == 200
        assert server.wait(5) == 0
        assert server.stdout.read() == "round 1: 1 pages, 5 examples\nround 2: 1 pages, 5 examples\n"


@needs_packages
@needs_browser
@pytest.mark.browser
def test_a_page_without_a_token_asks_for_it(tmp_path):
    with process(tmp_path, "--runtime", WEB / "node_modules" / "onnxruntime-web" / "dist") as (_, ask):
        token = ask.token
        found = last_json(node("test/federated_token.mjs", BROWSER, f"http://127.0.0.1:{ask.port}/", "wrong", token))
    assert found == [
        "Enter the join token that the server printed.",
        "The join token is wrong or missing; open the address that the server printed, or enter its token.",
        "Ready.",
    ]


@needs_packages
@needs_browser
@pytest.mark.browser
def test_three_pages_learn_more_than_each_alone(tmp_path):
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
        assert re.fullmatch(r"http://127.0.0.1:\d+/#token=[-\w]{22}", url)
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
