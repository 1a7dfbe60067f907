"""Time and peak memory of a whole training step (forward, backward, Adam) against other frameworks.

    python benchmarks/step.py --output build/benchmarks/step.md
    python benchmarks/step.py --models mlp,lenet5 --peers onnxtrain,torch --quick
    python benchmarks/step.py --models bert_base,gpt2_small,vit_b16 --batch 8
    python benchmarks/step.py --peers onnxtrain,earlier --reference earlier --environment earlier=PYTHON

Every peer runs in a process of its own with the same number of threads. The peers take turns in short rounds;
times are medians over rounds, ratios are medians of the ratios of paired rounds. Before anything is timed, all
peers do the same first steps from the same weights, and one whose losses differ is not timed but reported.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmark_model import BenchmarkModel
from harness import (
    ForeignLoad,
    Interpreters,
    Measurement,
    load_line,
    losses_differ,
    machine_line,
    measure,
    megabytes,
    milliseconds,
    prepare,
    table,
    warn_when_busy,
    write_report,
)
from models import MODELS, find_model
from peers import PEERS, Task
from real_models import REAL

REFERENCE = "torch"
BATCHES = (8, 32)  # dominated by overhead, and by arithmetic


def main(
    arguments: Sequence[str] | None = None,
    *,
    known: Mapping[str, BenchmarkModel] = MODELS,
    peers: Sequence[str] = ("onnxtrain", REFERENCE),
    batches: Sequence[int] = BATCHES,
    description: str | None = __doc__,
) -> int:
    """Measure, print the report and write it; the keywords override settings for another set of models."""
    options = parse(arguments, known, peers, description)
    warn_when_busy()
    interpreters = Interpreters(dict(entry.split("=", 1) for entry in options.environment))
    reports = []
    with ForeignLoad() as foreign:
        for model in options.models:
            for batch in options.batch or batches[: 1 if options.quick else None]:
                tasks = [Task(peer, model, batch, options.threads, options.folder) for peer in options.peers]
                measured = compare(
                    tasks, interpreters, options.rounds, options.round_seconds, options.reference, options.clock
                )
                reports.append((model, batch, measured))
                print_progress(model, batch, measured)
    write_report(report(reports, options, foreign), options.output)
    return 0


def parse(
    arguments: Sequence[str] | None, known: Mapping[str, BenchmarkModel], peers: Sequence[str], description: str | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join
    all_known = {**known, **REAL} if known is MODELS else known
    parser.add_argument("--models", type=listed(all_known), default=list(known), help=names(all_known))
    parser.add_argument("--peers", type=listed(PEERS), default=list(peers), help=names(PEERS))
    parser.add_argument("--reference", choices=PEERS, default=REFERENCE, help=f"whom ratios are against ({REFERENCE})")
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], help="batch sizes")
    parser.add_argument("--threads", type=int, default=2, help="threads of every peer (2)")
    parser.add_argument("--rounds", type=int, help="rounds of every peer (11)")
    parser.add_argument("--round-seconds", type=float, help="length of a round (0.5)")
    parser.add_argument("--quick", action="store_true", help="batches of 8, 3 short rounds: a test run")
    parser.add_argument("--folder", default="build/benchmarks/models", help="where exported models are kept")
    parser.add_argument(
        "--environment",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="onnxruntime-training=, onnxsim=, earlier=",
    )
    parser.add_argument("--output", help="also write the report to this Markdown file")
    parser.add_argument("--processor", action="store_true", help="processor time, for busy machines; one thread")
    options = parser.parse_args(arguments)
    options.clock = "processor" if options.processor else "seconds"
    if options.processor:
        options.threads = 1
    options.rounds = options.rounds or (3 if options.quick else 11)
    options.round_seconds = options.round_seconds or (0.05 if options.quick else 0.5)
    return options


def listed(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Make a parser of comma-separated keys."""

    def parse_list(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return chosen

    return parse_list


def compare(
    tasks: Sequence[Task],
    interpreters: Interpreters,
    rounds: int,
    round_seconds: float,
    against: str = REFERENCE,
    clock: str = "seconds",
) -> dict[str, Measurement]:
    """Measure all peers at one task; unavailable or disagreeing ones have a ``problem``."""
    by_peer = {task.peer: task for task in tasks}
    # onnxtrain's preparation exports the model for all peers.
    first = Task("onnxtrain", tasks[0].model, tasks[0].batch, tasks[0].threads, tasks[0].folder)
    missing = prepare([first, *(task for task in tasks if task.peer != "onnxtrain")], interpreters)
    present = [task for task in tasks if task.peer not in missing]
    measured = measure(present, interpreters, rounds=rounds, round_seconds=round_seconds, clock=clock)
    measured |= {peer: Measurement(problem=problem) for peer, problem in missing.items() if peer in by_peer}
    reference = measured.get(against)
    if reference is not None and not reference.problem:
        for peer, result in measured.items():
            if not result.problem:
                rounded = PEERS[peer].rounds or PEERS[against].rounds
                result.problem = losses_differ(result, reference, rounded=rounded)
    return {peer: measured[peer] for peer in by_peer}


def print_progress(model: str, batch: int, measured: dict[str, Measurement]) -> None:
    parts = [f"{peer} {result.problem or milliseconds(result.seconds) + ' ms'}" for peer, result in measured.items()]
    print(f"{model} {batch}: {'; '.join(parts)}", file=sys.stderr)


def report(
    measurements: Sequence[tuple[str, int, dict[str, Measurement]]],
    options: argparse.Namespace,
    foreign: ForeignLoad,
) -> str:
    """The whole report in Markdown."""
    against = options.reference
    others = [peer for peer in options.peers if peer != against]
    has_reference = against in options.peers
    header = ["model", "batch"]
    for peer in options.peers:
        header += [f"{PEERS[peer].title}, ms", *(["ratio"] if has_reference and peer != against else []), "MB"]
    rows, problems = [], []
    ratios: dict[str, list[float]] = {peer: [] for peer in others}
    memory_ratios: dict[str, list[float]] = {peer: [] for peer in others}
    for model, batch, measured in measurements:
        row = [find_model(model).description, str(batch)]
        reference = measured.get(against)
        for peer in options.peers:
            result = measured[peer]
            compared = has_reference and peer != against
            if result.problem:
                row += ["-"] * (3 if compared else 2)
                problems.append(f"- {PEERS[peer].title}, {model}, batch {batch}: {result.problem}")
                continue
            row.append(milliseconds(result.seconds))
            if compared:
                if reference is None or reference.problem:
                    row.append("-")
                else:
                    ratios[peer].append(result.ratio_to(reference))
                    memory_ratios[peer].append(result.peak / reference.peak)
                    row.append(f"{ratios[peer][-1]:.2f}")
            row.append(megabytes(result.peak))
        rows.append(row)
    lines = [table(header, rows), ""]
    lines += [summary(peer, against, ratios[peer], memory_ratios[peer]) for peer in others if ratios[peer]]
    if problems:
        lines += ["", "Not measured:", "", *dict.fromkeys(problems)]
    lines += [
        "",
        f"{machine_line()} {options.threads} threads{', processor time' * options.processor}; medians of "
        f"{options.rounds} rounds of about {options.round_seconds:g} s. {load_line(foreign)}",
    ]
    return "\n".join(lines)


def summary(peer: str, against: str, ratios: Sequence[float], memory_ratios: Sequence[float]) -> str:
    """One sentence on all models together."""
    return (
        f"{PEERS[peer].title} against {PEERS[against].title}: geometric mean of the time ratios "
        f"{geometric_mean(ratios):.2f} (worst {max(ratios):.2f}), of the memory ratios "
        f"{geometric_mean(memory_ratios):.2f} (worst {max(memory_ratios):.2f})."
    )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


if __name__ == "__main__":
    sys.exit(main())
