"""Data-parallel training with MPI against PyTorch's DistributedDataParallel on gloo, one thread per rank.

    python benchmarks/parallel.py --output build/benchmarks/parallel.md
    python benchmarks/parallel.py --models lenet5 --ranks 1 2 --quick

Every rank has its own batch of the same size, so twice the ranks see twice the examples (weak scaling). The peers
alternate: in each round each is started, warmed up, measured and ended. "split" is the time of one process with
gradient and update in two sessions, as in distributed training, relative to its undivided step. "sharded" shards
states, "gradients" also gradients. "afterwards" runs the all-reduce after the backward pass instead of overlapping
them.

All ranks run on this machine. With more ranks than cores the times show the cost of sharing cores, and nothing about a
cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import ForeignLoad, load_line, machine_line, make_parser, megabytes, milliseconds, table, write_report
from models import LOSS, MODELS, find_model
from peers import EPSILON, LEARNING_RATE

FOLDER = Path(__file__).resolve().parent
BATCHES = {"mlp": 64, "lenet5": 64, "resnet18": 16, "bert_mini": 4}
PEERS = ("alone", "split", "mpi", "afterwards", "sharded", "gradients", "ddp")
TOLERANCE = 1e-4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "one round of three steps", models=True)
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured in a round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        work(**json.loads(given.worker))
        return 0
    if given.quick:
        given.rounds, given.steps = 1, 3
    compare(given)
    return 0


def compare(given: argparse.Namespace) -> None:
    """Measure all, and write the report."""
    rows = []
    with ForeignLoad() as foreign:
        for name in given.models:
            find_model(name).onnx(given.folder)
            for ranks in given.ranks:
                rows.append(row(name, ranks, measured(name, ranks, given)))
                print(" ".join(rows[-1]), file=sys.stderr)
    header = [
        "model",
        *("batch", "processes", "onnxtrain [ms]", "gloo DDP [ms]", "of DDP", "split", "MB moved"),
        *("waiting", "afterwards [ms]", "waiting afterwards", "hidden"),
        *("peak MB", "sharded [ms]", "sharded peak MB", "gradients too [ms]", "gradients too, peak MB"),
    ]
    text = "\n\n".join(
        [
            f"# Several processes\n\n{machine_line()}",
            table(header, rows),
            "Times are medians over rounds of the median step; ratios are medians of ratios within a round. Moved: "
            "what one process sends in a step. Waiting: the share of its time in which it does not compute, but "
            "communicates or waits for others; beside the backward pass, or all of it afterwards. Hidden: by how much "
            "less sums take behind the backward pass of the slowest process than if they all begin there.",
            load_line(foreign),
        ]
    )
    write_report(text, given.output)


def measured(name: str, ranks: int, given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The measurements of every peer, by round."""
    peers = [peer for peer in PEERS if (ranks == 1) == (peer in ("alone", "split")) or peer == "ddp"]
    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in peers}
    for turn in range(given.rounds):
        for peer in peers if turn % 2 else reversed(peers):
            found[peer].append(run(peer, name, ranks, given.steps, given.folder))
    losses = {peer: rounds[0]["loss"] for peer, rounds in found.items()}
    apart = max(losses.values()) - min(losses.values())
    if apart > TOLERANCE * abs(losses["ddp"]):
        raise SystemExit(f"{name} on {ranks} processes: the first losses differ: {losses}")
    return found


def run(peer: str, name: str, ranks: int, steps: int, folder: str) -> dict[str, Any]:
    """Start a peer's ranks; return the measurements of rank 0."""
    task = {"peer": peer, "name": name, "steps": steps, "folder": folder}
    command = [sys.executable, str(FOLDER / "parallel.py"), "--worker", json.dumps(task)]
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if peer != "ddp":
        place = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        mpiexec = shutil.which("mpiexec", path=place)
        if mpiexec is None:
            raise SystemExit("mpiexec is not installed: pip install mpi4py mpich")
        done = subprocess.run(
            [mpiexec, "-n", str(ranks), *command], capture_output=True, text=True, env=os.environ | single, check=False
        )
        return answer(peer, done.returncode, done.stdout, done.stderr)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place_of = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | single | place_of | {"RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    ended = [process.communicate() for process in started]
    return answer(peer, max(process.returncode for process in started), *ended[0])


def answer(peer: str, code: int, out: str, errors: str) -> dict[str, Any]:
    """The last line that a peer's rank 0 printed."""
    if code:
        raise SystemExit(f"{peer} failed: {errors.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def row(name: str, ranks: int, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A line of the table."""

    def median(peer: str, what: str = "seconds") -> float:
        return statistics.median(turn[what] for turn in found[peer])

    def ratio(one: str, other: str) -> str:
        pairs = zip(found[one], found[other], strict=True)
        return f"{statistics.median(a['seconds'] / b['seconds'] for a, b in pairs):.2f}"

    ours = "alone" if ranks == 1 else "mpi"
    several = ranks > 1
    return [
        name,
        *(str(BATCHES.get(name, 8)), str(ranks)),
        *(milliseconds(median(ours)), milliseconds(median("ddp")), ratio(ours, "ddp")),
        "" if several else ratio("split", "alone"),
        f"{median(ours, 'bytes') / 1e6:.2f}" if several else "",
        f"{median(ours, 'waiting'):.1%}" if several else "",
        milliseconds(median("afterwards")) if several else "",
        f"{median('afterwards', 'waiting'):.1%}" if several else "",
        f"{1 - median(ours, 'tail') / median('afterwards', 'tail'):.0%}" if several else "",
        megabytes(median(ours, "peak")),
        milliseconds(median("sharded")) if several else "",
        megabytes(median("sharded", "peak")) if several else "",
        milliseconds(median("gradients")) if several else "",
        megabytes(median("gradients", "peak")) if several else "",
    ]


def work(peer: str, name: str, steps: int, folder: str) -> None:
    """Run one rank of a peer."""
    step, communicator = (ddp if peer == "ddp" else onnxtrain)(peer, name, folder)
    waited = (lambda: 0.0) if communicator is None else communicator.waited
    first = step(0)
    for index in range(1, 3):
        step(index)
    if communicator is not None:
        communicator.seconds = communicator.bytes = 0.0
    before = waited()
    times, spans = [], []
    for index in range(steps):
        began = time.perf_counter()
        step(index)
        times.append(time.perf_counter() - began)
        spans.append((0.0, 0.0) if communicator is None else communicator.last())
    found = {"seconds": statistics.median(times), "loss": first, "peak": peak(), "bytes": 0.0, "waiting": 0.0}
    if communicator is not None:
        found |= {"bytes": communicator.bytes / steps, "waiting": (waited() - before) / sum(times)}
        found["tail"] = tail(communicator, spans)
    rank = int(os.environ.get("RANK", "0")) if communicator is None else communicator.rank
    if rank == 0:
        print(json.dumps(found))


def tail(communicator: Any, spans: Sequence[tuple[float, float]]) -> float:
    """Median seconds from the end of the slowest rank's backward pass to the end of the all-reduce.

    Ranks on one machine share a clock.
    """
    table = np.zeros((communicator.size, len(spans), 2))
    table[communicator.rank] = spans
    communicator.all_gather_(table)
    ended, done = table.max(axis=0).T
    return float(np.median(done - ended))


def onnxtrain(peer: str, name: str, folder: str) -> tuple[Callable[[int], float], Any]:
    """A step of onnxtrain, and its communication counter."""
    import onnxtrain
    from onnxtrain.distributed import MPI, Communicator, Single
    from onnxtrain.training.executors.data_parallel import DataParallelExecutor

    class Counting(Communicator):
        """A communicator that measures another one."""

        def __init__(self, inner: Communicator) -> None:
            self._inner, self.rank, self.size = inner, inner.rank, inner.size
            self.seconds = self.bytes = 0.0
            self.overlap = inner.overlap
            self.waited_in_steps = lambda: 0.0  # seconds that steps waited for all-reduces
            self.last = lambda: (0.0, 0.0)  # end of the last step's computation, and of its all-reduce

        def waited(self) -> float:
            return self.seconds + self.waited_in_steps()

        def set_background(self, computation: bool) -> None:
            self._inner.set_background(computation)

        def abort(self) -> None:
            self._inner.abort()

        def _measure(self, operation: str, array: np.ndarray, share: float) -> None:
            began = time.perf_counter()
            getattr(self._inner, operation)(array)
            if operation == "all_gather_":  # all-reduces count as `waited_in_steps`, in whatever thread they run
                self.seconds += time.perf_counter() - began
            self.bytes += array.nbytes * share * (self.size - 1) / self.size

        def all_reduce_(self, array: np.ndarray) -> None:
            self._measure("all_reduce_", array, 2)

        def reduce_scatter_(self, array: np.ndarray) -> None:
            self._measure("reduce_scatter_", array, 1)

        def all_gather_(self, array: np.ndarray) -> None:
            self._measure("all_gather_", array, 1)

        def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
            self._inner.broadcast_(array, root)

    several = peer in ("mpi", "afterwards", "sharded", "gradients")
    communicator = Counting(MPI(overlap=peer != "afterwards") if several else Single())
    model = find_model(name)
    trainer = onnxtrain.Trainer(
        model.onnx(folder),
        loss=LOSS,
        optimizer=onnxtrain.Adam(LEARNING_RATE, epsilon=EPSILON),
        batch_norm="train",
        untie=True,
        threads=1,
        distributed=onnxtrain.Distributed(
            communicator, shard_states=peer in ("sharded", "gradients"), shard_gradients=peer == "gradients"
        ),
    )
    size = BATCHES.get(name, 8)
    made = [model.batch(size * communicator.size, seed) for seed in range(4)]
    steps: Any = trainer.executor
    if peer == "split":
        # In several processes the two halves are a specification's; here one process has them without need.
        type(trainer.config).divided = property(lambda self: True)
        steps = DataParallelExecutor(trainer.objective, trainer.config)
    names = trainer.objective.names
    if several:
        communicator.waited_in_steps = lambda: steps._reduction.waited
        communicator.last = lambda: steps._reduction.last

    def step(index: int) -> float:
        inputs, target = made[index % len(made)]
        return float(steps.step({**inputs, names.target: target}, LEARNING_RATE))

    return step, communicator


def ddp(peer: str, name: str, folder: str) -> tuple[Callable[[int], float], None]:
    """A step of PyTorch with as many ranks, without a communication counter."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks, size = distributed.get_rank(), distributed.get_world_size(), BATCHES.get(name, 8)
    model = find_model(name)
    module: Any = model.module()
    if ranks > 1:
        module = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, eps=EPSILON, fused=True)
    made = []
    for seed in range(4):
        inputs, target = model.batch(size * ranks, seed)
        rows = slice(rank * size, (rank + 1) * size)
        made.append(([torch.from_numpy(array[rows]) for array in inputs.values()], torch.from_numpy(target[rows])))
    first = True

    def step(index: int) -> float:
        nonlocal first
        inputs, target = made[index % len(made)]
        optimizer.zero_grad(set_to_none=True)
        loss = model.torch_loss(module(*inputs), target)
        loss.backward()
        optimizer.step()
        value = loss.detach()
        if first:  # the mean over all ranks, to compare; later losses are the rank's own, as in scripts
            first = False
            distributed.all_reduce(value)
            value = value / ranks
        return float(value)

    return step, None


def peak() -> float:
    """Peak memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024.0 * int(line.split()[1])
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
