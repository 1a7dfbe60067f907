"""LeNet-300-100 pruned by SSGD to one weight in 68, in stages, with the settings of benchmarks/pruning.py."""

from __future__ import annotations

from dataclasses import replace

from pruning import RECIPES, Task, quick, run


def train(options, seed: int) -> dict[str, float]:
    """Prune, and return the test error and the compression of the written file."""
    spec = next(spec for spec in RECIPES if spec.model == "lenet_300_100")
    spec = replace(quick(spec), examples=6000) if options.quick else replace(spec, stages=spec.stages[:3])
    outcome = run(Task(options.folders["mnist"], spec, "ssgd", seed))[-1]
    return {"test error, %": outcome.error, "compression": outcome.compression}
