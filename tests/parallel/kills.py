"""Kill processes of a training at random moments, again and again, and compare its end with the undisturbed one.

    cd tests
    python -m parallel.kills --kills 50 --seed 0
    python -m parallel.kills --kills 50 --seed 0 --wide --ways all

Two processes train a small network with a checkpoint every three steps (``onnxtrain fit --parallel mpi --processes 2
--restarts``). One of them, drawn by chance, is killed after a time that is drawn by chance from that of a whole
training; the launcher starts them again. A training that comes to its end is compared with the undisturbed one, byte by
byte, and the next one begins, until there have been as many kills as asked for.

With ``--wide`` the network has 2.1 million weights, whose gradients are sent in three buckets beside the backward pass.
With ``--ways`` trainings take turns in how they send gradients and where they keep states.
"""

from __future__ import annotations

import argparse
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
from child_processes import child_process

COMMAND = ("-m", "onnxtrain", "fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy")
SETTINGS = ("--batch-size", "8", "--checkpoint-every", "3", "--optimizer", "adam", "--threads", "1")
TOGETHER = ("--parallel", "mpi", "--processes", "2")

NARROW, WIDE = (4, 8, 3), (4, 1024, 1024, 1024, 3)
"""Sizes of the layers: a single bucket of gradients, and three of them."""

EPOCHS = {NARROW: "40", WIDE: "6"}

WAYS = {
    "plain": (),
    "float16": ("--compress", "float16"),
    "top": ("--compress", "0.1"),
    "states": ("--shard-states",),
    "gradients": ("--shard-states", "--shard-gradients"),
}
"""How processes add gradients up, and what each keeps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts; 1 where a training ended otherwise than the undisturbed one."""
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
    """Train again and again, in one way after the other, until so many processes were killed.

    Returns:
        ``kills``; of these ``starting``, before the first step or checkpoint of the two processes, and ``training``;
        ``rank 0`` and ``rank 1``; those of each way; ``trainings`` that came to their end, and ``others`` of them with
        other weights than the undisturbed one.

    Raises:
        AssertionError: A training did not come to its end.
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
    """A model and its data, as files."""
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
    """The file of a training that is killed so often, or until it comes to its end."""
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
            except ProcessLookupError:  # it had come to its end
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
    except OSError:  # an old checkpoint that has just gone
        return 0.0


def started(folder: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Python with arguments, as a process."""
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
    """The process of every rank below a launcher."""
    found: dict[int, int] = {}
    below = {launcher.pid}
    for _ in range(4):  # launcher, mpiexec, its proxy, the ranks
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent not in below:
                    continue
                below.add(int(entry.name))
                for item in (entry / "environ").read_bytes().split(b"\0"):
                    if item.startswith(b"PMI_RANK="):
                        found[int(item[9:])] = int(entry.name)
            except OSError:  # it has ended
                continue
    return found


if __name__ == "__main__":
    sys.exit(main())
