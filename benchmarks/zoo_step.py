"""Time and peak memory of a training step of the forty models of ``zoo_models.py``, against PyTorch.

    python benchmarks/zoo_step.py --output build/benchmarks/zoo.md
    python benchmarks/zoo_step.py --models messages_1,vgg_2 --peers onnxtrain,torch --quick

Everything is as in ``step.py``, except that each model has a batch of its own. The last sentence compares with the
faster of the other peers at each model: PyTorch eager and compiled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import step
from harness import ForeignLoad, Interpreters, Measurement, warn_when_busy, write_report
from peers import Task
from zoo_models import ZOO, ZooModel

PEERS = ("onnxtrain", "torch", "torch-compile")


def main(
    arguments: Sequence[str] | None = None,
    models: Mapping[str, ZooModel] = ZOO,
    description: str | None = __doc__,
) -> int:
    """Measure, print the report and write it."""
    options = step.parse(arguments, models, PEERS, description)
    warn_when_busy()
    interpreters = Interpreters(dict(entry.split("=", 1) for entry in options.environment))
    measurements = []
    with ForeignLoad() as foreign:
        for name in options.models:
            for batch in options.batch or [models[name].size]:
                tasks = [Task(peer, name, batch, options.threads, options.folder) for peer in options.peers]
                found = step.compare(
                    tasks, interpreters, options.rounds, options.round_seconds, options.reference, options.clock
                )
                measurements.append((name, batch, found))
                step.print_progress(name, batch, found)
    parts = [step.report(measurements, options, foreign)]
    if line := against_fastest([found for _, _, found in measurements], options):
        parts.append(line)
    write_report("\n\n".join(parts), options.output)
    return 0


def against_fastest(measured: Sequence[dict[str, Measurement]], options: argparse.Namespace) -> str:
    """One sentence on onnxtrain's time against the faster of the others, or "" if there is nothing to compare."""
    ratios = []
    for found in measured:
        results = {peer: found[peer] for peer in PEERS if peer in found and not found[peer].problem}
        if mine := results.pop("onnxtrain", None):
            ratios += [max(mine.ratio_to(other) for other in results.values())] if results else []
    if len(options.peers) < 3 or not ratios:
        return ""
    mean = step.geometric_mean(ratios)
    return f"Against the faster of the others at each model: geometric mean {mean:.2f}, worst {max(ratios):.2f}."


if __name__ == "__main__":
    sys.exit(main())
