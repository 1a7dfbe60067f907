"""The time that a step's multiplications, bytes and node calls must take on this machine, and the share reached.

    python benchmarks/limits.py --output build/benchmarks/limits.md
    python benchmarks/limits.py --models resnet18,vgg_1 --threads 2
    python benchmarks/limits.py --models vit_b16,bert_base,gpt2_small,llama_110m,resnet50 --batch 2 --steps 3

Three peaks are measured in onnxruntime first: the rate of one large product, the rate of a stream of a working set's
size, and the time of a node without work. The limit of a node is the longer of its multiplications at the first rate
and the bytes of its inputs and outputs at the second, plus a call; that of a step is the sum over its nodes. The share
is the limit over the time taken, the least of several steps (on one thread in processor time), so that other programs
matter little. Multiplications are those of the definition: Winograd's are fewer, so a convolution may take less than
its limit. A model below the goal is not slow for that: the limit counts no exponential and no division.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from arithmetic import clock, fastest_rate
from harness import (
    ForeignLoad,
    Interpreters,
    load_line,
    machine_line,
    make_parser,
    milliseconds,
    prepare,
    table,
    write_report,
)
from models import MODELS
from onnx import TensorProto, helper
from peers import Task, batches, onnxtrain_trainer
from real_models import REAL
from step import geometric_mean, listed
from zoo_models import ZOO

STREAMS = (1 << 16, 1 << 19, 1 << 22, 1 << 26)
"""Bytes of the working sets whose streams are measured: of caches, and of memory."""

CALLS = 200
"""Nodes of the chain that measures a call."""

GOAL = 0.6
WARM_UP = 2

Shape = Sequence[int]


@dataclass(frozen=True)
class Peaks:
    """Peaks of the machine: operations per second, bytes per second by working set, seconds of a call."""

    operations: float
    streams: Mapping[int, float]
    call: float

    def seconds(self, multiplications: float, size: float) -> float:
        """The least time of one node."""
        fitting = [rate for stream, rate in self.streams.items() if stream <= size]
        rate = fitting[-1] if fitting else max(self.streams.values())
        return max(2.0 * multiplications / self.operations, size / rate) + self.call


@dataclass(frozen=True)
class Node:
    """One node of a step: its operator, the seconds taken, and its limit in parts."""

    operator: str
    seconds: float
    multiplications: float
    size: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report and write it."""
    known = {**ZOO, **MODELS, **REAL}
    parser = make_parser(__doc__, "two steps: a test run", threads=1, models=True)
    parser.add_argument("--models", type=listed(known), default=list(ZOO), help=", ".join(known))
    parser.add_argument("--batch", type=int, help="instead of a zoo model's own, and of 8 for others")
    parser.add_argument("--steps", type=int, default=7, help="profiled steps (7)")
    options = parser.parse_args(arguments)
    steps = 2 if options.quick else options.steps
    with ForeignLoad() as foreign:
        peaks = measure_peaks(options.threads)
        found = {}
        for name in options.models:
            batch = options.batch or getattr(known[name], "size", 8)
            task = Task("onnxtrain", name, batch, options.threads, options.folder)
            if missing := prepare([task], Interpreters()):
                raise SystemExit(f"{name} cannot be exported: {missing['onnxtrain']}")
            found[name] = measure_step(task, steps)
            print(*model_row(name, *found[name], peaks), sep="  ", file=sys.stderr, flush=True)
    write_report(report(found, peaks, options.threads, steps, foreign), options.output)
    return 0


def report(
    found: Mapping[str, tuple[float, list[Node]]], peaks: Peaks, threads: int, steps: int, foreign: ForeignLoad
) -> str:
    """Both tables: by model, and by operator over all of them."""
    header = ["model", "step, ms", "products, ms", "bytes, ms", "calls, ms", "limit, ms", "share", "most beyond it"]
    rows = [model_row(name, *result, peaks) for name, result in found.items()]
    shares = [share(seconds, nodes, peaks) for seconds, nodes in found.values()]
    below = sum(each < GOAL for each in shares)
    streams = ", ".join(f"{rate / 1e9:.0f} GB/s at {size >> 10} KiB" for size, rate in peaks.streams.items())
    return "\n\n".join(
        [
            f"One product {peaks.operations / 1e9:.0f} GFLOP/s; a stream {streams}; a call {1e6 * peaks.call:.1f} µs.",
            table(header, rows),
            f"Share of the limit: geometric mean {geometric_mean(shares):.2f}; {below} of {len(shares)} models are "
            f"below {GOAL}.",
            table(
                ["operator", "nodes", "ms", "limit, ms", "share"],
                operator_rows([node for _, nodes in found.values() for node in nodes], peaks),
            ),
            f"{machine_line()} {threads} {'thread' if threads == 1 else 'threads'}; the least of {steps} steps. "
            f"{load_line(foreign)}",
        ]
    )


def model_row(name: str, seconds: float, nodes: Sequence[Node], peaks: Peaks) -> list[str]:
    """A row of the first table; its last cell names the operators that lose most."""
    products = sum(2.0 * node.multiplications / peaks.operations for node in nodes)
    stream = sum(peaks.seconds(0.0, node.size) - peaks.call for node in nodes)
    losses: dict[str, float] = defaultdict(float)
    for node in nodes:
        losses[node.operator] += node.seconds - peaks.seconds(node.multiplications, node.size)
    worst = sorted(losses.items(), key=lambda item: -item[1])[:3]
    beyond = ", ".join(f"{operator} {milliseconds(lost)}" for operator, lost in worst if lost > 0)
    parts = (seconds, products, stream, len(nodes) * peaks.call, limit(nodes, peaks))
    return [name, *map(milliseconds, parts), f"{share(seconds, nodes, peaks):.2f}", beyond]


def operator_rows(nodes: Sequence[Node], peaks: Peaks, longest: int = 25) -> list[list[str]]:
    """Rows of the second table, the longest first."""
    groups: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        groups[node.operator].append(node)
    order = sorted(groups.items(), key=lambda item: -sum(node.seconds for node in item[1]))
    rows = []
    for operator, group in order[:longest]:
        taken, least = sum(node.seconds for node in group), limit(group, peaks)
        rows.append([operator, str(len(group)), milliseconds(taken), milliseconds(least), f"{least / taken:.2f}"])
    return rows


def limit(nodes: Sequence[Node], peaks: Peaks) -> float:
    """The least seconds of some nodes."""
    return sum(peaks.seconds(node.multiplications, node.size) for node in nodes)


def share(seconds: float, nodes: Sequence[Node], peaks: Peaks) -> float:
    """The share of the limit that a step reaches."""
    return limit(nodes, peaks) / seconds


# Steps


def measure_step(task: Task, steps: int) -> tuple[float, list[Node]]:
    """The least seconds of a step without a profile, and its nodes with the least seconds of each."""
    batch = batches(task)
    trainer = onnxtrain_trainer(task)
    now = clock(task.threads)
    taken = [_timed(partial(trainer.train_step, *batch(step)), now) for step in range(WARM_UP + 2 * steps)]
    with tempfile.TemporaryDirectory() as folder:
        profiled = onnxtrain_trainer(task, profile=str(Path(folder) / "profile"))
        for step in range(WARM_UP + steps):
            profiled.train_step(*batch(step))
        session = profiled.executor.session._steps[0]._session
        events = json.loads(Path(session.end_profiling()).read_text())
    return min(taken[WARM_UP:]), nodes_of(events)


def nodes_of(events: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The nodes in a profile of onnxruntime's; a node inside a loop counts as often as it runs in one step."""
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs[event["name"], event["args"]["op_name"]].append(event)
    found = []
    for (_, operator), each in runs.items():
        arguments = each[-1]["args"]
        inputs, outputs = (
            [_array(item) for item in arguments[key]] for key in ("input_type_shape", "output_type_shape")
        )
        given, results = ([shape for _, shape in part] for part in (inputs, outputs))
        products = PRODUCTS.get(operator)
        found.append(
            Node(
                operator,
                min(event["dur"] for event in each) / 1e6,
                0.0 if products is None else products(given, results),
                0 if operator in VIEWS else sum(width * math.prod(shape) for width, shape in (*inputs, *outputs)),
            )
        )
    return found


def _array(item: Mapping[str, Shape]) -> tuple[int, Shape]:
    """Bytes of an element, and the shape."""
    if not item:
        return 0, (0,)
    ((kind, shape),) = item.items()
    if kind in ("bfloat16", "float16"):
        return 2, shape
    names = {"float": "float32", "double": "float64", "string": "O"}
    return np.dtype(names.get(kind, kind)).itemsize, shape


def _timed(call: Callable[[], object], now: Callable[[], float]) -> float:
    begin = now()
    call()
    return now() - begin


# Multiplications of a node, from the shapes of its inputs and outputs

Count = Callable[[Sequence[Shape], Sequence[Shape]], float]

VIEWS = ("Reshape", "Shape", "Size", "Flatten", "Squeeze", "Unsqueeze", "Identity")
"""Operators that read no element."""


def _matmul(given: Sequence[Shape], results: Sequence[Shape]) -> float:
    rows = math.prod(results[0]) // max(1, results[0][-1])
    return math.prod(given[0]) / max(1, rows) * math.prod(results[0])


def _linear_gradient(given: Sequence[Shape], results: Sequence[Shape]) -> float:
    both = 1 + (len(results) > 1 and len(results[1]) == 2)
    return both * math.prod(given[0]) * results[0][-1]


def _attention(products: int) -> Count:
    def count(given: Sequence[Shape], _: Sequence[Shape]) -> float:
        first = given[products > 2]
        (batch, queries), (heads, width) = first[:2], first[-2:]
        keys = queries if len(first) == 5 else given[1 + (products > 2)][1]  # packed: of as many positions
        return products * batch * heads * queries * keys * width

    return count


def _recurrent(given: Sequence[Shape], _: Sequence[Shape]) -> float:
    steps, batch, _ = given[0]
    return steps * batch * (math.prod(given[1]) + math.prod(given[2]))


def _recurrent_gradient(given: Sequence[Shape], _: Sequence[Shape]) -> float:
    steps, batch, _ = given[0]
    return steps * batch * math.prod(given[2])  # from step to step; the others are in a node of their own


def _recurrent_products(given: Sequence[Shape], results: Sequence[Shape]) -> float:
    rows = math.prod(given[0][:2])
    weights = sum(math.prod(shape) for shape in results if len(shape) == 3 and tuple(shape[:2]) != tuple(given[0][:2]))
    inputs = math.prod(given[1]) if any(tuple(shape) == tuple(given[0]) for shape in results) else 0
    return rows * (weights + inputs)


PRODUCTS: dict[str, Count] = {
    **dict.fromkeys(("MatMul", "Gemm", "FusedMatMul", "FusedGemm"), _matmul),
    "Linear": lambda given, results: math.prod(results[0]) * given[0][-1],
    "LinearGradient": _linear_gradient,
    "LinearWeightGradient": lambda given, _: math.prod(given[0]) * given[1][-1],
    **dict.fromkeys(("Conv", "FusedConv"), lambda given, results: math.prod(results[0]) * math.prod(given[1][1:])),
    **dict.fromkeys(
        ("ConvTranspose", "ConvInputGradient"), lambda given, _: math.prod(given[0]) * math.prod(given[1][1:])
    ),
    "ConvWeightGradient": lambda given, results: math.prod(given[0]) * math.prod(results[0][1:]),
    **dict.fromkeys(("Attention", "PackedAttention"), _attention(2)),
    **dict.fromkeys(
        ("AttentionGradient", "PackedAttentionGradient"), _attention(5)
    ),  # the scores once more, and a product for dv, dp, dq and dk each
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("LSTMGradient", "GRUGradient", "RNNGradient"), _recurrent_gradient),
    "RecurrentProductsGradient": _recurrent_products,
}


# The machine


def measure_peaks(threads: int) -> Peaks:
    """Measure the three peaks, the best of many."""
    streams = {size: stream_rate(threads, size) for size in STREAMS}
    return Peaks(fastest_rate(threads), streams, call_seconds(threads))


def stream_rate(threads: int, size: int, repeats: int = 30) -> float:
    """Bytes per second of an elementwise node in a chain of four, whose input and output have ``size`` bytes."""
    nodes = [helper.make_node("Relu", [f"x{index}"], [f"x{index + 1}"]) for index in range(4)]
    count = size // 8
    session, feeds = _session(nodes, "x0", "x4", count, threads)
    bound = session.io_binding()
    bound.bind_cpu_input("x0", feeds)
    bound.bind_output("x4")
    seconds = min(_timed(lambda: session.run_with_iobinding(bound), clock(threads)) for _ in range(repeats))
    return 4 * size / seconds


def call_seconds(threads: int) -> float:
    """Seconds of a node without work: the difference of a chain and one half as long."""

    def chain(length: int) -> float:
        nodes = [helper.make_node("Relu", [f"x{index}"], [f"x{index + 1}"]) for index in range(length)]
        session, feeds = _session(nodes, "x0", f"x{length}", 1, threads)
        return min(_timed(lambda: session.run(None, {"x0": feeds}), clock(threads)) for _ in range(200))

    return max(1e-9, statistics.median((chain(2 * CALLS) - chain(CALLS)) / CALLS for _ in range(3)))


def _session(
    nodes: Sequence[Any], first: str, last: str, count: int, threads: int
) -> tuple[onnxruntime.InferenceSession, np.ndarray]:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [count]) for name in (first, last))
    model = helper.make_model(
        helper.make_graph(nodes, "peak", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, np.ones(count, np.float32)


if __name__ == "__main__":
    sys.exit(main())
