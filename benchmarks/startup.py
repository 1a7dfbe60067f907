"""Time from the start of Python to the end of the first training step of LeNet-5, against PyTorch.

    python benchmarks/startup.py
    python benchmarks/startup.py --imports        # also: which packages take the time to import
    python benchmarks/startup.py --peers onnxtrain,earlier --environment earlier=PYTHON   # another version of onnxtrain

Each run is a fresh process; the frameworks take turns, and the figures are medians.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import (
    ForeignLoad,
    environment,
    last_line,
    load_line,
    machine_line,
    make_parser,
    significant,
    table,
    warn_when_busy,
    write_report,
)

# User code. Each prints the clock after its imports, after building, and after the first step; the clock counts from
# system start, so that the parent can compare it with its own.
ONNXTRAIN = """
import sys, time
import numpy as np
import onnxtrain
Trainer, Adam = onnxtrain.Trainer, onnxtrain.Adam
imported = time.monotonic()
trainer = Trainer(sys.argv[1], loss="softmax_cross_entropy", optimizer=Adam(1e-3), threads=int(sys.argv[2]))
built = time.monotonic()
trainer.train_step(np.ones((32, 1, 28, 28), np.float32), np.zeros(32, np.int64))
print(imported, built, time.monotonic())
"""
TORCH = """
import sys, time
import torch
from torch.nn.functional import cross_entropy
from zoo.architectures import LeNet5
torch.set_num_threads(int(sys.argv[2]))
imported = time.monotonic()
module = LeNet5()
optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)
built = time.monotonic()
loss = cross_entropy(module(torch.ones(32, 1, 28, 28)), torch.zeros(32, dtype=torch.int64))
loss.backward()
optimizer.step()
loss.item()
print(imported, built, time.monotonic())
"""
PROGRAMS = {"onnxtrain": ONNXTRAIN, "earlier": ONNXTRAIN, "PyTorch": TORCH}
REPOSITORY = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "1 run: a test run", threads=2, models=True)
    parser.add_argument("--peers", default="onnxtrain,PyTorch", help=", ".join(PROGRAMS))
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=PYTHON", help="earlier=")
    parser.add_argument("--runs", type=int, help="processes of each (15)")
    parser.add_argument("--imports", action="store_true", help="list the packages that take longest to import")
    options = parser.parse_args(arguments)
    runs = options.runs or (1 if options.quick else 15)
    path = lenet5(Path(options.folder))
    peers = options.peers.split(",")
    pythons = dict(entry.split("=", 1) for entry in options.environment)
    if "earlier" in peers and "earlier" not in pythons:
        parser.error("the peer earlier needs --environment earlier=PATH_OF_ITS_PYTHON")
    warn_when_busy()
    measured: dict[str, list[list[float]]] = {peer: [] for peer in peers}
    with ForeignLoad() as foreign:
        for peer in peers:
            run(peer, path, options.threads, pythons)  # files into the system's cache
        for _ in range(runs):
            for peer in peers:
                measured[peer].append(run(peer, path, options.threads, pythons))
    rows = [
        [peer, *(significant(statistics.median(column)) for column in zip(*times, strict=True))]
        for peer, times in measured.items()
    ]
    lines = [table(["framework", "imports, s", "building, s", "first step, s", "all, s"], rows), ""]
    if len(peers) == 2:
        first, second = (measured[peer] for peer in peers)
        ratio = statistics.median(a[-1] / b[-1] for a, b in zip(first, second, strict=True))
        lines += [f"{peers[0]} takes {ratio:.2f} of the time of {peers[1]}.", ""]
    lines.append(f"{machine_line()} {options.threads} threads; medians of {runs} runs. {load_line(foreign)}")
    if options.imports:
        lines += ["", *(import_table(peer, path, options.threads) for peer in peers)]
    write_report("\n".join(lines), options.output)
    return 0


def lenet5(folder: Path) -> Path:
    path = folder / "startup-lenet5.onnx"
    if not path.exists():
        import onnx

        import onnxtrain

        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(onnxtrain.examples.lenet5(), path)
    return path


def run(peer: str, path: Path, threads: int, pythons: Mapping[str, str]) -> list[float]:
    """Seconds of imports (including Python's start), building and first step, and their sum."""
    begin = time.monotonic()
    result = subprocess.run(
        [pythons.get(peer, sys.executable), *command(peer, path, threads)],
        capture_output=True,
        text=True,
        env=variables(threads, own=peer not in pythons),
    )
    if result.returncode:
        raise SystemExit(f"{peer} failed: {last_line(result.stderr)}")
    imported, built, stepped = map(float, result.stdout.split())
    return [imported - begin, built - imported, stepped - built, stepped - begin]


def command(peer: str, path: Path, threads: int, *options: str) -> list[str]:
    return [*options, "-c", PROGRAMS[peer], str(path), str(threads)]


def variables(threads: int, *, own: bool = True) -> dict[str, str]:
    """Environment of a run: torch's model is in tests/; bytecode is cached, as in an installed package."""
    found = environment(threads)
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [str(REPOSITORY / "tests"), *([found["PYTHONPATH"]] if own and "PYTHONPATH" in found else [])]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    return found


def import_table(peer: str, path: Path, threads: int, longest: int = 12) -> str:
    """Import time by package, its own code only, as ``python -X importtime`` counts it."""
    arguments = [sys.executable, *command(peer, path, threads, "-X", "importtime")]
    result = subprocess.run(arguments, capture_output=True, text=True, env=variables(threads))
    packages: dict[str, list[float]] = defaultdict(list)
    for own, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", result.stderr):
        packages[name.split(".")[0]].append(int(own) / 1e3)
    ranked = sorted(packages.items(), key=lambda item: -sum(item[1]))
    rows = [[name, str(len(times)), f"{sum(times):.0f}"] for name, times in ranked[:longest]]
    rest = [time for _, times in ranked[longest:] for time in times]
    rows.append(["all others", str(len(rest)), f"{sum(rest):.0f}"])
    return f"Imports of {peer}:\n\n" + table(["package", "modules", "ms"], rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
