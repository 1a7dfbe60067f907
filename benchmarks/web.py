"""A training step in a browser: onnxtrain-web, onnxruntime-web/training 1.18 and TensorFlow.js in turns, in one page.

    npm ci --prefix web --ignore-scripts && node web/build.mjs
    npm install --prefix benchmarks/web --ignore-scripts
    python benchmarks/web.py --artifacts-python PYTHON --write

PYTHON has onnxruntime-training-cpu 1.19.2, onnx 1.17 and PyTorch, which write the files of onnxruntime-web/training;
without it that peer is skipped. All peers run with one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from safetensors.numpy import save_file

import onnxtrain

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "pages" / "web.md"
HEADING = "# In a browser"
PEERS = ("onnxtrain", "onnxruntime-web/training 1.18", "TensorFlow.js, WASM", "TensorFlow.js, CPU")
BATCH = 32
RANDOM = np.random.default_rng(0)
CASES = {
    "mlp": (
        "MLP 784-256-10",
        lambda: onnxtrain.examples.mlp((784, 256, 10)),
        {"input": RANDOM.random((BATCH, 784), np.float32)},
        10,
    ),
    "lenet5": ("LeNet-5", onnxtrain.examples.lenet5, {"image": RANDOM.random((BATCH, 1, 28, 28), np.float32)}, 10),
    "transformer": (
        "small transformer",
        onnxtrain.examples.small_transformer,
        {"input_ids": RANDOM.integers(1, 90, (BATCH, 16)), "attention_mask": np.ones((BATCH, 16), np.int64)},
        4,
    ),
}


def prepare(name: str, folder: Path, python: str | None) -> str | None:
    """Write the files of a case; return why artifacts are missing, if they are."""
    _, build, inputs, classes = CASES[name]
    model = build()
    training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam())
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    onnx.save(onnxtrain.lower(training), folder / "step.onnx")
    states = onnxtrain.TrainingSession(training).state
    save_file({key: np.array(value) for key, value in states.items()}, folder / "states.safetensors")
    save_file(inputs | {"target": np.arange(BATCH) % classes}, folder / "batch.safetensors")
    if python is None:
        return "no --artifacts-python was given"
    (folder / "training").mkdir()
    command = [python, ROOT / "benchmarks" / "web" / "artifacts.py", folder / "model.onnx", folder / "training"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return "the artifacts cannot be made: " + done.stderr.strip().splitlines()[-1].split(" onnxruntime::")[0]


def measure(browser: str, folder: Path, name: str, rounds: int) -> dict:
    """Milliseconds of every round by peer, and why peers are missing."""
    command = ["node", str(ROOT / "benchmarks" / "web" / "measure.mjs"), browser, str(folder), str(rounds), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def start(browser: str, folder: Path, pages: int) -> str:
    """Start-up time of a training in fresh pages."""
    program = ROOT / "web" / "test" / "start.mjs"
    command = ["node", str(program), browser, str(folder), str(pages), "plain", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])

    def told(key: str) -> str:
        times = [page[key] for page in found]
        return f"{statistics.median(times):.0f} ms ({min(times):.0f} at best)"

    return (
        f"LeNet-5 starts in a fresh page, with all files on this machine: it is loaded after {told('load')}, the first "
        f"step takes {told('first')}; medians of {pages} pages. The page's own thread computes for {told('cpu')} of "
        "both; where other programs compute as well, the rest is waiting."
    )


def row(title: str, times: dict[str, list[float]]) -> str:
    """Medians, and in brackets the median ratio to onnxtrain's steps."""
    cells = [title]
    for peer in PEERS:
        if peer not in times:
            cells.append("-")
            continue
        ratios = [other / own for other, own in zip(times[peer], times["onnxtrain"], strict=True)]
        median = statistics.median(times[peer])
        text = f"{median:.0f} ms" if median >= 100 else f"{median:.3g} ms"
        cells.append(text if peer == "onnxtrain" else f"{text} ({statistics.median(ratios):.2g})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts-python", metavar="PYTHON")
    parser.add_argument("--browser", default=shutil.which("chromium"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.browser is None:
        sys.exit("No Chromium is installed; give --browser.")
    version = subprocess.run(
        [arguments.browser, "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    lines = [f"| one step, batch of {BATCH}, Adam | {' | '.join(PEERS)} |", f"|{'---|' * (len(PEERS) + 1)}"]
    notes, started = [], ""
    with tempfile.TemporaryDirectory() as temporary:
        for name, (title, *_) in CASES.items():
            folder = Path(temporary) / name
            reason = prepare(name, folder, arguments.artifacts_python)
            if name == "lenet5":
                started = start(arguments.browser, folder, arguments.rounds)
            found = measure(arguments.browser, folder.parent, name, arguments.rounds)
            lines.append(row(title, found["times"]))
            if reason is not None:
                found["missing"][PEERS[1]] = reason
            notes += [f"{title}, {peer}: {why.rstrip('.')}." for peer, why in found["missing"].items()]
            print(lines[-1], found["losses"], found["missing"], flush=True)
    table = "\n".join(lines)
    text = (
        f"{HEADING}\n\n`python benchmarks/web.py`: medians of {arguments.rounds} rounds in one page, in which the "
        "peers take turns; every peer has one thread and fetches the loss of every step. In brackets: how many times "
        f"as long as onnxtrain-web. {version}, {platform.machine()}, onnxruntime-web 1.30.0 for onnxtrain-web.\n\n"
        f"{table}\n\n{started}\n"
    )
    if notes:
        text += "\nNot measured: " + " ".join(notes) + "\n"
    print(text)
    if arguments.write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
