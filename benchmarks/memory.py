"""Memory of a training step with Adam, in bytes per parameter, and its time, against PyTorch.

    python benchmarks/memory.py --output build/benchmarks/memory.md
    python benchmarks/memory.py --models bert_base --batches 2,8 --threads 1

Peak resident memory of a separate process is measured at a smaller and at a larger batch. The difference is due to
examples (activations); weights and Adam's two states take 4 and 8 bytes a parameter, 4 and 4 with bfloat16 states, 4
and 2 with 8-bit states; the program is the memory of Python after its imports. The rest are gradients that exist at the
same time, and everything else that the framework keeps.

Time is CPU time, which depends little on other programs; with one thread it is that of a step.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from harness import Interpreters, PeerError, Worker, machine_line, prepare, table, write_report
from models import MODELS, find_model
from peers import PEERS, Task
from real_models import REAL
from step import listed

from onnxtrain.model_file.file import ModelFile
from onnxtrain.parameters.ties import find_copies

_OURS = "import onnxruntime, onnxtrain.training.trainer"
IMPORTS = {
    "torch": "import torch",
    "onnxtrain": _OURS,
    "onnxtrain-bfloat16": _OURS,
    "onnxtrain-8bit": _OURS,
}
STATES = {"torch": 8.0, "onnxtrain": 8.0, "onnxtrain-bfloat16": 4.0, "onnxtrain-8bit": 2.0 + 2 * 4 / 256}
"""Bytes per parameter of Adam's two states."""
STEPS = 3
_OWN = "; print(next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmRSS')) * 1024)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**MODELS, **REAL}
    parser.add_argument("--models", type=listed(known), default=list(REAL), help=", ".join(known))
    parser.add_argument("--peers", type=listed(IMPORTS), default=list(IMPORTS), help=", ".join(IMPORTS))
    parser.add_argument("--batches", type=two_batches, default=(2, 8), help="a smaller batch and a larger one (2,8)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every peer (2)")
    parser.add_argument("--folder", default="build/benchmarks/models", help="where exported models are kept")
    parser.add_argument("--output", help="also write the report to this Markdown file")
    options = parser.parse_args(arguments)
    own = {peer: program(peer) for peer in options.peers}
    rows = [row for model in options.models for row in measured(model, options, own)]
    header = [
        *("model", "parameters", "framework", "weights", "states", "gradients and others"),
        *("activations, MB an example", "program, MB"),
        *(
            name
            for batch in options.batches
            for name in (f"peak at {batch}, MB", "ratio", f"step at {batch}, s", "ratio")
        ),
    ]
    write_report(
        f"{table(header, rows)}\n\nWeights, states, gradients and others in bytes per parameter; Adam, the median "
        f"of {STEPS} steps in CPU seconds, threads: {options.threads}. {machine_line()}",
        options.output,
    )
    return 0


def two_batches(text: str) -> tuple[int, int]:
    """Parse two batch sizes, the smaller one first."""
    smaller, larger = sorted(int(size) for size in text.split(","))
    if not 0 < smaller < larger:
        raise argparse.ArgumentTypeError("needs two sizes of batches, such as 2,8")
    return smaller, larger


def program(peer: str) -> int:
    """Resident bytes of a process after importing a framework."""
    found = subprocess.run([sys.executable, "-c", IMPORTS[peer] + _OWN], capture_output=True, text=True, check=True)
    return int(found.stdout)


@dataclass(frozen=True)
class Cost:
    """Cost of one peer at one batch size: peak resident bytes, and CPU seconds per step."""

    peak: int
    seconds: float


def measured(model: str, options: argparse.Namespace, own: dict[str, int]) -> list[list[str]]:
    """A row per framework; ratios are relative to the first one, PyTorch where it is measured."""
    rows: list[list[str]] = []
    first: dict[int, Cost] = {}
    smaller, larger = options.batches
    export = Task("onnxtrain", model, larger, options.threads, options.folder)
    for peer in sorted(options.peers, key=list(IMPORTS).index):
        tasks = [Task(peer, model, batch, options.threads, options.folder) for batch in options.batches]
        missing = prepare([export, *tasks], Interpreters())
        try:
            if missing:
                raise PeerError(next(iter(missing.values())))
            costs = {task.batch: cost(task) for task in tasks}
        except PeerError as error:
            rows.append([find_model(model).description, "-", PEERS[peer].title, *["-"] * 12, str(error)])
            continue
        count = parameters(export.model_path)
        first = first or costs
        an_example = (costs[larger].peak - costs[smaller].peak) / (larger - smaller)
        left = (costs[smaller].peak - smaller * an_example - own[peer]) / count - 4 - STATES[peer]
        cells = ["4.0", f"{STATES[peer]:.1f}", f"{left:.1f}", f"{an_example / 1e6:.0f}", f"{own[peer] / 1e6:.0f}"]
        for batch, found in costs.items():
            cells += [f"{found.peak / 1e6:,.0f}", f"{found.peak / first[batch].peak:.2f}"]
            cells += [f"{found.seconds:.2f}", f"{found.seconds / first[batch].seconds:.2f}"]
        rows.append([find_model(model).description, f"{count:,}", PEERS[peer].title, *cells])
    return rows


def cost(task: Task) -> Cost:
    """Measure some steps in a separate process."""
    worker = Worker(task, Interpreters())
    try:
        seconds = worker.steps(STEPS)["processor"]
        found = Cost(worker.memory()["peak"], statistics.median(seconds))
        print(f"{task}: {found}", file=sys.stderr, flush=True)
        return found
    finally:
        worker.close()


def parameters(path: Path) -> int:
    """Number of floating-point elements of a model's initializers; those trained as one count once."""
    file = ModelFile.load(path)
    tied = {copy.name for copy in find_copies(file, file.names())}
    return sum(
        math.prod(tensor.dims)
        for tensor in file.proto.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name not in tied
    )


if __name__ == "__main__":
    sys.exit(main())
