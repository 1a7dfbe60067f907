"""Measures the figures of native/tuning.h again: each beside a half and the double, by single nodes.

    python tools/measure_tuning.py [NAME...] [--factors 0.5 1 2] [--rounds 15]

For every figure a copy of native/ is built with it changed, in a temporary folder, and nodes that depend on it
run on the libraries in turns, one thread. Printed is the time of each node as a ratio to that of the library as it
is: below 1 the changed figure is faster. A first build takes a minute, a changed one less.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parents[1]
Shape = tuple[int, ...]
DEFINITION = r"(?P<before>\b{name}\s*(?:=\s*|\())(?P<value>std::size_t\{{1\}} << \d+|[\d.]+(?: \* [\d.]+)*)"

CONVOLUTIONS = {
    "3x3, 64 channels of 28": ("Conv", [(8, 64, 28, 28), (64, 64, 3, 3)], {"pads": [1] * 4, "kernel_shape": [3, 3]}),
    "3x3, 256 channels of 7": ("Conv", [(8, 256, 7, 7), (256, 256, 3, 3)], {"pads": [1] * 4, "kernel_shape": [3, 3]}),
    "5x5, 16 channels of 14": ("Conv", [(32, 16, 14, 14), (32, 16, 5, 5)], {"pads": [2] * 4, "kernel_shape": [5, 5]}),
}
WINOGRAD = {name: case for name, case in CONVOLUTIONS.items() if name.startswith("3x3")}
POINTWISE = {
    "1x1, 96 channels of 28": ("Conv", [(8, 96, 28, 28), (24, 96, 1, 1)], {"kernel_shape": [1, 1]}),
    "1x1, 320 channels of 7": ("Conv", [(8, 320, 7, 7), (1280, 320, 1, 1)], {"kernel_shape": [1, 1]}),
}
DEPTHWISE = {
    f"depthwise, {channels} channels of {size}": (
        "Conv",
        [(8, channels, size, size), (channels, 1, 3, 3)],
        {"pads": [1] * 4, "kernel_shape": [3, 3], "group": channels},
    )
    for channels, size in ((96, 56), (960, 7))
}
PRODUCTS = {
    f"{rows} x {depth} x {columns}": ("Linear", [(rows, depth), (depth, columns)], {})
    for rows, depth, columns in ((32, 784, 256), (512, 256, 1024), (1024, 768, 768))
}
ATTENTION = {
    f"{heads} heads of {length}": ("Attention", [(2, length, heads, 64)] * 3, {"scale": 0.125})
    for heads, length in ((4, 128), (12, 512))
}
NODES: dict[str, dict[str, tuple[str, list[Shape], dict[str, object]]]] = {
    **dict.fromkeys(("kScoreShare", "kMostScoreRows", "kLeastQueries"), ATTENTION),
    **dict.fromkeys(("kProductDepth", "kCopiedRowsShare", "kColumnsShare", "kLeastRows", "kLeastColumns"), PRODUCTS),
    **dict.fromkeys(("kLeastProducts", "kArranging", "kReading", "kFewTiles"), PRODUCTS),
    "kStripRows": {**PRODUCTS, **CONVOLUTIONS},
    "kAccumulationDepth": CONVOLUTIONS,
    **dict.fromkeys(("kBlockBytes", "kLargeWeights", "kLeastPositions", "kPackedElements"), CONVOLUTIONS),
    **dict.fromkeys(("kChunkDepth", "kTileCost", "kRunCost", "kClassesWorthIt"), CONVOLUTIONS),
    **dict.fromkeys(("kWinogradWeight", "kWinogradTile", "kWinogradWorthIt"), WINOGRAD),
    **dict.fromkeys(("kWinogradBlock", "kWinogradStrip", "kWinogradPack", "kWinogradDepth"), WINOGRAD),
    "kPixelShare": POINTWISE,
    **dict.fromkeys(("kSideBySideBytes", "kSideBySideProducts"), DEPTHWISE),
}


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NODES)}; default all")
    parser.add_argument("--factors", nargs="+", type=float, default=[0.5, 2.0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    unknown = set(options.names) - set(NODES)
    if unknown:
        sys.exit(f"There is no case for {', '.join(sorted(unknown))}: choose of {', '.join(NODES)}.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        shutil.copytree(ROOT / "native", source / "native")
        shutil.copy(ROOT / "CMakeLists.txt", source)
        plain = build(source, Path(folder) / "plain.so")
        header = source / "native" / "tuning.h"
        text = header.read_text()
        print("| figure | factor | node | time, of the plain library's |\n|---|---:|---|---:|")
        for name in options.names or NODES:
            for factor in options.factors:
                header.write_text(changed(text, name, factor))
                library = build(source, Path(folder) / f"{name}-{factor}.so")
                for label, ratio in compare(plain, library, NODES[name], options.rounds).items():
                    print(f"| `{name}` | {factor:g} | {label} | {ratio:.3f} |", flush=True)
                library.unlink()
            header.write_text(text)


def changed(text: str, name: str, factor: float) -> str:
    """The header with one figure times a factor."""
    found = re.search(DEFINITION.format(name=name), text)
    if found is None:
        sys.exit(f"native/tuning.h has no figure {name}.")
    value = found["value"]
    new = f"{value} * {factor}" if "." in value else f"static_cast<std::size_t>(({value}) * {factor})"
    return text[: found.start()] + found["before"] + new + text[found.end() :]


def build(source: Path, library: Path) -> Path:
    """The library of a source tree; what did not change is not compiled again."""
    made = source / "build"
    for command in (["cmake", "-S", source, "-B", made], ["cmake", "--build", made, "--parallel"]):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
    shutil.copy(made / "libonnxtrain_kernels.so", library)
    return library


def runner(library: Path, operator: str, shapes: list[Shape], attributes: dict[str, object]) -> Callable[[], object]:
    """One node on one library."""
    names = ["x", "w", "b"][: len(shapes)]
    outputs = ["y", "more"] if operator == "Attention" else ["y"]
    graph = helper.make_graph(
        [helper.make_node(operator, names, outputs, domain="onnxtrain", **attributes)],
        "node",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(names, shapes, strict=True)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("onnxtrain", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(library))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in zip(names, shapes, strict=True)}
    return lambda: session.run(None, feeds)


def compare(
    plain: Path, other: Path, nodes: dict[str, tuple[str, list[Shape], dict[str, object]]], rounds: int
) -> dict[str, float]:
    """The median over rounds of the ratio of times, by node."""
    ratios = {}
    for label, node in nodes.items():
        steps = [runner(library, *node) for library in (plain, other)]
        for step in steps:
            step()
        of_rounds = []
        for number in range(rounds):
            times = [0.0, 0.0]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                start = time.perf_counter()
                for _ in range(3):
                    steps[which]()
                times[which] = time.perf_counter() - start
            of_rounds.append(times[1] / times[0])
        ratios[label] = statistics.median(of_rounds)
    return ratios


if __name__ == "__main__":
    main()
