"""Training under masks with sparse kernels, beside the same training with dense ones.

    python benchmarks/masked_step.py [--batch 8] [--threads 1] [--folder FOLDER]   # BERT-mini, sequences of 128
    python benchmarks/masked_step.py --layers    # single products: the numbers of native/tuning.h

Of BERT-mini, every weight of a linear layer with 64 rows and columns or more is pruned at random, alone or in blocks of
four outputs. Both trainings keep the zeros (`masks="keep"`) and take turns in one process. Times are the process's with
one thread, which other programs do not lengthen, and the clock's with more; ratios are medians of pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import harness
import numpy as np
import onnx
import onnxruntime
from models import find_model
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain.lowering.rules import linear

LEAST = 64
"""Rows and columns of the weights that are pruned."""

FORMS = tuple((zeros, block) for zeros in (0.8, 0.9, 0.95) for block in (1, 4))
SIZES = ((256, 256, 1024), (256, 1024, 1024), (768, 768, 512), (3072, 768, 512), (256, 256, 64), (768, 768, 16))
LAYERS = tuple((*sizes, zeros, block) for sizes in SIZES for zeros, block in ((0.7, 1), *FORMS))
"""Depth, outputs, rows, zeros and block."""


def mask_of(shape: Sequence[int], zeros: float, block: int, rng: np.random.Generator) -> np.ndarray:
    """A mask [depth, outputs] of that share of zeros, alone or in blocks of outputs."""
    kept = rng.random((shape[0], shape[1] // block)) >= zeros
    return np.repeat(kept, block, axis=1)


def pruned(model: onnx.ModelProto, zeros: float, block: int) -> onnx.ModelProto:
    """The model with zeros in the weights of its MatMul nodes [depth, outputs]."""
    rng = np.random.default_rng(0)
    weights = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    for tensor in model.graph.initializer:
        if tensor.name in weights and len(tensor.dims) == 2 and min(tensor.dims) >= LEAST:
            array = numpy_helper.to_array(tensor) * mask_of(tensor.dims, zeros, block, rng)
            tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))
    return model


def trainer(model: onnx.ModelProto, threads: int, *, sparse: bool) -> onnxtrain.Trainer:
    """A trainer that keeps the zeros, and whose linear layers skip them or not."""
    made = onnxtrain.Trainer(
        model, loss="softmax_cross_entropy", optimizer="adamw(lr=1e-4)", masks="keep", threads=threads
    )
    least = linear.LEAST_ZEROS
    linear.LEAST_ZEROS = least if sparse else 2.0
    try:
        made.executor.session  # noqa: B018 - creates the session
    finally:
        linear.LEAST_ZEROS = least
    return made


def pairs(dense: Callable[[], object], sparse: Callable[[], object], turns: int, threads: int) -> tuple[float, float]:
    """Median seconds of the first, and median ratio of the two in pairs."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times = []
    for turn in range(turns + 2):
        seconds = []
        for work in (dense, sparse):
            begin = clock()
            work()
            seconds.append(clock() - begin)
        if turn >= 2:  # the first ones warm up
            times.append(seconds)
    return statistics.median(one for one, _ in times), statistics.median(one / other for one, other in times)


def steps(options: argparse.Namespace) -> list[list[str]]:
    task = find_model("bert_mini")
    path = str(task.onnx(options.folder))
    inputs, target = task.batch(options.batch)
    rows = []
    for zeros, block in FORMS[-1:] if options.quick else FORMS:
        model = pruned(onnx.load(path), zeros, block)
        dense, sparse = (trainer(model, options.threads, sparse=sparse) for sparse in (False, True))
        seconds, ratio = pairs(
            lambda one=dense: one.train_step(inputs, target),
            lambda one=sparse: one.train_step(inputs, target),
            options.turns,
            options.threads,
        )
        rows.append([f"{zeros:.0%}, {block}x1", str(options.threads), harness.milliseconds(seconds), f"{ratio:.2f}"])
        print(*rows[-1], flush=True)
    return rows


def layer(operator: str, names: Sequence[str], feeds: dict[str, np.ndarray], mask: np.ndarray | None,
          transposed: bool) -> Callable[[], object]:  # fmt: skip
    """A call of one node."""
    place = linear._MASK_INPUT[operator]
    given = [*names, *[""] * (place - len(names)), "mask"] if mask is not None else [*names]
    node = helper.make_node(operator, given, ["y"], domain="onnxtrain", transB=int(transposed))
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info(name, 1, feeds[name].shape) for name in names],
        [helper.make_tensor_value_info("y", 1, None)],
        [] if mask is None else [numpy_helper.from_array(mask, "mask")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("onnxtrain", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(onnxtrain.custom_ops_library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(feeds[name]) for name in names}
    return lambda: session.run_with_ort_values(["y"], values)


def layers(options: argparse.Namespace) -> list[list[str]]:
    rng, rows = np.random.default_rng(0), []
    for depth, outputs, count, zeros, block in LAYERS[-1:] if options.quick else LAYERS:
        mask = mask_of((depth, outputs), zeros, block, rng)
        feeds = {
            "x": rng.standard_normal((count, depth), np.float32),
            "dy": rng.standard_normal((count, outputs), np.float32),
            "w": rng.standard_normal((depth, outputs), np.float32) * mask,
        }
        found = []
        for operator, names, transposed in (
            ("Linear", ("x", "w"), False), ("Linear", ("dy", "w"), True), ("LinearWeightGradient", ("dy", "x"), False),
        ):  # fmt: skip
            seconds, ratio = pairs(
                layer(operator, names, feeds, None, transposed),
                layer(operator, names, feeds, mask, transposed),
                3 * options.turns,
                1,
            )
            found += [f"{seconds * 1e3:.3f}", f"{ratio:.2f}"]
        rows.append([f"{count} x {depth}, {depth} x {outputs}", f"{zeros:.0%}, {block}x1", *found])
        print(*rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.make_parser(__doc__, "one row: a test run", threads=1, models=True)
    parser.add_argument("--layers", action="store_true", help="single products instead of BERT-mini")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=9, help="pairs of steps (9)")
    options = parser.parse_args(arguments)
    if options.layers:
        header = ["product", "zeros", "dense, ms", "sparse", "by x, dense, ms", "sparse", "by w, dense, ms", "sparse"]
        rows = layers(options)
    else:
        header, rows = ["zeros", "threads", "dense step, ms", "sparse"], steps(options)
    report = f"{harness.table(header, rows)}\n\n{harness.machine_line()} Times dense; medians of pairs."
    harness.write_report(report, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
