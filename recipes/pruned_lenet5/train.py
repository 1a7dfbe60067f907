"""LeNet-5 trained, then pruned by SSGD to one weight in 280, in stages, with the settings of benchmarks/pruning.py."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from pruning import RECIPES, Stage, Task, run


def train(options, seed: int) -> dict[str, float]:
    """Train, prune, and return the test errors and the compression of the written files."""
    spec = next(spec for spec in RECIPES if spec.model == "lenet5_caffe")
    if options.quick:
        spec = replace(spec, stages=(Stage(20, 1, 1),), dense_epochs=(1, 1), examples=1500)
    with tempfile.TemporaryDirectory() as folder:
        pruned = Task(options.folders["mnist"], spec, "ssgd", seed, folder=Path(folder))
        (dense,), (*_, outcome) = run(pruned.dense()), run(pruned)
    return {
        "test error before, %": dense.error,
        "test error, %": outcome.error,
        "compression": outcome.compression,
    }
