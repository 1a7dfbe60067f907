"""Federated learning with web pages: every page trains on its own data and sends weights, this server averages them.

    python examples/federated_pages/serve.py model.onnx --pages 3 --rounds 5 --output tuned.onnx

Open the address that it prints in as many browsers as take part: it has the join token that the server asks for. After
every round the model is written with averaged weights and nothing else changed. By default, only this machine can reach
the address; for others give --host, and --certificate for TLS.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from page_rounds import Aggregator, Bounds
from page_server import PageServer, encryption, warn_unencrypted

import onnxtrain
from onnxtrain.cli import main as onnxtrain_command
from onnxtrain.errors import OnnxTrainError

HERE = Path(__file__).parent
FAREWELL = 10.0
"""Seconds after the last round in which late pages get an answer."""


def write_page(folder: Path, model: Path, arguments: argparse.Namespace) -> None:
    """Write the files for browsers: those of ``onnxtrain export --web``, with the page and program of this example."""
    options = ["--loss", arguments.loss, "--learning-rate", str(arguments.learning_rate)]
    runtime = ["--web-runtime", "/"] if arguments.runtime else []
    with contextlib.redirect_stdout(io.StringIO()):  # which says how to serve the page
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
    tls = encryption(arguments.certificate, arguments.key)
    trainer = onnxtrain.Trainer(arguments.model, loss=arguments.loss)
    bounds = Bounds(arguments.max_pages, arguments.max_examples, arguments.max_update)
    aggregator = Aggregator(trainer.get_weights(), arguments.pages, arguments.timeout, arguments.rounds, bounds)
    with tempfile.TemporaryDirectory() as temporary:
        write_page(Path(temporary), arguments.model, arguments)
        server = PageServer(arguments.host, arguments.port, Path(temporary), aggregator, tls)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            if tls is None and not server.is_local:
                warn_unencrypted(arguments.host)
            print(server.url, flush=True)
            for number in range(1, arguments.rounds + 1):
                counts, weights = aggregator.next_round()
                trainer.set_weights(weights)
                trainer.save(arguments.output)
                measured = trainer.evaluate(arguments.data) if arguments.data else {}
                shown = "".join(f", {name} {value:.4g}" for name, value in measured.items())
                print(f"round {number}: {len(counts)} pages, {sum(counts)} examples{shown}", flush=True)
            aggregator.wait_for_pages(FAREWELL)
        finally:
            server.stop()


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is given; it needs an integer of at least 1")
    return value


def measure(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is given; it needs a number above 0, and at most 1e9")
    return value


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, bounds = parser.add_argument, Bounds()
    add("model", type=Path)
    add("--output", "-o", type=Path, required=True, help="the model with the averaged weights")
    add("--loss", default="softmax_cross_entropy")
    add("--pages", type=positive, default=3, help="pages per round (3)")
    add("--rounds", type=positive, default=5, help="rounds of averaging (5)")
    add("--epochs", type=positive, default=1, help="epochs of a page per round (1)")
    add("--batch-size", type=positive, default=32)
    add("--learning-rate", type=float, default=0.001, help="learning rate of Adam (0.001)")
    add("--timeout", type=measure, default=120.0, help="seconds to wait for the last pages (120)")
    add("--max-pages", type=positive, default=bounds.pages, help=f"pages that may join, in all ({bounds.pages})")
    add("--max-examples", type=positive, default=bounds.examples, help=f"examples of a page ({bounds.examples})")
    add(
        "--max-update",
        type=measure,
        default=bounds.update,
        metavar="FACTOR",
        help=f"largest norm of a page's update, relative to the norm of the weights ({bounds.update:g})",
    )
    add("--data", help="data to evaluate the model on after every round")
    add("--host", default="127.0.0.1", help="address to listen on; 127.0.0.1 is for browsers of this machine only")
    add("--port", type=int, default=0, help="by default a free port")
    add("--certificate", type=Path, metavar="FILE", help="serve by TLS: certificates in PEM form, the server's first")
    add("--key", type=Path, metavar="FILE", help="the certificate's private key, if it is in a file of its own")
    add("--runtime", type=Path, metavar="FOLDER", help="the dist folder of onnxruntime-web, instead of a download")
    arguments = parser.parse_args()
    if arguments.max_pages < arguments.pages:
        parser.error(f"--max-pages is {arguments.max_pages}; it needs to be at least --pages, {arguments.pages}")
    try:
        run(arguments)
    except OnnxTrainError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("Interrupted: the rounds printed above are saved.", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
