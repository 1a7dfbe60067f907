"""Fused operators: the native kernel, its body in standard operators, and PyTorch's kernel for the same gradient.

    python benchmarks/fused.py [--only ReluGradient,ConvWeightGradient]

Sizes are those of layers in the benchmark models. The three alternate; a figure is the median over the rounds. The body
runs with ONNX Runtime's optimizations. PyTorch's kernels are called directly, without autograd.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from fused_cases import Case, Run, cases
from harness import (
    SETTLE_SECONDS,
    ForeignLoad,
    load_line,
    machine_line,
    make_parser,
    milliseconds,
    table,
    warn_when_busy,
    write_report,
)

import onnxtrain
from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.fused import emit, fused_operators
from onnxtrain.graph import Builder
from onnxtrain.graph.passes import clean
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime.step import create_session

OPSET = 18
BEST_OF = 5
SECONDS_A_ROUND = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "one round: a test run", threads=2)
    parser.add_argument("--only", help="operators, separated by commas")
    parser.add_argument("--rounds", type=int, help="rounds of turns (15)")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 15)
    import torch

    torch.set_num_threads(options.threads)
    chosen = set(options.only.split(",")) if options.only else {operator.name for operator in fused_operators()}
    warn_when_busy()
    with ForeignLoad() as foreign:
        rows = [row(case, options.threads, rounds) for case in cases() if case.operator in chosen]
    header = ["operator", "layer", "kernel, ms", "body, ms", "PyTorch, ms", "kernel / body", "kernel / PyTorch"]
    write_report(
        f"{table(header, rows)}\n\n{machine_line()} {options.threads} threads; medians of {rounds} rounds, ratios "
        f"within rounds. {load_line(foreign)}",
        options.output,
    )
    return 0


def row(case: Case, threads: int, rounds: int) -> list[str]:
    """Milliseconds of all three, and ratios."""
    import torch

    tensors = [torch.from_numpy(np.asarray(array).copy()) for array in case.inputs]
    runs = [session(case, threads, kernels=True), session(case, threads, kernels=False), case.torch(*tensors)]
    repeats = [calls_in_a_round(run) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for measured, run, count in zip(seconds, runs, repeats, strict=True):
            time.sleep(SETTLE_SECONDS)
            measured.append(best(run, count))
    kernel, body, torch_seconds = seconds
    ratios = [statistics.median(a / b for a, b in zip(kernel, other, strict=True)) for other in (body, torch_seconds)]
    return [
        f"`{case.operator}`",
        case.layer,
        *(milliseconds(statistics.median(measured)) for measured in seconds),
        *(f"{ratio:.2f}" for ratio in ratios),
    ]


def calls_in_a_round(run: Run) -> int:
    """Number of calls per round, after two warm-up calls."""
    run()
    begin = time.perf_counter()
    run()
    return max(1, min(200, int(SECONDS_A_ROUND / BEST_OF / (time.perf_counter() - begin))))


def best(run: Run, count: int) -> float:
    """Seconds of one call: the best of a few averages over ``count`` calls."""
    averages = []
    for _ in range(BEST_OF):
        begin = time.perf_counter()
        for _ in range(count):
            run()
        averages.append((time.perf_counter() - begin) / count)
    return min(averages)


def session(case: Case, threads: int, *, kernels: bool) -> Run:
    """A session of one node, or of its body, with inputs and outputs bound."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="gradient")
    op = Builder(graph, OPSET)
    arrays = {}
    values = []
    for index, array in enumerate(case.inputs):
        array = np.asarray(array)
        if index in case.constants:
            values.append(op.constant(array))
            continue
        value = ir.Value(name=f"input{index}", shape=ir.Shape(array.shape), type=ir.TensorType(ir.tensor(array).dtype))
        graph.inputs.append(value)
        arrays[f"input{index}"] = array
        values.append(op.wrap(value))
    like = [values[item] if isinstance(item, int) else op.constant(np.zeros(item, np.float32)) for item in case.like]
    outputs = emit(op, case.operator, *values, like=like, **case.attributes)
    for index, output in enumerate(outputs):
        output.ir.name = f"output{index}"
        graph.outputs.append(output.ir)
    model = ir.Model(graph, ir_version=8)
    resolve_fused(model, Backward(), kernels=kernels)
    clean(model)
    made = create_session(model, onnxtrain.RuntimeOptions(threads=threads), kernels=kernels)
    binding = made.io_binding()
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    shapes = [np.shape(case.inputs[item]) if isinstance(item, int) else item for item in case.like]
    results = [np.empty(shape, np.float32) for shape in shapes]
    for value, result in zip(graph.outputs, results, strict=True):
        binding.bind_output(str(value.name), "cpu", 0, np.float32, result.shape, result.ctypes.data)
    keep = (arrays, results)

    def run(keep: Any = keep) -> None:
        made.run_with_iobinding(binding)

    return run


if __name__ == "__main__":
    sys.exit(main())
