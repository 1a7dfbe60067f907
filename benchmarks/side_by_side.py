"""Two trainers at once on one machine: the steps that both do, relative to one trainer that has all cores.

    python benchmarks/side_by_side.py --output build/benchmarks/side_by_side.md
    python benchmarks/side_by_side.py --models mlp --quick

Each trainer is a process. Per second, one trainer with all threads does as many steps as it can; then two do theirs at
the same time, first with half of the threads each, then with all threads each, so that there are twice as many threads
as cores. The three take turns in every round. A ratio is the median over the rounds of the steps of both trainers by
those of the one.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from harness import (
    SETTLE_SECONDS,
    ForeignLoad,
    Interpreters,
    Worker,
    load_line,
    machine_line,
    make_parser,
    prepare,
    table,
    warn_when_busy,
    write_report,
)
from models import MODELS, find_model
from peers import PEERS, Task
from real_models import REAL
from step import geometric_mean, listed

WARM_UP = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report and write it."""
    parser = make_parser(__doc__, "one round of a tenth of a second", models=True)
    known = {**MODELS, **REAL}
    parser.add_argument("--models", type=listed(known), default=list(MODELS), help=", ".join(known))
    parser.add_argument("--peers", type=listed(PEERS), default=["onnxtrain", "torch"], help="onnxtrain, torch")
    parser.add_argument("--batch", type=int, default=32, help="examples of a step (32)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the machine (2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-seconds", type=float, default=1.0, help="of each of the three (1)")
    options = parser.parse_args(arguments)
    if options.threads < 2:
        parser.error(f"--threads is {options.threads}; two trainers that share them need at least 2")
    if options.quick:
        options.rounds, options.round_seconds = 1, 0.1
    warn_when_busy()
    rows, apart, all_threads = [], [], []
    with ForeignLoad() as foreign:
        for model in options.models:
            for peer in options.peers:
                rates = measured(peer, model, options)
                halves = ratio(rates["half each"], rates["one"])
                whole = ratio(rates["all each"], rates["one"])
                if peer == "onnxtrain":
                    apart.append(halves)
                    all_threads.append(whole)
                cells = [f"{statistics.median(rates['one']):.3g}", f"{halves:.2f}", f"{whole:.2f}"]
                rows.append([find_model(model).description, PEERS[peer].title, *cells])
                print(*rows[-1], sep="  ", flush=True)
    header = ["model", "framework", "one trainer, steps/s", "two, half of the threads each", "two, all threads each"]
    summary = f"Batches of {options.batch}, {options.threads} threads in all, {options.rounds} rounds."
    if apart:
        summary += (
            f" Two onnxtrain trainers by one: geometric mean {geometric_mean(apart):.2f} and worst {min(apart):.2f} "
            f"with half of the threads each, {geometric_mean(all_threads):.2f} and {min(all_threads):.2f} with all "
            "threads each."
        )
    write_report(f"{table(header, rows)}\n\n{summary} {machine_line()} {load_line(foreign)}", options.output)
    return 0


def measured(peer: str, model: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Steps per second in each round, of one trainer and of two together."""

    def task(threads: int) -> Task:
        return Task(peer, model, options.batch, threads, options.folder)

    groups = {
        "one": [task(options.threads)],
        "half each": [task(options.threads // 2)] * 2,
        "all each": [task(options.threads)] * 2,
    }
    if missing := prepare(groups["one"], Interpreters()):
        raise SystemExit(f"Not measured: {missing}.")
    rates: dict[str, list[float]] = {name: [] for name in groups}
    with contextlib.ExitStack() as stack:
        workers = {name: [Worker(each, Interpreters()) for each in tasks] for name, tasks in groups.items()}
        for group in workers.values():
            for worker in group:
                stack.callback(worker.close)
                worker.steps(WARM_UP)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        seconds = statistics.median(workers["one"][0].steps(WARM_UP)["seconds"])
        for _ in range(options.rounds):
            for name, group in workers.items():
                time.sleep(SETTLE_SECONDS)
                count = max(WARM_UP, round(options.round_seconds / (seconds * len(group))))
                found = pool.map(lambda worker, count=count: worker.steps(count)["seconds"], group)
                rates[name].append(sum(len(times) / sum(times) for times in found))
    return rates


def ratio(both: Sequence[float], one: Sequence[float]) -> float:
    """The median of the ratios of paired rounds."""
    return statistics.median(two / alone for two, alone in zip(both, one, strict=True))


if __name__ == "__main__":
    sys.exit(main())
