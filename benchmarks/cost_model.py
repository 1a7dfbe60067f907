"""Cost of a step on networked machines: measured on slow networks, fitted, predicted, compared.

    python benchmarks/cost_model.py --output build/benchmarks/machines.md      # as root, on Linux: see slow_network.py
    python benchmarks/cost_model.py --quick

The cost model and its fit are in `network_costs.py`. Everything else is predicted: sums and
steps on other delays, rates and numbers of machines. What a machine computes in a step is measured there. The largest
sum goes first, so that connections have wide windows, as in a training, which begins with all of its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import ForeignLoad, load_line, machine_line, make_parser, table, write_report
from models import LOSS, find_model
from network_costs import (
    TABLE_BYTES,
    Found,
    Latencies,
    Network,
    Setting,
    Software,
    fit,
    fit_trips,
    network_of,
)
from slow_network import SlowNetwork

DELAYED = ((2, 0.02, 12.5e6), (4, 0.02, 12.5e6))
"""Machines, delay [s] and rate [bytes/s] of the networks to which latency and trips are fitted."""

MESSAGES = 64
"""Messages per burst, for measuring the overhead of one."""

PREDICTED = (
    *((2, 0.01, 2.5e6), (2, 0.04, 12.5e6), (2, 0.005, 6.25e6)),
    *((3, 0.02, 6.25e6), (4, 0.01, 12.5e6), (4, 0.04, 6.25e6)),
)
"""Networks for the predictions; slow ones, so that contention for this machine's cores matters little."""

SUMS = (1 << 6, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the measured all-reduces."""

STEPPED = {"lenet5": 64, "mlp": 64}
"""Models whose steps are measured, with the examples per machine and step."""

CLUSTER = (8, 16, 32, 64, 128, 256, 512, 1024)
NETWORKS = {"10 Gbit/s": (30e-6, 10e9 / 8), "100 Gbit/s": (10e-6, 100e9 / 8)}
"""One-way latency [s] and bandwidth [bytes/s] assumed in the table."""

RATE = 1e12
"""Operations per second of a machine assumed in the table."""

BESIDE = 2 / 3
"""Fraction of the computation in the backward pass, which overlaps with the all-reduce."""

SHOWN = {"resnet18": 32, "bert_mini": 32}
"""Models of the table, with the examples per machine and step."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "one network to predict, sums alone", models=True)
    parser.add_argument("--rounds", type=int, default=3, help="how often each network is measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        work(**json.loads(given.worker))
        return 0
    predicted, stepped, rounds = PREDICTED, list(STEPPED), given.rounds
    if given.quick:
        predicted, stepped, rounds = PREDICTED[:1], [], 1
    for name in {*stepped, *SHOWN}:
        find_model(name).onnx(given.folder)
    loopback: list[Found] = []
    networks: list[dict[Setting, Found]] = []
    with ForeignLoad() as foreign:
        for _ in range(rounds):
            loopback.append(on_loopback())
            networks.append({setting: on_network(setting, (), given.folder) for setting in DELAYED})
            networks[-1] |= {setting: on_network(setting, stepped, given.folder) for setting in predicted}
    found = {setting: _least([turn[setting] for turn in networks]) for setting in networks[0]}
    software, base = fit_trips(fit(loopback), {setting: found[setting] for setting in DELAYED})
    text = report(found, software, base, predicted, given.folder)
    write_report(f"{text}\n\n{load_line(foreign)}", given.output)
    return 0


def on_loopback() -> Found:
    """Measure sums of two processes over TCP on the loopback device."""
    place = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpiexec = shutil.which("mpiexec", path=place)
    if mpiexec is None:
        raise SystemExit("mpiexec is not installed: pip install mpi4py mpich")
    over_tcp = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo", "MPICH_CH4_NETMOD": "ofi", "MPIR_CVAR_NOLOCAL": "1"}
    command = [mpiexec, "-n", "2", *_worker((), "")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **over_tcp}, check=False)
    return _answer("loopback", done)


def on_network(setting: Setting, stepped: Sequence[str], folder: str) -> Found:
    """Measure sums and steps on a slow network."""
    with SlowNetwork(*setting) as network:
        done = network.mpiexec(_worker(stepped, folder), {"OMP_NUM_THREADS": "1"})
    return _answer(str(setting), done)


def _worker(stepped: Sequence[str], folder: str) -> list[str]:
    task = json.dumps({"stepped": list(stepped), "folder": str(Path(folder).resolve())})
    return [sys.executable, str(Path(__file__).resolve()), "--worker", task]


def _answer(name: str, done: subprocess.CompletedProcess[str]) -> Found:
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()[-500:]}")
    line = done.stdout.strip().splitlines()[-1]
    print(name, line, file=sys.stderr)
    found: Found = json.loads(line)
    return found


def _least(runs: Sequence[Found]) -> Found:
    """Minimum of each figure over the rounds; steps are those of the fastest round."""
    steps = {
        name: min((run["steps"][name] for run in runs), key=lambda step: step["seconds"]) for name in runs[0]["steps"]
    }
    sums = {size: min(run["sums"][size] for run in runs) for size in runs[0]["sums"]}
    return {"exchange": min(r["exchange"] for r in runs), "message": min(r["message"] for r in runs)} | {
        "sums": sums,
        "steps": steps,
    }


def work(stepped: Sequence[str], folder: str) -> None:
    """One process of a machine: sums of several sizes, then steps."""
    from onnxtrain.distributed import MPI

    mpi = MPI(timeout=120)
    small = np.zeros((mpi.size, TABLE_BYTES), np.uint8)
    found: Found = {"sums": {}, "steps": {}}
    for size in reversed(SUMS):
        array = np.zeros(size // 4, np.float32)
        found["sums"][str(size)] = timed(mpi, lambda array=array: mpi.all_reduce_(array))  # type: ignore[misc]
    found |= {"exchange": timed(mpi, lambda: mpi.all_gather_(small)), "message": message(mpi)}
    for name in stepped:
        found["steps"][name] = stepping(mpi, name, folder)
    if mpi.rank == 0:
        print(json.dumps(found))


def message(mpi: Any) -> float:
    """Seconds of one more small message to the next rank, and of one from the previous rank."""
    from mpi4py import MPI as library  # noqa: N811 - a module with the name of a class

    world, sent, received = library.COMM_WORLD, bytearray(TABLE_BYTES), [bytearray(TABLE_BYTES)] * MESSAGES
    after, before = (mpi.rank + 1) % mpi.size, (mpi.rank - 1) % mpi.size

    def messages(count: int) -> None:
        requests = [world.Irecv(received[index], before) for index in range(count)]
        requests += [world.Isend(sent, after) for _ in range(count)]
        while not library.Request.Testall(requests):
            time.sleep(0)

    return max(0.0, timed(mpi, lambda: messages(MESSAGES)) - timed(mpi, lambda: messages(1))) / (MESSAGES - 1)


def timed(mpi: Any, action: Callable[[], None], seconds: float = 0.5) -> float:
    """Seconds of a collective operation: the minimum over short runs of the mean time of the slowest rank.

    The minimum excludes the load of other programs.
    """

    def mean(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            action()
        return (time.perf_counter() - began) / count

    mean(3)  # connections open, windows grow
    first = np.asarray([mean(2)])
    mpi.broadcast_(first)
    least = 4 if first[0] < 0.1 else 1
    count = max(least, min(200, int(seconds / 5 / float(first[0]))))
    means = np.zeros((mpi.size, 5))
    means[mpi.rank] = [mean(count) for _ in range(5)]
    mpi.all_gather_(means)
    return float(means.max(axis=0).min())


def stepping(mpi: Any, name: str, folder: str, steps: int = 15) -> dict[str, float]:
    """Median step time, and median compute time of the slowest rank."""
    import onnxtrain
    from onnxtrain.distributed import Communicator

    class Timed(Communicator):
        """A communicator that measures another one."""

        rank, size, seconds = mpi.rank, mpi.size, 0.0

        def _measure(self, operation: str, array: np.ndarray) -> None:
            began = time.perf_counter()
            getattr(mpi, operation)(array)
            self.seconds += time.perf_counter() - began

        def all_reduce_(self, array: np.ndarray) -> None:
            self._measure("all_reduce_", array)

        def all_gather_(self, array: np.ndarray) -> None:
            self._measure("all_gather_", array)

        def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
            mpi.broadcast_(array, root)

    communicator, model = Timed(), find_model(name)
    trainer = onnxtrain.Trainer(model.onnx(folder), loss=LOSS, untie=True, threads=1, distributed=communicator)
    inputs, target = model.batch(STEPPED[name] * mpi.size, 0)
    feeds = {**inputs, trainer.objective.names.target: target}
    taken = np.zeros((mpi.size, steps, 2))
    for index in range(-3, steps):
        communicator.seconds = 0.0
        began = time.perf_counter()
        trainer.executor.step(feeds, 1e-3)
        whole = time.perf_counter() - began
        if index >= 0:
            taken[mpi.rank, index] = whole, whole - communicator.seconds
    mpi.all_gather_(taken)
    size = sum(trainer.executor.states.current(name).nbytes for name in trainer.parameters)
    return {
        "seconds": float(np.median(taken[:, :, 0].mean(axis=0))),
        "computing": float(np.median(taken[:, :, 1].max(axis=0))),
        "bytes": float(size),
    }


def points(
    found: dict[Setting, Found], software: Software, base: Latencies, settings: Sequence[Setting]
) -> Iterator[tuple[str, Setting, float, float]]:
    """Name, network, measured and predicted seconds."""
    for setting in settings:
        machines = setting[0]
        network, values = network_of(setting, base), found[setting]
        yield "exchange", setting, values["exchange"], software.exchange(TABLE_BYTES, machines, network)
        for size, seconds in sorted(values["sums"].items(), key=lambda item: int(item[0])):
            yield f"sum of {size_text(int(size))}", setting, seconds, software.all_reduce(int(size), machines, network)
        for name, step in values["steps"].items():
            expected = software.step(step["computing"], [step["bytes"]], machines, network)
            yield f"step of {name}", setting, step["seconds"], expected


def size_text(size: int) -> str:
    """Format a number of bytes."""
    return f"{size} bytes" if size < 1 << 10 else f"{size >> 10} KiB"


def report(
    found: dict[Setting, Found],
    software: Software,
    base: Latencies,
    predicted: Sequence[Setting],
    folder: str,
) -> str:
    rows = [
        [
            name,
            str(machines),
            f"{delay * 1e3:g}",
            f"{(rate or 0) * 8 / 1e6:g}",
            f"{measured * 1e3:.1f}",
            f"{expected * 1e3:.1f}",
            f"{expected / measured - 1:+.0%}",
        ]
        for name, (machines, delay, rate), measured, expected in points(found, software, base, predicted)
    ]
    errors = [abs(e / m - 1) for _, _, m, e in points(found, software, base, predicted)]
    within = sum(error <= 0.15 for error in errors)
    header = ["what", "machines", "delay [ms]", "rate [Mbit/s]", "measured [ms]", "predicted [ms]", "error"]
    return "\n\n".join(
        [
            f"# The cost of several machines\n\n{machine_line()}",
            f"Fitted: {software.overhead * 1e6:.0f} µs for each message, {software.copying * 1e9:.2f} ns for each byte "
            f"and {software.trips:.1f} trips of a large message; beside the delay a latency of "
            + ", ".join(f"{seconds * 1e6:.0f} µs with {machines} machines" for machines, seconds in base.items())
            + ".",
            table(header, rows),
            f"{within} of {len(errors)} points are predicted within 15 %; the median error is "
            f"{statistics.median(errors):.0%}, the largest {max(errors):.0%}.",
            *cluster(software, folder),
        ]
    )


def cluster(software: Software, folder: str) -> Iterator[str]:
    """The table of clusters, and its assumptions."""
    from arithmetic import PASSES, forward_operations

    from onnxtrain.training.executors.data_parallel import bucket_bytes

    rows, free = [], Software(0.0, 0.0, software.trips)
    for name, examples in SHOWN.items():
        model = find_model(name)
        path = Path(model.onnx(folder))
        computing = PASSES * forward_operations(path, model.batch(examples)[0]) / RATE
        size = weights(path)
        for machines in CLUSTER:
            count = max(1, int(size // bucket_bytes(machines)))
            sizes = [size / count] * count
            row = [name, str(machines), f"{computing * 1e3:.0f}"]
            for latency, bandwidth in NETWORKS.values():
                network = Network(latency, bandwidth)
                seconds, least = (
                    costs.step(computing, sizes, machines, network, BESIDE * computing) for costs in (software, free)
                )
                row += [f"{seconds * 1e3:.0f}", f"{computing / seconds:.0%}", f"{computing / least:.0%}"]
            rows.append(row)
    titles = [title for name in NETWORKS for title in (f"{name} [ms]", "efficiency", "at best")]
    taken = ", ".join(f"{latency * 1e6:.0f} µs one way at {name}" for name, (latency, _) in NETWORKS.items())
    examples = ", ".join(f"{name} {count}" for name, count in SHOWN.items())
    yield table(["model", "machines", "computing [ms]", *titles], rows)
    yield (
        f"Predictions, not measurements, for machines of {RATE / 1e12:g} Tflop/s, with {taken}, and so many examples "
        f"in each machine: {examples}. Efficiency is the share of a step in which machines compute; at best is what it "
        "were if messages and copies cost nothing but the network. All buckets but the last are added up beside the "
        "backward pass, two thirds of the computation, as far as they fit there."
    )


def weights(path: Path) -> float:
    """Bytes of the floating initializers of a model."""
    import onnx

    tensors = onnx.load(path).graph.initializer
    return float(sum(4 * np.prod(tensor.dims) for tensor in tensors if tensor.data_type == onnx.TensorProto.FLOAT))


if __name__ == "__main__":
    sys.exit(main())
