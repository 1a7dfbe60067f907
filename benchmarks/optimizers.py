"""Optimizer steps against the speed of memory and against PyTorch, NumPy and ONNX's reference evaluator.

    python benchmarks/optimizers.py [--quick] [--threads N] [--output benchmarks/pages/optimizers.md]

Every case is a number of float32 parameters in a number of equal tensors. The limit is measured beside the peers: a
plain vectorized loop that reads and writes the same bytes with the same threads. The peers alternate, with pauses in
which idle threads fall asleep; a figure is the median over the rounds of each round's median. Differences below 10 %
are noise.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from onnxtrain import kernels
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.operators import OPTIMIZERS as OPERATORS
from onnxtrain.runtime import native

Step = Callable[[], object]

Arrays = dict[str, list[np.ndarray]]  # X, G and states by letter

EPSILON, COUNT = 1e-6, 10  # after COUNT steps


@dataclass(frozen=True)
class Optimizer:
    """The calls of one optimizer in every peer."""

    name: str
    letters: str  # letters of the inputs after R and T
    attributes: dict[str, float | str]
    bytes: int  # bytes moved per parameter
    streams: int  # arrays that the limit's loop reads and writes, plus one that it only reads
    passes: float = 1.0  # bytes of the optimizer over bytes of that loop


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("Adagrad", "XGH", {"epsilon": EPSILON}, 20, 2),
        Optimizer("Adam", "XGVH", {"alpha": 0.9, "beta": 0.999, "epsilon": EPSILON}, 28, 3),
        Optimizer("AdamW", "XGVH", {"alpha": 0.9, "beta": 0.999, "epsilon": EPSILON, "weight_decay": 0.0}, 28, 3),
        Optimizer(
            "Momentum",
            "XGV",
            {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, "mode": "standard"},
            20,
            2,
        ),
        # X once for the mean, then X, G and X again: 16 bytes; the loop moves 12.
        Optimizer("SSGD", "XG", {"measure": "log-sum", "epsilon": 0.01}, 16, 1, 16 / 12),
    )
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    optimizer: Optimizer
    parameters: int
    tensors: int
    threads: int
    rate: float = 1e-9  # small enough to keep values nearly constant over thousands of steps

    def arrays(self) -> Arrays:
        """Random values for the optimizer's inputs."""
        rng = np.random.default_rng(0)
        count = self.parameters // self.tensors
        draw = {
            letter: [rng.standard_normal(count, np.float32) for _ in range(self.tensors)]
            for letter in self.optimizer.letters
        }
        for h in draw.get("H", ()):
            np.square(h, out=h)
        return draw


def limit(case: Case, _: Arrays) -> Step:
    """The plain loop over the same bytes; it times itself, excluding thread creation."""
    count, streams = case.parameters, case.optimizer.streams
    # Written once: untouched pages all map to one zero page, which is read from the L1 cache.
    arrays = [np.full(count, 1e-9, np.float32) for _ in range(streams + 1)]
    outputs = (ctypes.c_void_p * streams)(*(array.ctypes.data for array in arrays[1:]))
    passes = max(1, int(2e7 / count))

    def step() -> float:
        seconds: float = native.library().onnxtrain_stream(
            arrays[0].ctypes.data, outputs, streams, count, case.threads, passes
        )
        return seconds * case.optimizer.passes

    return step


def model(case: Case, groups: int = 1, averaged: bool = False) -> onnx.ModelProto:
    """One optimizer node over all tensors, or one per group of tensors, optionally with a moving average."""
    optimizer, count = case.optimizer, case.parameters // case.tensors
    outputs = optimizer.letters.replace("G", "")

    def listed(letters: str, end: str = "", first: int = 0, step: int = 1) -> list[str]:
        return [f"{letter}{i}{end}" for letter in letters for i in range(first, case.tensors, step)]

    names, new_names = listed(optimizer.letters), listed(outputs, "_new")
    average: list[onnx.NodeProto] = []
    if averaged:  # as with Trainer(ema=...)
        average = [
            helper.make_node(
                "SGD",
                ["average_rate", "T", *listed("A"), *listed("X", "_new")],
                listed("A", "_new"),
                domain=ONNXTRAIN_DOMAIN,
                weight_decay=-1.0,
            )
        ]
        names, new_names = [*names, *listed("A")], [*new_names, *listed("A", "_new")]
    domain = OPERATORS[optimizer.name].schema.domain
    attributes = {"reweighting": "l2"} if optimizer.name == "SSGD" else {}
    graph = helper.make_graph(
        [
            helper.make_node(
                optimizer.name,
                ["R", "T", *listed(optimizer.letters, "", first, groups)],
                listed(outputs, "_new", first, groups),
                domain=domain,
                **attributes,
                **optimizer.attributes,
            )
            for first in range(groups)
        ]
        + average,
        "optimizer",
        [
            helper.make_tensor_value_info("R", TensorProto.DOUBLE, []),
            helper.make_tensor_value_info("T", TensorProto.INT64, []),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [count]) for name in names),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [count]) for name in new_names],
        [helper.make_tensor("average_rate", TensorProto.DOUBLE, [], [-0.001])] if averaged else [],
    )
    opsets = [helper.make_opsetid(name, 1) for name in sorted({domain, ONNXTRAIN_DOMAIN})]
    opsets.append(helper.make_opsetid("", 17))
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def inputs(case: Case, arrays: Arrays) -> dict[str, np.ndarray]:
    """The node's inputs by name."""
    tensors = {f"{letter}{i}": array for letter, group in arrays.items() for i, array in enumerate(group)}
    return {"R": np.array(case.rate), "T": np.array(COUNT), **tensors}


def operator_in_onnxruntime(case: Case, arrays: Arrays, groups: int = 1, averaged: bool = False) -> Step | None:
    """The native operator in a session, in place; with parameter groups where there are enough tensors."""
    if groups > case.tensors:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case.threads
    options.register_custom_ops_library(str(native.custom_ops_library()))
    if averaged:
        arrays = {**arrays, "A": [array.copy() for array in arrays["X"]]}
    proto = model(case, groups, averaged).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    feeds = inputs(case, arrays)
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        if name[0] in "XVHA":
            binding.bind_output(f"{name}_new", "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def step() -> None:
        session.run_with_iobinding(binding)
        assert feeds  # bound memory

    return step


def bound_kernels(case: Case, arrays: Arrays) -> Step:
    """The same kernels on bound arrays, with threads of their own."""
    states = [array for letter in case.optimizer.letters[2:] for array in arrays[letter]]
    bound = kernels.Bound(arrays["X"], arrays["G"], states)
    update = getattr(bound, case.optimizer.name.lower())
    steps = {"step": COUNT} if OPERATORS[case.optimizer.name].schema.counted else {}
    return partial(update, learning_rate=case.rate, threads=case.threads, **steps, **case.optimizer.attributes)


def pytorch(case: Case, arrays: Arrays, form: str) -> Step | None:
    """PyTorch's optimizer in the form fused, foreach or loop; SSGD, which it lacks, as a loop of tensor operations."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(case.threads)
    parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in arrays["X"]]
    for parameter, gradient in zip(parameters, arrays["G"], strict=True):
        parameter.grad = torch.from_numpy(gradient)
    how = {"fused": form == "fused", "foreach": form == "foreach"}
    if case.optimizer.name == "Adam":
        return torch.optim.Adam(parameters, lr=case.rate, eps=EPSILON, **how).step
    if case.optimizer.name == "AdamW":
        return torch.optim.AdamW(parameters, lr=case.rate, eps=EPSILON, weight_decay=0.0, **how).step
    if case.optimizer.name == "Adagrad":
        return torch.optim.Adagrad(parameters, lr=case.rate, eps=EPSILON, **how).step
    if case.optimizer.name == "Momentum":
        return torch.optim.SGD(parameters, lr=case.rate, momentum=0.9, **how).step
    if form != "loop":
        return None

    @torch.no_grad()
    def ssgd() -> None:
        for parameter in parameters:
            squares = parameter * parameter + 0.01
            parameter.addcmul_(squares / squares.mean(), parameter.grad, value=-case.rate)

    return ssgd


def numpy_step(case: Case, arrays: Arrays) -> Step:
    """The pseudo-code in NumPy, in place, with few temporaries."""
    name, rate = case.optimizer.name, case.rate
    if name in ("Adam", "AdamW"):
        rate *= np.sqrt(1 - 0.999**COUNT) / (1 - 0.9**COUNT)
    epsilon = EPSILON * np.sqrt(1 - 0.999**COUNT) if name == "AdamW" else EPSILON
    rate, epsilon = np.float32(rate), np.float32(epsilon)
    variables = list(zip(*arrays.values(), strict=True))

    def step() -> None:
        for x, g, *states in variables:
            if name in ("Adam", "AdamW"):
                v, h = states
                v *= np.float32(0.9)
                v += np.float32(0.1) * g
                h *= np.float32(0.999)
                h += np.float32(0.001) * g * g
                x -= rate * v / (np.sqrt(h) + epsilon)
            elif name == "Adagrad":
                (h,) = states
                h += g * g
                x -= rate * g / (np.sqrt(h) + epsilon)
            elif name == "Momentum":
                (v,) = states
                v *= np.float32(0.9)
                v += g
                x -= rate * v
            else:
                squares = x * x + np.float32(0.01)
                x -= rate / squares.mean() * squares * g

    return step


def onnx_reference(case: Case, arrays: Arrays) -> Step | None:
    """ONNX's reference evaluator, for small cases of the operators that it implements."""
    if (
        OPERATORS[case.optimizer.name].schema.domain == ONNXTRAIN_DOMAIN
        or case.parameters > 1_000_000
        or case.tensors > 10
    ):
        return None
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model(case))
    feeds = inputs(case, arrays)
    return partial(evaluator.run, None, feeds)


PEERS: dict[str, Callable[[Case, Arrays], Step | None]] = {
    "limit": limit,
    "onnxtrain in ONNX Runtime": operator_in_onnxruntime,
    "onnxtrain, bound arrays": bound_kernels,
    "ORT, 2 groups": partial(operator_in_onnxruntime, groups=2),
    "ORT, 10 groups": partial(operator_in_onnxruntime, groups=10),
    "ORT, moving average": partial(operator_in_onnxruntime, averaged=True),
    "PyTorch fused": partial(pytorch, form="fused"),
    "PyTorch foreach": partial(pytorch, form="foreach"),
    "PyTorch loop": partial(pytorch, form="loop"),
    "NumPy": numpy_step,
    "ONNX reference": onnx_reference,
}


ALWAYS = tuple(PEERS)[:3]  # the limit, and what is compared with it


def turn(step: Step, seconds: float) -> float:
    """The median time of a step over about this many seconds, at least one after two warm-up steps."""
    time.sleep(0.02)  # threads of the previous peer stop spinning
    step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        own = step()
        times.append(own if isinstance(own, float) else time.perf_counter() - start)
    return statistics.median(times)


def measure(case: Case, peers: Sequence[str], rounds: int, seconds: float) -> dict[str, float]:
    """Seconds per step by peer; the peers alternate, each round in another order."""
    steps = {name: step for name in peers if (step := PEERS[name](case, case.arrays())) is not None}
    names, times = list(steps), {name: [] for name in steps}
    for round_number in range(rounds):
        for i in range(len(names)):
            name = names[(i + round_number) % len(names)]
            times[name].append(turn(steps[name], seconds))
    return {name: statistics.median(values) for name, values in times.items()}


def check(threads: int) -> None:
    """Check the native forms against NumPy before timing them."""
    for optimizer in OPTIMIZERS.values():
        case = Case(optimizer, 100_000, 10, threads, rate=0.1)
        in_session, bound, by_numpy = case.arrays(), case.arrays(), case.arrays()
        for make, arrays in (
            (operator_in_onnxruntime, in_session),
            (bound_kernels, bound),
            (numpy_step, by_numpy),
        ):
            step = make(case, arrays)
            assert step is not None
            step()
        for x, y, z in zip(in_session["X"], bound["X"], by_numpy["X"], strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-4)  # 1 - float32(0.999) is not 0.001


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Every optimizer in every useful combination of size and number of tensors."""
    sizes = [10_000, 1_000_000] if arguments.quick else [10_000, 100_000, 1_000_000, 10_000_000, 50_000_000]
    for name in arguments.optimizers:
        for parameters in sizes:
            for tensors in (1, 10, 1000):
                if parameters // tensors >= 1000 or tensors == 10:
                    yield Case(OPTIMIZERS[name], parameters, tensors, arguments.threads)


def processor() -> str:
    """The CPU's name as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def conditions(arguments: argparse.Namespace) -> str:
    """The measuring conditions in one sentence."""
    versions = [f"onnxruntime {onnxruntime.__version__}", f"NumPy {np.__version__}"]
    try:
        import torch

        versions.insert(0, f"PyTorch {torch.__version__}")
    except ImportError:
        versions.insert(0, "no PyTorch")
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"{processor()}, {os.cpu_count()} processors, {arguments.threads} threads, {native.instruction_set()} kernels, "
        f"{', '.join(versions)}; load averages at the start {load}."
    )


def microseconds(seconds: float) -> str:
    """Format with two or more significant digits."""
    return f"{seconds * 1e6:,.{0 if seconds >= 1e-5 else 1 if seconds >= 1e-6 else 2}f}"


def table(rows: list[tuple[Case, dict[str, float]]]) -> str:
    """Format the figures as a Markdown table: microseconds, and two ratios."""
    peers = [name for name in PEERS if any(name in times for _, times in rows)]
    head = ["optimizer", "parameters", "tensors", *(f"{name}, µs" for name in peers)]
    head += ["ORT: of the limit", "bound: of the limit", "ORT: 10 groups / 1", "PyTorch fused / ORT"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for case, times in rows:
        cells = [case.optimizer.name, f"{case.parameters:,}", f"{case.tensors:,}"]
        cells += [microseconds(times[name]) if name in times else "" for name in peers]
        ours = times["onnxtrain in ONNX Runtime"]
        cells += [f"{times['limit'] / ours:.2f}", f"{times['limit'] / times['onnxtrain, bound arrays']:.2f}"]
        cells += [f"{times['ORT, 10 groups'] / ours:.2f}" if "ORT, 10 groups" in times else ""]
        cells += [f"{times['PyTorch fused'] / ours:.2f}" if "PyTorch fused" in times else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two sizes and few rounds")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    others = [name for name in PEERS if name not in ALWAYS]
    parser.add_argument("--peers", nargs="*", choices=others, default=others, help="others than onnxtrain's own")
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file too")
    arguments = parser.parse_args()
    said = conditions(arguments)
    print(said)
    check(arguments.threads)
    rows = []
    for case in cases(arguments):
        rounds, seconds = (3, 0.05) if arguments.quick else (7, 0.2)
        rows.append((case, measure(case, [*ALWAYS, *arguments.peers], rounds, seconds)))
        print(table(rows[-1:]).split("\n")[-1], flush=True)
    text = f"{table(rows)}\n\nLoad averages at the end {os.getloadavg()[0]:.2f}.\n"
    print(f"\n{text}")
    if arguments.output:
        arguments.output.write_text(f"# Optimizer steps\n\n{said}\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
