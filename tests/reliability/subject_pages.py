"""Damaged and forged requests to the server of federated pages: each is refused or gets no answer."""

from __future__ import annotations

import contextlib
import ctypes
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from reliability.mutation import damage
from reliability.outcome import WrongError
from reliability.worker import Operations

SERVER = Path(__file__).parents[2] / "examples" / "federated_pages" / "serve.py"
PLACES = (
    "/",
    "/index.html",
    "/training.json",
    "/../serve.py",
    "/%2e%2e/x",
    "/%00",
    "/weights",
    "//",
    "/weights?page=a",
)
VALUES = ("0", "1", "-1", "", "9" * 20, "nan", "%00", "a b", "1&page=b", "\u0661")
UNKNOWN = (501, 505)
"""Answers of Python's own server to methods and versions that it does not have."""


class Subject:
    """One request per case, to a server in a separate process."""

    def __init__(self, shared: Path) -> None:
        import onnx

        import onnxtrain

        onnx.save(onnxtrain.examples.mlp((4, 5, 3)), shared / "model.onnx")
        self._weights = onnxtrain.Trainer(shared / "model.onnx", loss="softmax_cross_entropy").get_weights()
        self._round = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
        line = ["model.onnx", "-o", "out.onnx", "--port", "0", "--pages", "1", "--rounds", "1000000", "--timeout", "1"]
        line += ["--max-pages", "1000000"]
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER), *line],
            cwd=shared, stdout=subprocess.PIPE, stderr=self._errors, text=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        assert self._server.stdout is not None
        lines = (re.search(r"http://([0-9.]+):([0-9]+)/[?#]?(\S*)", line) for line in self._server.stdout)
        found = next(filter(None, lines), None)
        if found is None:
            raise RuntimeError(f"the server does not start: {self._output()}")
        self._host, self._port, self._token = found[1], int(found[2]), found[3].removeprefix("token=")
        own = [f"Host: {self._host}:{self._port}", f"Authorization: Bearer {self._token}"]
        self._ask("\r\n".join(["GET /weights?page=a HTTP/1.1", *own, "", ""]).encode())  # joins

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Send a request, and check the answer and the server."""
        generator = random.Random(f"pages {seed} {index}")
        operations.run("request", lambda: self._check(self._ask(self._request(generator))))

    def _request(self, generator: random.Random) -> bytes:
        body = b""
        path = generator.choice(PLACES)
        if generator.random() < 0.7:
            sent = {name: self._spoilt(array, generator) for name, array in self._weights.items()}
            body = save(sent)
            body = damage(body, generator) if generator.random() < 0.4 else body
            right = {"page": "a", "round": str(self._round), "examples": "1"}
            spoilt = generator.choice((None, None, *right))
            fields = right if spoilt is None else right | {spoilt: generator.choice(VALUES)}
            path = "/weights?" + "&".join(f"{name}={value}" for name, value in fields.items())
        length = generator.choice((str(len(body)),) * 5 + VALUES)
        method = "POST" if body else generator.choice(("GET", "HEAD", "PUT", "POST", "X"))
        host = generator.choice((f"{self._host}:{self._port}",) * 5 + ("other", ""))
        token = generator.choice((self._token,) * 9 + VALUES)
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {token}"]
        head = "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()
        return (damage(head, generator) if generator.random() < 0.3 else head) + body

    @staticmethod
    def _spoilt(array: np.ndarray, generator: random.Random) -> np.ndarray:
        way = generator.randrange(8)
        if way == 0:
            return array.astype(generator.choice(("f8", "i4", "f2")))
        if way == 1:
            return array.reshape(-1)[: generator.randrange(array.size + 1)]
        if way == 2:
            return np.full_like(array, generator.choice((np.nan, np.inf, 1e38)))
        return array

    def _ask(self, request: bytes) -> bytes:
        answer = b""
        with contextlib.suppress(ConnectionError), socket.create_connection((self._host, self._port), 30) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                answer += part
        return answer

    def _check(self, answer: bytes) -> None:
        """Raise if the server failed, according to its answer or its own output.

        Raises:
            WrongError: It has.
        """
        now = re.search(rb"\r\nRound: ([0-9]+)\r\n", answer)
        self._round = self._round if now is None else int(now[1])
        found = re.match(rb"HTTP/1\.[01] ([0-9]{3}) ", answer)
        if found is not None and int(found[1]) >= 500 and int(found[1]) not in UNKNOWN:
            raise WrongError(f"answered {answer[:200]!r}", "status")
        if self._server.poll() is not None:
            raise WrongError(f"the server ended: {self._output()}", "ended")
        if "Traceback" in self._output():
            output = self._output()
            self._errors.truncate(0)
            raise WrongError(output, output.strip().splitlines()[-1])

    def _output(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-6000:].decode(errors="backslashreplace")


def _end_with_parent() -> None:
    """Ask Linux to end this process with the one that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
