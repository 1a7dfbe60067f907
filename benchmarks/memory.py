"""Where the memory of a training step with Adam goes, in bytes per parameter, beside PyTorch's.

    python benchmarks/memory.py --output build/benchmarks/memory.md
    python benchmarks/memory.py --models bert_base --batch 8

Peak resident memory of a process of its own is measured at a batch of 1 and at a larger one. What grows from the one to
the other belongs to examples (activations); weights and Adam's two states are 4 and 8 bytes a parameter, and 4 and 4
with states in bfloat16; the program is what Python has after its imports. What is left are gradients, as far as they
are there at the same time, and whatever else the framework keeps.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence

import onnx
from harness import Interpreters, PeerError, Worker, machine_line, prepare, table, write_report
from models import MODELS, find_model
from peers import PEERS, Task
from real_models import REAL
from step import listed

BESIDE = ("onnxtrain", "onnxtrain-bfloat16", "torch")
_OURS = "import onnxruntime, onnxtrain.training.trainer"
IMPORTS = {"onnxtrain": _OURS, "onnxtrain-bfloat16": _OURS, "torch": "import torch"}
STATES = {"onnxtrain": 8, "onnxtrain-bfloat16": 4, "torch": 8}
"""Bytes a parameter of Adam's two states."""
STEPS = 3
_OWN = "; print(next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmRSS')) * 1024)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**MODELS, **REAL}
    parser.add_argument("--models", type=listed(known), default=list(REAL), help=", ".join(known))
    parser.add_argument("--peers", type=listed(IMPORTS), default=list(BESIDE), help=", ".join(IMPORTS))
    parser.add_argument("--batch", type=int, default=8, help="the larger batch (8)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every peer (2)")
    parser.add_argument("--folder", default="build/benchmarks/models", help="where exported models are kept")
    parser.add_argument("--output", help="also write the report to this Markdown file")
    options = parser.parse_args(arguments)
    own = {peer: program(peer) for peer in options.peers}
    rows = [row for model in options.models for row in measured(model, options, own)]
    header = [
        *("model", "parameters", "framework", "weights", "states", "gradients and others"),
        *("activations, MB an example", "program, MB", f"peak at {options.batch}, MB", "ratio"),
    ]
    write_report(
        f"{table(header, rows)}\n\nWeights, states, gradients and others in bytes per parameter; Adam, "
        f"{STEPS} steps. {machine_line()}",
        options.output,
    )
    return 0


def program(peer: str) -> int:
    """Resident bytes of a process that has imported a framework."""
    found = subprocess.run([sys.executable, "-c", IMPORTS[peer] + _OWN], capture_output=True, text=True, check=True)
    return int(found.stdout)


def measured(model: str, options: argparse.Namespace, own: dict[str, int]) -> list[list[str]]:
    """A row for each framework."""
    rows: list[list[str]] = []
    reference = None
    count = 0
    for peer in sorted(options.peers, key=lambda name: name != "torch"):  # that of the ratio first
        peaks = {}
        for batch in (1, options.batch):
            task = Task(peer, model, batch, options.threads, options.folder)
            export = Task("onnxtrain", model, batch, options.threads, options.folder)
            missing = prepare([export, task], Interpreters())
            if missing:
                return [
                    [find_model(model).description, "-", PEERS[peer].title, *["-"] * 6, next(iter(missing.values()))]
                ]
            count = count or parameters(export.model_path)
            try:
                peaks[batch] = peak(task)
            except PeerError as error:
                return [[find_model(model).description, f"{count:,}", PEERS[peer].title, *["-"] * 6, str(error)]]
        an_example = (peaks[options.batch] - peaks[1]) / (options.batch - 1)
        left = (peaks[1] - an_example - own[peer]) / count - 4 - STATES[peer]
        reference = reference or peaks[options.batch]
        cells = ["4.0", f"{STATES[peer]:.1f}", f"{left:.1f}", f"{an_example / 1e6:.0f}", f"{own[peer] / 1e6:.0f}"]
        cells += [f"{peaks[options.batch] / 1e6:,.0f}", f"{peaks[options.batch] / reference:.2f}"]
        rows.append([find_model(model).description, f"{count:,}", PEERS[peer].title, *cells])
    return rows


def peak(task: Task) -> int:
    """Peak resident bytes of some steps in a process of their own."""
    worker = Worker(task, Interpreters())
    try:
        worker.steps(STEPS)
        return worker.memory()["peak"]
    finally:
        worker.close()


def parameters(path: object) -> int:
    """How many floating numbers the initializers of a model have."""
    graph = onnx.load(str(path), load_external_data=False).graph
    return sum(math.prod(tensor.dims) for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)


if __name__ == "__main__":
    sys.exit(main())
