"""Linear layers in float32 and bfloat16: operations per CPU second.

    python benchmarks/products.py
    python benchmarks/products.py --against-torch
    python benchmarks/products.py --weight-gradients --against-torch

y = x w of the native kernels on one thread, with weights stored in float32, bfloat16 and int4, at 2 operations per
multiplication. The variants alternate; a figure is that of the fastest call in CPU time, so that other programs matter
little. bfloat16 rows are meaningful only on a CPU with AVX512-BF16. With --weight-gradients, dw = x^T dy in float32, of
layers of the zoo (zoo_models.py), each call with other arrays, which come from beyond the core's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import ml_dtypes
import numpy as np
from harness import ForeignLoad, load_line, machine_line, make_parser, table, write_report
from native_node import seconds, session_of
from onnx import helper

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

SIZES = (
    *((128, 768, 2048), (128, 768, 16000), (512, 768, 768), (512, 768, 2048), (512, 2048, 768), (512, 768, 16000)),
    (2048, 2048, 2048),
)
QUICK = ((8, 64, 64),)
GRADIENTS = (
    *((16384, 32, 32), (8192, 64, 64), (4096, 64, 256), (768, 96, 96), (512, 96, 384), (2048, 128, 128)),
    *((1024, 192, 192), (1024, 768, 192), (1024, 192, 768), (1024, 192, 1000), (1024, 256, 256), (1024, 845, 256)),
)
"""Rows, inputs and outputs."""
CACHED = 1 << 23
"""Bytes of arrays that a core's caches do not hold."""
BLOCK = 32
WAYS = {
    "float32": ("float32", "float32"),
    "bfloat16": ("float32", "bfloat16"),
    "bfloat16 of stored bfloat16": ("bfloat16", "bfloat16"),
    "float32 of 4 bits": ("4 bits", "float32"),
    "bfloat16 of 4 bits": ("4 bits", "bfloat16"),
}
"""Storage type of the weight, and compute type."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, "one small product, one round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--against-torch", action="store_true", help="also multiply by PyTorch")
    parser.add_argument("--weight-gradients", action="store_true", help="gradients of weights instead")
    options = parser.parse_args(arguments)
    rows = []
    shapes = GRADIENTS if options.weight_gradients else SIZES
    with ForeignLoad() as foreign:
        for sizes in QUICK if options.quick else shapes:
            if options.weight_gradients:
                calls = {"float32": weight_gradient(sizes)}
                if options.against_torch:
                    calls["PyTorch, float32"] = weight_gradient_of_torch(sizes)
            else:
                calls = {name: product(sizes, *way) for name, way in WAYS.items()}
                if options.against_torch:
                    calls |= {f"PyTorch, {kind}": product_of_torch(sizes, kind) for kind in ("float32", "bfloat16")}
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(1 if options.quick else options.rounds):
                for name, call in calls.items():
                    best[name] = min(best[name], seconds(call))
            operations = 2 * sizes[0] * sizes[1] * sizes[2]
            rates = [f"{operations / best[name] / 1e9:.4g}" for name in best]
            rows.append([" x ".join(f"{size:,}" for size in sizes), *rates])
    head = ["rows x inputs x outputs" if options.weight_gradients else "rows x depth x columns", *best]
    title = "GFLOP/s of one thread, by processor time"
    write_report("\n".join([title, "", table(head, rows), "", machine_line(), load_line(foreign)]), options.output)


def product_of_torch(sizes: tuple[int, int, int], kind: str) -> Callable[[], object]:
    """A call of PyTorch's y = x w, with both in one type."""
    import torch

    torch.set_num_threads(1)
    rows, depth, columns = sizes
    x, w = (torch.randn(shape).to(getattr(torch, kind)) for shape in ((rows, depth), (depth, columns)))
    return lambda: x @ w


def weight_gradient_of_torch(sizes: tuple[int, int, int]) -> Callable[[], object]:
    """A call of PyTorch's x^T dy, each with the next of some arrays."""
    import torch

    torch.set_num_threads(1)
    pairs = cycle([(torch.from_numpy(x), torch.from_numpy(dy)) for x, dy in operands(sizes)])

    def call() -> object:
        x, dy = next(pairs)
        return x.T @ dy

    return call


def weight_gradient(sizes: tuple[int, int, int]) -> Callable[[], object]:
    """A call of dw = x^T dy, each with the next of some arrays."""
    node = helper.make_node("LinearWeightGradient", ["dy", "x"], ["dw"], domain=ONNXTRAIN_DOMAIN)
    pairs = [{"dy": dy, "x": x} for x, dy in operands(sizes)]
    session, feeds = session_of(node, pairs[0]), cycle(pairs)
    return lambda: session.run(None, next(feeds))


def operands(sizes: tuple[int, int, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of x and dy, so many that the caches do not hold them."""
    rows, inputs, outputs = sizes
    random = np.random.default_rng(0)

    def draw(size: int) -> np.ndarray:
        return random.standard_normal((rows, size)).astype(np.float32)

    return [(draw(inputs), draw(outputs)) for _ in range(1 + CACHED // (4 * rows * (inputs + outputs)))]


def product(sizes: tuple[int, int, int], stored: str, compute: str) -> Callable[[], object]:
    """A call of y = x w."""
    rows, depth, columns = sizes
    random = np.random.default_rng(0)
    if stored == "4 bits":
        blocks = -(-depth // BLOCK)
        arrays = {
            "w": random.integers(0, 256, (columns, blocks, BLOCK // 2), np.uint8),
            "s": random.uniform(0.01, 0.1, (columns, blocks)).astype(np.float32),
        }
        attributes = {"K": depth, "N": columns, "bits": 4, "block_size": BLOCK}
    else:
        dtype = np.float32 if stored == "float32" else ml_dtypes.bfloat16
        arrays, attributes = {"w": random.standard_normal((depth, columns)).astype(dtype)}, {}
    operator = "MatMulNBits" if stored == "4 bits" else "Linear"
    node = helper.make_node(operator, ["x", *arrays], ["y"], domain=ONNXTRAIN_DOMAIN, compute=compute, **attributes)
    weights = [
        helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.tobytes(), raw=True)
        for name, array in arrays.items()
    ]
    feeds = {"x": random.standard_normal((rows, depth)).astype(np.float32)}
    session = session_of(node, feeds, weights)
    return lambda: session.run(None, feeds)


if __name__ == "__main__":
    main()
