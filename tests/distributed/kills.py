"""Kill processes of a training repeatedly at random times, and compare its result with an undisturbed training.

    cd tests
    python -m distributed.kills --kills 50 --seed 0
    python -m distributed.kills --kills 50 --seed 0 --wide --ways all

Two processes train a small network with a checkpoint every three steps (``onnxtrain fit --parallel mpi --processes 2
--restarts``). The script kills a random one of them after a random fraction of the duration of a training; the launcher
restarts them. It compares each finished training with the undisturbed one, byte by byte, and starts the next, until the
requested number of kills is reached.

With ``--wide`` the network has 2.1 million weights; their gradients are sent in three buckets during the backward pass.
With ``--ways`` trainings alternate between options for sending gradients and keeping states.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import onnx

import onnxtrain
from child_processes import child_process, descendants

COMMAND = ("-m", "onnxtrain", "fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy")
SETTINGS = ("--batch-size", "8", "--checkpoint-every", "3", "--optimizer", "adam", "--threads", "1")
TOGETHER = ("--parallel", "mpi", "--processes", "2")

NARROW, WIDE = (4, 8, 3), (4, 1024, 1024, 1024, 3)
"""Layer sizes: for one bucket of gradients, and for three."""

EPOCHS = {NARROW: "40", WIDE: "6"}

WAYS = {
    "plain": (),
    "float16": ("--compress", "float16"),
    "top": ("--compress", "0.1"),
    "states": ("--shard-states",),
    "gradients": ("--shard-states", "--shard-gradients"),
}
"""Options for summing gradients and sharding states."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts; return 1 if a result differs from the undisturbed training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", default=["plain"], choices=[*WAYS, "all"])
    parser.add_argument("--wide", action="store_true")
    given = parser.parse_args(arguments)
    ways = list(WAYS) if "all" in given.ways else given.ways
    with tempfile.TemporaryDirectory() as name:
        counts = disturb(Path(name), given.kills, random.Random(given.seed), ways, WIDE if given.wide else NARROW)
    print(json.dumps(counts))
    return 1 if counts["others"] else 0


def disturb(
    folder: Path,
    kills: int,
    draw: random.Random,
    ways: Sequence[str] = ("plain",),
    sizes: tuple[int, ...] = NARROW,
) -> Counter[str]:
    """Train repeatedly, alternating between options, until the given number of processes is killed.

    Returns:
        Counts: ``kills``; kills while ``starting`` (before the first step or checkpoint of the two processes) and
        ``training``; kills of ``rank 0`` and ``rank 1``; kills by option; finished ``trainings``, and ``others``, those
        with weights that differ from the undisturbed training.

    Raises:
        AssertionError: A training did not finish.
    """
    write_task(folder, sizes)
    wanted, longest = {}, {}
    for way in ways:
        began = time.monotonic()
        wanted[way] = trained(folder, f"calm-{way}", (*WAYS[way], "--epochs", EPOCHS[sizes]))
        longest[way] = time.monotonic() - began
    counts: Counter[str] = Counter(kills=0, starting=0, training=0, trainings=0, others=0)
    while counts["kills"] < kills:
        way = ways[counts["trainings"] % len(ways)]
        left, before = kills - counts["kills"], counts["kills"]
        settings = (*WAYS[way], "--epochs", EPOCHS[sizes])
        found = trained(folder, f"hit{counts['trainings']}", settings, left, longest[way], draw, counts)
        counts[way] += counts["kills"] - before
        counts["trainings"] += 1
        counts["others"] += found != wanted[way]
        print(json.dumps(counts), file=sys.stderr, flush=True)
    return counts


def write_task(folder: Path, sizes: Sequence[int] = NARROW) -> None:
    """Write a model and its data."""
    onnx.save(onnxtrain.examples.mlp(sizes), folder / "model.onnx")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(101, 4)).astype(np.float32)
    np.savez(folder / "train.npz", input=x, y=np.abs(x).argmax(axis=1) % 3)


def trained(
    folder: Path,
    name: str,
    settings: Sequence[str],
    kills: int = 0,
    longest: float = 0.0,
    draw: random.Random | None = None,
    counts: Counter[str] | None = None,
) -> bytes:
    """Run a training, kill it the given number of times at most, and return its file."""
    output, kept = f"{name}.onnx", folder / name
    more = ("--output", output, "--checkpoint", name, "--restarts", str(kills + 1))
    left = kills
    with started(folder, *COMMAND, *SETTINGS, *settings, *TOGETHER, *more) as launcher:
        while left and draw is not None and counts is not None:
            wait_for(lambda: len(ranks(launcher)) == 2 or launcher.poll() is not None)
            born = time.time()
            until = time.monotonic() + draw.uniform(0.0, longest)
            while time.monotonic() < until and launcher.poll() is None:
                time.sleep(0.01)
            rank = draw.randrange(2)
            victim = ranks(launcher).get(rank)
            if launcher.poll() is not None or victim is None:
                break
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:  # it has already exited
                break
            stepped = any(_written(path) > born for path in kept.glob("*.json"))
            counts.update(["kills", "training" if stepped else "starting", f"rank {rank}"])
            left -= 1
            wait_for(lambda gone=victim: gone not in ranks(launcher).values())  # type: ignore[misc]
        _, errors = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, errors
    shutil.rmtree(kept)
    return (folder / output).read_bytes()


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # an old checkpoint was just removed
        return 0.0


def started(folder: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start Python with arguments, in a context that ends the process."""
    return child_process(
        [sys.executable, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def ranks(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process of every rank below a launcher."""
    found: dict[int, int] = {}
    for pid in descendants(launcher.pid):
        with contextlib.suppress(OSError):  # it has exited
            for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if item.startswith(b"PMI_RANK="):
                    found[int(item[9:])] = pid
    return found


if __name__ == "__main__":
    sys.exit(main())
