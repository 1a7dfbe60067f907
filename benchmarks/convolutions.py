"""Convolutions and their gradients in float32 and bfloat16: operations per CPU second.

    python benchmarks/convolutions.py
    python benchmarks/convolutions.py --against-torch

The native kernels on one thread, at 2 operations per multiplication: y, dx and dw of layers of ResNet-18 and ResNet-50.
PyTorch computes with images in bfloat16, as they are between layers under autocast, and casts float32 weights in each
call. The variants alternate; a figure is that of the fastest call in CPU time, so that other programs matter little.
bfloat16 rows are meaningful only on a CPU with AVX512-BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from harness import ForeignLoad, load_line, machine_line, make_parser, table, write_report
from native_node import seconds, session_of
from onnx import helper

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN


class Layer(NamedTuple):
    """A convolution of square images, padded so that stride 1 keeps their size."""

    inputs: int
    size: int
    outputs: int
    kernel: int
    stride: int = 1

    def __str__(self) -> str:
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        return f"{self.inputs} x {self.size} x {self.size}, {self.kernel} x {self.kernel}{stride}, {self.outputs}"

    @property
    def windows(self) -> int:
        """The size of the result."""
        return (self.size + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1


LARGE = (
    Layer(64, 56, 64, 3),
    Layer(64, 56, 128, 3, 2),
    Layer(128, 28, 128, 3),
    Layer(256, 14, 256, 3),
    Layer(512, 7, 512, 3),
    Layer(64, 56, 256, 1),
    Layer(256, 56, 64, 1),
    Layer(512, 28, 128, 1),
    Layer(256, 56, 512, 1, 2),
    Layer(1024, 14, 256, 1),
    Layer(512, 7, 2048, 1),
)
"""Layers at 224 x 224 pixels."""

SMALL = (
    Layer(64, 32, 64, 3),
    Layer(64, 32, 128, 3, 2),
    Layer(128, 16, 128, 3),
    Layer(256, 8, 256, 3),
    Layer(512, 4, 512, 3),
)
"""Layers at 32 x 32 pixels."""

CASES = [(2, layer) for layer in LARGE] + [(8, layer) for layer in LARGE] + [(32, layer) for layer in SMALL]
QUICK = [(1, Layer(8, 6, 8, 3))]
OPERATORS = {"y": "Conv", "dx": "ConvInputGradient", "dw": "ConvWeightGradient"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, "one small convolution, one round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, help="only the layers at this batch size")
    parser.add_argument("--against-torch", action="store_true", help="also convolve by PyTorch in bfloat16")
    options = parser.parse_args(arguments)
    cases = [case for case in (QUICK if options.quick else CASES) if options.batch in (None, case[0])]
    rows = []
    with ForeignLoad() as foreign:
        for batch, layer in cases:
            arrays = draw(batch, layer)
            row = [f"{batch} x {layer}"]
            for result in OPERATORS:
                calls = {kind: convolution(arrays, layer, result, kind) for kind in ("float32", "bfloat16")}
                if options.against_torch:
                    calls["PyTorch"] = convolution_of_torch(arrays, layer, result)
                best = dict.fromkeys(calls, float("inf"))
                for _ in range(1 if options.quick else options.rounds):
                    for name, call in calls.items():
                        best[name] = min(best[name], seconds(call))
                operations = 2 * arrays["dy"].size * layer.inputs * layer.kernel**2
                row += [f"{operations / best[name] / 1e9:.3g}" for name in best]
            rows.append(row)
    names = ["float32", "bfloat16", *(["PyTorch"] if options.against_torch else [])]
    head = ["batch, layer", *(f"{result} {name}" for result in OPERATORS for name in names)]
    title = "GFLOP/s of one thread, by processor time"
    write_report("\n".join([title, "", table(head, rows), "", machine_line(), load_line(foreign)]), options.output)


def draw(batch: int, layer: Layer) -> dict[str, np.ndarray]:
    """Random images, weights and gradients."""
    random = np.random.default_rng(0)
    shapes = {
        "x": (batch, layer.inputs, layer.size, layer.size),
        "w": (layer.outputs, layer.inputs, layer.kernel, layer.kernel),
        "dy": (batch, layer.outputs, layer.windows, layer.windows),
    }
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def convolution(arrays: dict[str, np.ndarray], layer: Layer, result: str, kind: str) -> Callable[[], object]:
    """A call of a kernel."""
    names = {"y": ("x", "w"), "dx": ("dy", "w", "x_shape"), "dw": ("dy", "x")}[result]
    given = arrays | {"x_shape": np.array(arrays["x"].shape, np.int64)}
    attributes = {"kernel_shape": [layer.kernel] * 2, "strides": [layer.stride] * 2, "pads": [layer.kernel // 2] * 4}
    node = helper.make_node(
        OPERATORS[result], list(names), [result], domain=ONNXTRAIN_DOMAIN, dilations=[1, 1], compute=kind, **attributes
    )
    feeds = {name: given[name] for name in names}
    session = session_of(node, feeds)
    return lambda: session.run(None, feeds)


def convolution_of_torch(arrays: dict[str, np.ndarray], layer: Layer, result: str) -> Callable[[], object]:
    """A call of PyTorch's convolution in bfloat16."""
    import torch

    torch.set_num_threads(1)
    x, dy = (torch.from_numpy(arrays[name]).bfloat16() for name in ("x", "dy"))
    w = torch.from_numpy(arrays["w"])
    padding = layer.kernel // 2
    if result == "y":
        return lambda: torch.conv2d(x, w.bfloat16(), None, layer.stride, padding)
    mask, arguments = (
        [result == "dx", result == "dw", False],
        ([layer.stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1),
    )
    return lambda: torch.ops.aten.convolution_backward(dy, x, w.bfloat16(), None, *arguments, mask)


if __name__ == "__main__":
    main()
