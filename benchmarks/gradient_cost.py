"""Cost of a gradient before the first step: nodes, build time and session creation.

    python benchmarks/gradient_cost.py
    python benchmarks/gradient_cost.py --environment earlier=PYTHON    # in turns with another version of onnxtrain

Building is everything from the loaded file to the step graph: reading, shapes, loss, gradient rules, optimizer
and clean-up. The deep model of 2,000 nodes shows the scaling; its goal is a session in less than 3 seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from harness import (
    ForeignLoad,
    Interpreters,
    environment,
    last_line,
    load_line,
    machine_line,
    make_parser,
    prepare,
    significant,
    table,
    warn_when_busy,
    write_report,
)
from models import LOSS, MODELS
from peers import Task

import onnxtrain
from onnxtrain.lowering.lower import lower_entry, merge_algorithm
from onnxtrain.model_file.file import ModelFile
from onnxtrain.runtime.step import create_session

GOAL_SECONDS = 3.0
DEEP = "deep"
DEEP_NODES = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "build once: a test run", threads=2, models=True)
    parser.add_argument("--models", default=",".join([*MODELS, DEEP]), help=f"{', '.join(MODELS)}, {DEEP}")
    parser.add_argument("--runs", type=int, help="how often each is built (5)")
    parser.add_argument("--environment", metavar="earlier=PYTHON", help="compare with the onnxtrain of that Python")
    options = parser.parse_args(arguments)
    runs = options.runs or (1 if options.quick else 5)
    warn_when_busy()
    rows, problems, verdict = [], [], ""
    with ForeignLoad() as foreign:
        for name in options.models.split(","):
            title, source = load(name, options)
            try:
                row, seconds = cost(source, runs, options.threads)
                if options.environment:
                    row += compare(name, source, runs, options)
            except onnxtrain.errors.OnnxTrainError as error:
                problems.append(f"- {title}: {error}")
                continue
            rows.append([title, *row])
            if name == DEEP:
                word = "reached" if seconds < GOAL_SECONDS else "missed"
                verdict = f"Goal for {title}: its session in less than {GOAL_SECONDS:g} s: {word}.\n\n"
    header = [
        "model",
        "nodes",
        "step graph, kernels",
        "standard operators only",
        "build, s",
        "session, s",
        "whole Trainer, s",
        *(
            ["to the session, s", "earlier, s", "ratio", "processor, s", "earlier, s", "ratio"]
            if options.environment
            else []
        ),
    ]
    listed = "Not measured:\n\n" + "\n".join(problems) + "\n\n" if problems else ""
    write_report(
        f"{table(header, rows)}\n\n{verdict}{listed}{machine_line()} {options.threads} threads; medians of {runs}. "
        f"{load_line(foreign)}",
        options.output,
    )
    return 0


def load(name: str, options: argparse.Namespace) -> tuple[str, Any]:
    """A title, and the arguments of a Trainer."""
    if name == DEEP:
        # A linear layer and an activation are two nodes; the last layer has no activation.
        return f"perceptron of {DEEP_NODES} nodes", onnxtrain.examples.mlp([8] * (DEEP_NODES // 2) + [8, 10])
    task = Task("onnxtrain", name, 2, options.threads, options.folder)
    missing = prepare([task], Interpreters())
    if missing:
        raise SystemExit(f"{name} cannot be exported: {missing['onnxtrain']}")
    return MODELS[name].description, task.model_path


def cost(source: Any, runs: int, threads: int) -> tuple[list[str], float]:
    """Node counts and seconds as table cells, and the total seconds."""
    settings: dict[str, Any] = {
        "loss": LOSS,
        "optimizer": onnxtrain.Adam(),
        "batch_norm": "train",
        "untie": True,
    }
    nodes = len(ModelFile.load(source).proto.graph.node)
    options = onnxtrain.RuntimeOptions(threads=threads)
    build, session, whole = [], [], []
    for _ in range(runs):
        begin = time.perf_counter()
        trainer = onnxtrain.Trainer(source, **settings, runtime=options)
        session_of_steps = trainer.executor.session  # built at its first use
        whole.append(time.perf_counter() - begin)
        model = trainer.training_model()
        kernels = trainer.config.runtime.uses_kernels()
        step_graph = session_of_steps._steps[0].step.model
        begin = time.perf_counter()
        create_session(step_graph, trainer.config.runtime, kernels=kernels)
        session.append(time.perf_counter() - begin)
        build.append(whole[-1] - session[-1])
    with_kernels = len(step_graph.graph) if kernels else None
    standard = len(lower_entry(merge_algorithm(model, 0), kernels=False).model.graph)
    seconds = [statistics.median(times) for times in (build, session, whole)]
    cells = [str(nodes), "-" if with_kernels is None else str(with_kernels), str(standard)]
    return [*cells, *map(significant, seconds)], seconds[-1]


# User code in a separate process. Prints wall and CPU seconds, each the minimum of several runs.
PROGRAM = """
import gc, sys, time, warnings
import onnxtrain
warnings.simplefilter("ignore")
settings = dict(loss=sys.argv[2], optimizer=onnxtrain.Adam(), batch_norm="train", untie=True, threads=1)
clock, processor = [], []
for _ in range(int(sys.argv[3])):
    begin = time.perf_counter(), time.process_time()
    trainer = onnxtrain.Trainer(sys.argv[1], **settings)
    trainer.executor.session
    clock.append(time.perf_counter() - begin[0])
    processor.append(time.process_time() - begin[1])
    del trainer
    gc.collect()
print(min(clock), min(processor))
"""


def compare(name: str, source: Any, runs: int, options: argparse.Namespace) -> list[str]:
    """Seconds from the file to the session of this version and an earlier one, in turns, and their ratios."""
    kind, _, python = options.environment.partition("=")
    if kind != "earlier" or not python:
        raise SystemExit(f"--environment is earlier=PATH_OF_ITS_PYTHON, not {options.environment!r}.")
    path = source
    if name == DEEP:
        path = Path(options.folder) / "deep.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(source, path)
    own = environment(1)
    others = {key: value for key, value in own.items() if key != "PYTHONPATH"}
    found: tuple[list[list[float]], list[list[float]]] = ([], [])
    for _ in range(runs):
        for seconds, executable, variables in zip(found, (sys.executable, python), (own, others), strict=True):
            arguments = [executable, "-c", PROGRAM, str(path), LOSS, "3"]
            result = subprocess.run(arguments, capture_output=True, text=True, env=variables)
            if result.returncode:
                raise SystemExit(f"{executable} failed: {last_line(result.stderr)}")
            seconds.append([float(number) for number in result.stdout.split()])
    cells = []
    for new, old in zip(*([min(column) for column in zip(*seconds, strict=True)] for seconds in found), strict=True):
        cells += [significant(new), significant(old), f"{new / old:.2f}"]
    return cells


if __name__ == "__main__":
    sys.exit(main())
