"""CPU time of training steps, with the peers alternating in one process on one thread each.

    python benchmarks/processor_time.py --models lstm-256-1 --batch 8,32 --output build/benchmarks/processor_time.md
    python benchmarks/processor_time.py --zoo --peers onnxtrain,torch    # the forty generated models, each at its batch

For machines shared with other programs, on which wall time is unreliable. The figure is the user and system time of
this process, the minimum over several steps. Multi-threaded steps are not measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

from harness import Interpreters, machine_line, make_parser, prepare, table, write_report
from models import MODELS, find_model
from peers import PEERS, Task, batches
from real_models import REAL
from recurrent_models import RECURRENT
from step import geometric_mean, listed
from zoo_models import ZOO

WARMUP = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report and write it."""
    parser = make_parser(__doc__, "the first batch size and two steps, to see that it runs", models=True)
    known = {**MODELS, **RECURRENT, **REAL, **ZOO}
    parser.add_argument("--models", type=listed(known), default=list(RECURRENT), help=", ".join(known))
    parser.add_argument("--peers", type=listed(PEERS), default=["onnxtrain", "torch", "torch-compile"])
    parser.add_argument("--batch", type=lambda text: [int(item) for item in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--zoo", action="store_true", help="the generated models, each with a batch of its own")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each peer (9)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.batch, options.rounds = options.batch[:1], 2
    if options.zoo:
        options.models = list(ZOO)
    rows, ratios = [], []
    for model in options.models:
        for batch in [ZOO[model].size] if options.zoo else options.batch:
            times = measured([Task(peer, model, batch, 1, options.folder) for peer in options.peers], options.rounds)
            least = {peer: min(found) for peer, found in times.items()}
            others = [found for peer, found in least.items() if peer != "onnxtrain"]
            best = min(others) if others else least["onnxtrain"]
            ratios.append(least[options.peers[0]] / best)
            cells = [f"{1e3 * least[peer]:.3g}" for peer in options.peers]
            rows.append([find_model(model).description, str(batch), *cells, f"{ratios[-1]:.2f}"])
            print(*rows[-1], sep="  ", flush=True)
    header = ["model", "batch", *(f"{PEERS[peer].title}, ms" for peer in options.peers), "ratio to the faster"]
    write_report(
        f"{table(header, rows)}\n\nGeometric mean of the ratios {geometric_mean(ratios):.2f}, worst {max(ratios):.2f}. "
        f"Processor time of a step on one thread, the least of {options.rounds}. {machine_line()}",
        options.output,
    )
    return 0


def measured(tasks: Sequence[Task], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, by peer."""
    missing = prepare(tasks, Interpreters())
    if missing:
        raise SystemExit(f"Not measured: {missing}.")
    peers = {task.peer: PEERS[task.peer](task) for task in tasks}
    batch = batches(tasks[0])
    losses: dict[str, list[float]] = {name: [] for name in peers}
    times: dict[str, list[float]] = {name: [] for name in peers}
    for step in range(WARMUP + rounds):
        for name, peer in peers.items():
            inputs, target = batch(step)
            start = time.process_time()
            losses[name].append(peer.step(inputs, target))
            if step >= WARMUP:
                times[name].append(time.process_time() - start)
    spread = max(found[-1] for found in losses.values()) - min(found[-1] for found in losses.values())
    if spread > 0.05 * abs(statistics.mean(found[-1] for found in losses.values())):
        raise SystemExit(f"The losses differ: {losses}.")
    return times


if __name__ == "__main__":
    sys.exit(main())
