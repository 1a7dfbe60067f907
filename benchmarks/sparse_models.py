"""Pruned models with onnxtrain's sparse kernels against dense float32 and dense int8 in ONNX Runtime.

    python benchmarks/sparse_models.py [--quick] [--only NAME] [--threads 1 2] [--deepsparse PYTHON] [--output FILE.md]
    python benchmarks/sparse_models.py --model PRUNED.onnx                   # a pruned file at batches 1, 8 and 32

Each row is one model: weights are zero at random, alone or in blocks of 4 or 16 outputs, in the shares that its name
says. The sessions of a row take turns in one process; times are the process's with one thread, which other programs do
not lengthen, and the clock's with more; ratios are medians of pairs. Beside them stands the roofline: the
multiply-adds with dense weights by those that remain, these, and the bytes of weights that the sparse model reads.

DeepSparse 1.8 needs an environment of its own (`pip install --no-deps deepsparse==1.8.0`, then the packages that its
import names); its process takes turns with this one.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import onnxtrain

FLOAT = onnx.TensorProto.FLOAT

ASLEEP = 0.1
"""Seconds after which the threads of a session that has nothing to do sleep."""


@dataclass(frozen=True)
class Case:
    """A model with pruned weights, and the shape of its input."""

    name: str
    model: onnx.ModelProto
    shape: tuple[int, ...]


class Network:
    """Builds a model node by node."""

    def __init__(self, zeros: float, block: int, seed: int = 0) -> None:
        self.zeros, self.block = zeros, block
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def weight(self, *shape: int, zeros: float | None = None) -> np.ndarray:
        """Return a weight [outputs, ...] of which that share is zero."""
        zeros = self.zeros if zeros is None else zeros
        block = self.block if shape[0] % self.block == 0 else 1
        kept = self._rng.random((shape[0] // block, 1, *shape[1:])) >= zeros
        scale = np.sqrt(2 / (np.prod(shape[1:]) * (1 - zeros)))
        weight = self._rng.standard_normal((shape[0] // block, block, *shape[1:])) * kept * scale
        return weight.reshape(shape).astype(np.float32)

    def put(self, array: np.ndarray) -> str:
        """Add a tensor and return its name."""
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        """Add a node and return its result's name."""
        name = f"v{len(self._nodes)}"
        self._nodes.append(
            helper.make_node(operator, inputs, [name], name=f"{operator}{len(self._nodes)}", **attributes)
        )
        return name

    def linear(self, x: str, inputs: int, outputs: int, zeros: float | None = None) -> str:
        """Add a linear layer."""
        product = self.add("MatMul", x, self.put(self.weight(outputs, inputs, zeros=zeros).T))
        return self.add("Add", product, self.put(self._rng.standard_normal(outputs).astype(np.float32) * 0.1))

    def convolution(
        self,
        x: str,
        inputs: int,
        outputs: int,
        size: int,
        stride: int,
        zeros: float | None = None,
        pad: int | None = None,
    ) -> str:
        """Add a convolution with a bias, padded by half its size unless told."""
        weight = self.put(self.weight(outputs, inputs, size, size, zeros=zeros))
        bias = self.put(self._rng.standard_normal(outputs).astype(np.float32) * 0.1)
        window = {
            "kernel_shape": [size, size],
            "strides": [stride, stride],
            "pads": [size // 2 if pad is None else pad] * 4,
        }
        return self.add("Conv", x, weight, bias, **window)

    def gelu(self, x: str) -> str:
        """Add x (1 + erf(x / sqrt(2))) / 2."""
        root, one, half = (self.put(np.array(value, np.float32)) for value in (2**0.5, 1, 0.5))
        slope = self.add("Add", self.add("Erf", self.add("Div", x, root)), one)
        return self.add("Mul", self.add("Mul", x, slope), half)

    def model(self, shape: tuple[int, ...], y: str) -> onnx.ModelProto:
        """Return the model from ``x`` to a result."""
        self._nodes[-1].output[0] = "y"
        graph = helper.make_graph(
            self._nodes,
            "network",
            [helper.make_tensor_value_info("x", FLOAT, shape)],
            [helper.make_tensor_value_info("y", FLOAT, None)],
            self._weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def product(rows: int, size: int, zeros: float, block: int) -> Case:
    """One linear layer."""
    network = Network(zeros, block)
    made = network.model((rows, size), network.linear("x", size, size))
    return Case(f"{size} x {size}, batch {rows}, {zeros:.0%}, {block}x1", made, (rows, size))


def lenet(rows: int) -> Case:
    """LeNet-300-100 with one weight in 68 left, spread at random over its layers by their sizes to the power 1/2."""
    network = Network(0, 1)
    layers = [(784, 300), (300, 100), (100, 10)]
    share = [np.sqrt(inputs * outputs) for inputs, outputs in layers]
    left = [
        min(inputs * outputs, part / sum(share) * 266_200 / 68)
        for part, (inputs, outputs) in zip(share, layers, strict=True)
    ]
    x = "x"
    for count, (inputs, outputs) in zip(left, layers, strict=True):
        x = network.linear(x, inputs, outputs, zeros=1 - count / (inputs * outputs))
        x = network.add("Relu", x) if outputs > 10 else x
    return Case(f"LeNet-300-100, 68x, batch {rows}", network.model((rows, 784), x), (rows, 784))


def lenet5(rows: int) -> Case:
    """LeNet-5 (Caffe's) with one weight in 280 left, spread like those of LeNet-300-100."""
    network = Network(0, 1)
    sizes = np.array([20 * 25, 50 * 20 * 25, 500 * 800, 10 * 500])
    zeros = 1 - np.sqrt(sizes) / np.sqrt(sizes).sum() * 430_500 / 280 / sizes
    pool = {"kernel_shape": [2, 2], "strides": [2, 2]}
    x = network.add("MaxPool", network.convolution("x", 1, 20, 5, 1, zeros[0], pad=0), **pool)
    x = network.add("MaxPool", network.convolution(x, 20, 50, 5, 1, zeros[1], pad=0), **pool)
    x = network.add("Relu", network.linear(network.add("Flatten", x), 800, 500, zeros[2]))
    shape = (rows, 1, 28, 28)
    return Case(f"LeNet-5, 280x, batch {rows}", network.model(shape, network.linear(x, 500, 10, zeros[3])), shape)


def bert_layer(zeros: float, block: int, tokens: int = 128, width: int = 768, heads: int = 12) -> Case:
    """One layer of a BERT-base: attention and feed-forward, with residual sums and layer normalization."""
    network = Network(zeros, block)
    split = network.put(np.array([1, tokens, heads, width // heads], np.int64))
    joined = network.put(np.array([1, tokens, width], np.int64))
    ones, none = network.put(np.ones(width, np.float32)), network.put(np.zeros(width, np.float32))
    q, k, v = (network.add("Reshape", network.linear("x", width, width), split) for _ in range(3))
    q, v = (network.add("Transpose", each, perm=[0, 2, 1, 3]) for each in (q, v))
    scores = network.add("MatMul", q, network.add("Transpose", k, perm=[0, 2, 3, 1]))
    scaled = network.add("Mul", scores, network.put(np.float32((width // heads) ** -0.5).reshape(())))
    mixed = network.add("MatMul", network.add("Softmax", scaled, axis=-1), v)
    mixed = network.add("Reshape", network.add("Transpose", mixed, perm=[0, 2, 1, 3]), joined)
    attended = network.add("Add", network.linear(mixed, width, width), "x")
    attended = network.add("LayerNormalization", attended, ones, none, axis=-1)
    hidden = network.gelu(network.linear(attended, width, 4 * width))
    y = network.add("Add", network.linear(hidden, 4 * width, width), attended)
    y = network.add("LayerNormalization", y, ones, none, axis=-1)
    shape = (1, tokens, width)
    return Case(f"BERT-base layer, {tokens} tokens, {zeros:.0%}, {block}x1", network.model(shape, y), shape)


def resnet18(zeros: float, block: int) -> Case:
    """ResNet-18 with folded batch normalization; the first convolution and the classifier are dense."""
    network = Network(zeros, block)
    x = network.add("Relu", network.convolution("x", 3, 64, 7, 2, zeros=0.0))
    x = network.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    inputs = 64
    for outputs in (64, 128, 256, 512):
        for block_number in range(2):
            stride = 2 if block_number == 0 and outputs > 64 else 1
            hidden = network.add("Relu", network.convolution(x, inputs, outputs, 3, stride))
            shortcut = x if stride == 1 else network.convolution(x, inputs, outputs, 1, stride)
            x = network.add("Relu", network.add("Add", network.convolution(hidden, outputs, outputs, 3, 1), shortcut))
            inputs = outputs
    x = network.add("Flatten", network.add("GlobalAveragePool", x))
    shape = (1, 3, 224, 224)
    return Case(
        f"ResNet-18, 224 px, {zeros:.0%}, {block}x1", network.model(shape, network.linear(x, 512, 1000, 0.0)), shape
    )


def pruned_file(path: Path, rows: int) -> Case:
    """A pruned model with its own weights, at this size of its first axis."""
    model = onnx.load(path)
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    sizes[0].dim_value = rows
    weights = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer if len(tensor.dims) > 1]
    compression = sum(weight.size for weight in weights) / sum(np.count_nonzero(weight) for weight in weights)
    shape = tuple(size.dim_value for size in sizes)
    return Case(f"{path.stem}, {compression:.0f}x, own weights, batch {rows}", model, shape)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "product": lambda: (product(32, 768, 0.9, block) for block in (1, 4, 16)),
    "lenet": lambda: (make(rows) for make in (lenet, lenet5) for rows in (1, 8, 32)),
    "bert": lambda: (bert_layer(zeros, block) for block in (1, 4) for zeros in (0.8, 0.9)),
    "resnet": lambda: (resnet18(zeros, block) for block in (1, 4) for zeros in (0.9, 0.95)),
}


def roofline(dense: onnx.ModelProto, sparse: onnx.ModelProto) -> tuple[float, float, float]:
    """Return the multiply-adds with constant weights, those that remain, and the bytes of the compiled weights."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in dense.graph.initializer}
    graph = onnx.shape_inference.infer_shapes(dense).graph
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    all_of_them = remaining = 0
    for node in dense.graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or node.input[1] not in weights:
            continue
        weight, y = weights[node.input[1]], shapes[node.output[0]]
        turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        outputs = weight.shape[0] if node.op_type == "Conv" or turned else weight.shape[1]
        rows = int(np.prod(y)) // outputs
        all_of_them += weight.size * rows
        remaining += np.count_nonzero(weight) * rows
    return all_of_them, remaining, sum(numpy_helper.to_array(tensor).nbytes for tensor in sparse.graph.initializer)


def session(path: Path, threads: int, *, kernels: bool = False) -> onnxruntime.InferenceSession:
    """Return a session, with the library of kernels or without it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if kernels:
        options.register_custom_ops_library(str(onnxtrain.custom_ops_library()))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def seconds(one: onnxruntime.InferenceSession, x: np.ndarray, calls: int) -> float:
    """Return the seconds of one call.

    Threads of the session before, which wait actively for some time, are given the time to fall asleep.
    """
    feeds = {one.get_inputs()[0].name: x}
    clock = time.process_time
    if one.get_session_options().intra_op_num_threads > 1:
        clock = time.perf_counter
        time.sleep(ASLEEP)
        one.run(None, feeds)
    start = clock()
    for _ in range(calls):
        one.run(None, feeds)
    return (clock() - start) / calls


DEEPSPARSE = """
import sys, time
import numpy as np
from deepsparse import Engine
shape = [int(size) for size in sys.argv[2].split(",")]
engine = Engine(model=sys.argv[1], batch_size=shape[0], num_cores=int(sys.argv[3]))
x = [np.random.default_rng(1).standard_normal(shape).astype(np.float32)]
for _ in range(5):
    engine.run(x)
clock = time.process_time if sys.argv[3] == "1" else time.perf_counter
print("ready", flush=True)
for line in sys.stdin:
    start = clock()
    for _ in range(int(line)):
        engine.run(x)
    print((clock() - start) / int(line), flush=True)
"""


class DeepSparse:
    """DeepSparse in a process of its own; ``None`` for a model that it does not run."""

    def __init__(self, python: str, model: Path, shape: tuple[int, ...], threads: int) -> None:
        command = [python, "-c", DEEPSPARSE, str(model), ",".join(map(str, shape)), str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, **pipes)
        self.runs = self._answer() == "ready"

    def _answer(self) -> str:
        for line in self._process.stdout:
            word = line.strip()
            if word == "ready" or word.replace(".", "").replace("e-", "").isdigit():
                return word
        return ""

    def seconds(self, calls: int) -> float:
        """Return the seconds of one call."""
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def measure(case: Case, thread_counts: list[int], rounds: int, folder: Path, deepsparse: str | None) -> Iterator[str]:
    """Yield the row of a model for each number of threads."""
    x = np.random.default_rng(1).standard_normal(case.shape).astype(np.float32)
    dense, fast, small = (folder / f"{name}.onnx" for name in ("dense", "fast", "int8"))
    onnx.save(case.model, dense)
    result = onnxtrain.compile_sparse(dense, fast)
    onnx.save(onnxtrain.quantize(case.model, x), small)
    every, left, size = roofline(case.model, onnx.load(fast))
    compiled = sum(layer.compiled for layer in result.layers)
    for threads in thread_counts:
        sessions = [
            session(dense, threads),
            session(small, threads),
            session(fast, threads, kernels=True),
            session(fast, threads),
        ]
        expected, found = (one.run(None, {one.get_inputs()[0].name: x})[0] for one in (sessions[0], sessions[2]))
        error = float(np.abs(expected - found).max() / np.abs(expected).max())
        calls = [max(1, int(0.02 / max(1e-6, seconds(one, x, 3)))) for one in sessions]
        peer = DeepSparse(deepsparse, dense, case.shape, threads) if deepsparse else None
        times, peers = [], []
        for _ in range(rounds):
            times.append([seconds(one, x, count) for one, count in zip(sessions, calls, strict=True)])
            if peer is not None and peer.runs:
                peers.append(times[-1][0] / peer.seconds(calls[2]))
        if peer is not None:
            peer.close()
        other = f"{statistics.median(peers):.2f}" if peers else ""
        ratios = [statistics.median(row[0] / row[index] for row in times) for index in (1, 2, 3)]
        yield (
            f"| {case.name} | {threads} | {statistics.median(row[0] for row in times) * 1e3:.3f} | {ratios[0]:.2f} | "
            f"{ratios[1]:.2f} | {ratios[2]:.2f} | {other} | {compiled} of {len(result.layers)} | {every / left:.1f} | "
            f"{left / 1e6:.3g} | {size / 1e6:.3g} | {fast.stat().st_size / dense.stat().st_size:.2f} | {error:.0e} |"
        )


HEADER = (
    "| model | threads | dense, ms | dense int8 | sparse | the same file without the library | DeepSparse | "
    "sparse layers | bound by multiply-adds | multiply-adds, millions | weights, MB | file by dense file | error |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def instruction_sets() -> str:
    """Return those of the processor that matter here."""
    flags = Path("/proc/cpuinfo")
    words = set(flags.read_text().split()) if flags.exists() else set()
    names = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "amx_int8": "AMX", "asimd": "NEON"}
    return ", ".join(name for flag, name in names.items() if flag in words) or platform.machine()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small model and three rounds")
    parser.add_argument("--only", choices=list(CASES), help="models of this kind")
    parser.add_argument("--model", type=Path, metavar="PRUNED.onnx", help="measure this file instead")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--deepsparse", metavar="PYTHON", help="the interpreter of an environment with DeepSparse 1.8")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    arguments = parser.parse_args()
    lines = [
        f"{harness.machine_line()} Instruction sets: {instruction_sets()}. Times dense float32:",
        "",
        *HEADER,
    ]
    print("\n".join(lines))
    kinds = ["lenet"] if arguments.quick else [arguments.only] if arguments.only else list(CASES)
    cases = (case for kind in kinds for case in CASES[kind]())
    if arguments.model:
        cases = (pruned_file(arguments.model, rows) for rows in (1, 8, 32))
    threads, rounds = ([1], 3) if arguments.quick else (arguments.threads, arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            for row in measure(case, threads, rounds, Path(folder), arguments.deepsparse):
                lines.append(row)
                print(row, flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
