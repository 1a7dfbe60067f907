"""Federated learning with web pages: every page trains on its own data and sends weights, this server averages them.

    python examples/federated_pages/serve.py model.onnx --pages 3 --rounds 5 --output tuned.onnx

Open the address that it prints in as many browsers as take part. After every round the model is written with
averaged weights and nothing else changed. Whoever reaches the address can take part: by default, this machine only.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

import onnxtrain
from onnxtrain.cli import main as onnxtrain_command
from onnxtrain.errors import OnnxTrainError

HERE = Path(__file__).parent
HEADER_ROOM = 65536
"""Bytes that the names and shapes in a file of weights may take."""

MOST_EXAMPLES = 10**9
LINGER = 5.0
"""Seconds in which the rest of a refused request may come."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
Weights = Mapping[str, np.ndarray]


class RefusedError(OnnxTrainError):
    """What a page sent cannot be used.

    Args:
        status: The status of the answer.
        reason: One sentence for the page.
    """

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Aggregator:
    """Federated averaging: w = sum of n_k w_k / sum of n_k over the pages k of a round, with n_k examples each.

    A round ends when all pages have sent their weights, or some time after the first did.

    Args:
        weights: The weights of the first round.
        pages: How many pages take part.
        timeout: Seconds from the first weights of a round until those who are late are left out.
    """

    def __init__(self, weights: Weights, pages: int, timeout: float) -> None:
        self.weights = dict(weights)
        self.round = 0
        self.counts: list[int] = []
        self._pages, self._timeout = pages, timeout
        self._sent: dict[str, tuple[int, Weights]] = {}
        self._deadline = 0.0
        self._closed = False
        self._changed = threading.Condition()

    def current(self) -> tuple[int, Weights]:
        """How many rounds are over, and the weights after them."""
        with self._changed:
            return self.round, self.weights

    def take(self, page: str, number: int, examples: int, weights: Weights) -> tuple[int, Weights]:
        """Take the weights of a page, wait for the end of the round, and return what ``current`` does then.

        Raises:
            RefusedError: The weights are not those of this model or of this round.
        """
        check_weights(weights, self.weights)
        with self._changed:
            if number != self.round:
                raise RefusedError(
                    HTTPStatus.CONFLICT, f"These are weights of round {number}, but it is round {self.round}; get its."
                )
            if page in self._sent:
                raise RefusedError(HTTPStatus.CONFLICT, f"This page has sent its weights of round {number} already.")
            if not self._sent:
                self._deadline = time.monotonic() + self._timeout
            self._sent[page] = examples, weights
            if len(self._sent) == self._pages:
                self._average()
            while self.round == number and not self._closed:
                rest = self._deadline - time.monotonic()
                if rest > 0:
                    self._changed.wait(rest)
                else:
                    self._average()
            if self.round == number:
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "The server has stopped.")
            return self.round, self.weights

    def wait_for(self, number: int) -> list[int]:
        """Wait until so many rounds are over; returns the numbers of examples of the last one."""
        with self._changed:
            while self.round < number:
                self._changed.wait()
            return self.counts

    def close(self) -> None:
        """Send the pages away that still wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _average(self) -> None:
        self.counts = [examples for examples, _ in self._sent.values()]
        shares = [examples / sum(self.counts) for examples in self.counts]
        sent = [weights for _, weights in self._sent.values()]
        self.weights = {
            name: sum(
                share * weights[name].astype(np.float64) for share, weights in zip(shares, sent, strict=True)
            ).astype(own.dtype)
            for name, own in self.weights.items()
        }
        self._sent = {}
        self.round += 1
        self._changed.notify_all()


def check_weights(sent: Weights, own: Weights) -> None:
    """Refuse weights that cannot be averaged with those of the model.

    Raises:
        RefusedError: A name is missing or unknown, a type or shape differs, or a number is not finite.
    """
    missing, unknown = own.keys() - sent.keys(), sent.keys() - own.keys()
    if missing or unknown:
        name, what = (min(missing), "are missing") if missing else (min(unknown), "are not trained")
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"The weights {name!r} {what}; load the page again.")
    for name, array in sent.items():
        if (array.dtype, array.shape) != (own[name].dtype, own[name].shape):
            raise RefusedError(
                HTTPStatus.BAD_REQUEST,
                f"The weights {name!r} are {array.dtype} of shape {list(array.shape)}; they need to be "
                f"{own[name].dtype} of shape {list(own[name].shape)}.",
            )
        if not np.isfinite(array).all():
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"The weights {name!r} have NaN or infinite numbers; the training went astray."
            )


class Handler(SimpleHTTPRequestHandler):
    """Files of the page; ``GET /weights``, and ``POST /weights?page=...&round=...&examples=...``."""

    timeout = 60  # seconds without a byte
    extensions_map: ClassVar = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, *arguments: Any, aggregator: Aggregator, **options: Any) -> None:
        self.aggregator = aggregator
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        """Answer with a file, or with the weights."""
        if urlsplit(self.path).path == "/weights":
            self._answer(self.aggregator.current)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Take weights; answer with the average."""
        self._answer(self._taken)

    def send_head(self) -> Any:
        """The head of a file, for pages of this server only."""
        try:
            self._check_origin()
            if "\0" in unquote(self.path):
                raise RefusedError(HTTPStatus.NOT_FOUND, "No file has such a name.")
        except RefusedError as error:
            self.send_error(error.status, explain=str(error))
            return None
        return super().send_head()

    def end_headers(self) -> None:
        """Nothing is kept by browsers: the next training has other files under the same names."""
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Requests are not printed."""

    def _answer(self, work: Any) -> None:
        try:
            self._check_origin()
            number, weights = work()
            status, kind, content = HTTPStatus.OK, "application/octet-stream", save(dict(weights))
        except RefusedError as error:
            number, status, kind, content = -1, error.status, "text/plain; charset=utf-8", str(error).encode()
        refused = status != HTTPStatus.OK
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Round", str(number))
            self.end_headers()
            self.wfile.write(content)
            if refused:
                self._read_rest()
        except OSError:
            pass  # the page was closed
        self.close_connection = True

    def _read_rest(self) -> None:
        """Read what still comes of a refused request: closing before would reset the connection, and lose the answer.

        The page knows by the end of the answer that it is refused, and closes its side.
        """
        self.connection.shutdown(socket.SHUT_WR)
        end = time.monotonic() + LINGER
        while (rest := end - time.monotonic()) > 0:
            self.connection.settimeout(rest)
            if not self.connection.recv(65536):
                return

    def _check_origin(self) -> None:
        """Refuse other sites' pages, also those that have made a name of theirs point here."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        is_local = self.server.server_address[0] in ("127.0.0.1", "::1")
        if (is_local and host.rpartition(":")[0] not in LOOPBACK) or origin not in (None, f"http://{host}"):
            raise RefusedError(HTTPStatus.FORBIDDEN, "Only pages of this server may ask it for anything.")

    def _taken(self) -> tuple[int, Weights]:
        url = urlsplit(self.path)
        if url.path != "/weights":
            raise RefusedError(HTTPStatus.NOT_FOUND, "Weights are sent to /weights.")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        page = query.get("page", "")
        if not re.fullmatch(r"[0-9a-zA-Z-]{1,64}", page):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "page needs up to 64 letters and digits that name the page.")
        number = whole("round", query.get("round", ""), 0)
        examples = whole("examples", query.get("examples", ""), 1)
        return self.aggregator.take(page, number, examples, self._weights())

    def _weights(self) -> Weights:
        own = self.aggregator.weights
        most = sum(array.nbytes for array in own.values()) + HEADER_ROOM
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,15}", length):
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "The request needs a Content-Length.")
        if int(length) > most:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes were sent; the weights take at most {most}."
            )
        try:
            content = self.rfile.read(int(length))
        except OSError:
            content = b""
        if len(content) < int(length):
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{length} bytes were announced, and {len(content)} came.")
        try:
            return load(content)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"What was sent is no safetensors file: {error}.") from None


def whole(name: str, text: str, least: int) -> int:
    """A whole number of a request."""
    if re.fullmatch(r"[0-9]{1,10}", text) and least <= int(text) <= MOST_EXAMPLES:
        return int(text)
    raise RefusedError(
        HTTPStatus.BAD_REQUEST, f"{name} is {text[:40]!r}; it needs a whole number from {least} to {MOST_EXAMPLES}."
    )


def write_page(folder: Path, model: Path, arguments: argparse.Namespace) -> None:
    """Write what browsers load: the page that ``onnxtrain export --web`` makes, with another program in it."""
    options = ["--loss", arguments.loss, "--learning-rate", str(arguments.learning_rate)]
    runtime = ["--web-runtime", "/"] if arguments.runtime else []
    code = onnxtrain_command(["export", str(model), "--web", str(folder), *options, *runtime])
    if code:
        sys.exit(code)
    for name in ("index.html", "federated.js"):
        shutil.copyfile(HERE / name, folder / name)
    for file in Path(arguments.runtime or HERE).glob("ort-wasm-simd-threaded.*"):
        shutil.copyfile(file, folder / file.name)
    (folder / "page.js").unlink()
    settings = json.loads((folder / "training.json").read_text())
    settings |= {"rounds": arguments.rounds, "epochs": arguments.epochs, "batchSize": arguments.batch_size}
    (folder / "training.json").write_text(json.dumps(settings))


def run(arguments: argparse.Namespace) -> None:
    """Serve all rounds."""
    trainer = onnxtrain.Trainer(arguments.model, loss=arguments.loss)
    aggregator = Aggregator(trainer.get_weights(), arguments.pages, arguments.timeout)
    with tempfile.TemporaryDirectory() as temporary:
        write_page(Path(temporary), arguments.model, arguments)
        handler = partial(Handler, directory=temporary, aggregator=aggregator)
        server = ThreadingHTTPServer((arguments.host, arguments.port), handler)
        server.daemon_threads = False  # closing waits for answers that are on their way
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            print(f"http://{server.server_address[0]}:{server.server_port}/", flush=True)
            for number in range(1, arguments.rounds + 1):
                counts = aggregator.wait_for(number)
                trainer.set_weights(aggregator.current()[1])
                trainer.save(arguments.output)
                measured = trainer.evaluate(arguments.data) if arguments.data else {}
                shown = "".join(f", {name} {value:.4g}" for name, value in measured.items())
                print(f"round {number}: {len(counts)} pages, {sum(counts)} examples{shown}", flush=True)
        finally:
            server.shutdown()
            aggregator.close()
            server.server_close()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", "-o", type=Path, required=True, help="the model with the averaged weights")
    parser.add_argument("--loss", default="softmax_cross_entropy")
    parser.add_argument("--pages", type=int, default=3, help="how many take part (3)")
    parser.add_argument("--rounds", type=int, default=5, help="how often weights are averaged (5)")
    parser.add_argument("--epochs", type=int, default=1, help="of a page in a round (1)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.001, help="of Adam (0.001)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for the last pages (120)")
    parser.add_argument("--data", help="measure the model on this after every round")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: only browsers of this machine")
    parser.add_argument("--port", type=int, default=0, help="by default one that is free")
    parser.add_argument("--runtime", type=Path, metavar="FOLDER", help="onnxruntime-web's dist, instead of the network")
    arguments = parser.parse_args()
    for name in ("pages", "rounds", "epochs", "batch_size"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it needs a number of at least 1")
    try:
        run(arguments)
    except OnnxTrainError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
