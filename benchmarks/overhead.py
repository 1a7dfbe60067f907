"""Python overhead of a training step: ``Trainer.train_step`` minus a run of the same session.

    python benchmarks/overhead.py

Both run the same onnxruntime session on the same bound buffers in turns. The difference is onnxtrain's work in Python:
checking the arrays, binding them, reading the loss. Goal: below 100 microseconds.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from harness import ForeignLoad, load_line, machine_line, make_parser, table, warn_when_busy, write_report

import onnxtrain

GOAL_MICROSECONDS = 100

# Small batches and narrow layers: the overhead is per step, and arithmetic only adds noise.
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "MLP 784-512-512-10, 6 parameters": (onnxtrain.examples.mlp, (784,)),
    "LeNet-5, 10 parameters": (onnxtrain.examples.lenet5, (1, 28, 28)),
    "MLP with 75 layers of 16, 150 parameters": (lambda: onnxtrain.examples.mlp([16] * 75 + [10]), (16,)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "100 steps: a test run")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="one by default: what is measured is Python's part")
    parser.add_argument("--steps", type=int, help="steps of each kind (2000)")
    options = parser.parse_args(arguments)
    steps = options.steps or (100 if options.quick else 2000)
    warn_when_busy()
    rows, worst = [], 0.0
    with ForeignLoad() as foreign:
        for title, (build, shape) in MODELS.items():
            whole, bare, added = measure(build(), shape, options.batch, options.threads, steps)
            worst = max(worst, added)
            rows.append([title, f"{whole:.0f}", f"{bare:.0f}", f"{added:.0f}"])
    header = ["model", "train_step, µs", "session alone, µs", "added by Python, µs"]
    verdict = "reached" if worst < GOAL_MICROSECONDS else "missed"
    write_report(
        f"{table(header, rows)}\n\nGoal: below {GOAL_MICROSECONDS} µs: {verdict}.\n\n{machine_line()} "
        f"{options.threads} threads, batch {options.batch}; medians of {steps} steps. {load_line(foreign)}",
        options.output,
    )
    return 0


def measure(model: Any, shape: tuple[int, ...], batch: int, threads: int, steps: int) -> tuple[float, float, float]:
    """Median microseconds of ``train_step``, of the session's run alone after each, and of their differences."""
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-4), threads=threads)
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((batch, *shape)).astype(np.float32)
    target = generator.integers(0, 10, batch)
    for _ in range(20):
        trainer.train_step(inputs, target)
    # The session as train_step left it: running it repeats the last step.
    step = trainer.executor.session._steps[0]
    binding = next(iter(step._idle.values()))[0].binding
    run_session = step._session.run_with_iobinding
    whole, bare = [], []
    gc.collect()
    gc.disable()
    for _ in range(steps):
        begin = time.perf_counter()
        trainer.train_step(inputs, target)
        middle = time.perf_counter()
        run_session(binding)
        bare.append(time.perf_counter() - middle)
        whole.append(middle - begin)
    gc.enable()
    added = [with_python - alone for with_python, alone in zip(whole, bare, strict=True)]
    return tuple(1e6 * statistics.median(seconds) for seconds in (whole, bare, added))


if __name__ == "__main__":
    sys.exit(main())
