"""The arithmetic limit of a training step: the time of its matrix multiplications at the machine's peak rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

PASSES = 3
"""Each matrix multiplication of the forward pass recurs twice in the backward pass, once per operand."""

_PRODUCT = (512, 512, 4608)  # the fastest of those tried: larger ones exceed the cache
_REPEATS = 100


def forward_operations(path: Path, inputs: Mapping[str, np.ndarray]) -> float:
    """Count multiplications and additions of the matrix multiplications and convolutions of one forward pass.

    Args:
        path: The model.
        inputs: A batch; the count is for its shapes.
    """
    model = onnx.load(path)
    initializers = {tensor.name for tensor in model.graph.initializer}
    for info in model.graph.input:
        if info.name not in initializers:
            for dimension, size in zip(info.type.tensor_type.shape.dim, inputs[info.name].shape, strict=True):
                dimension.dim_value = size
    del model.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
    for info in (*inferred.input, *inferred.value_info, *inferred.output):
        shapes[info.name] = [dimension.dim_value for dimension in info.type.tensor_type.shape.dim]
    return 2.0 * sum(_multiplications(node, shapes) for node in inferred.node)


def _multiplications(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> int:
    if node.op_type in ("Conv", "ConvTranspose"):
        # Each output of a convolution, and each input of a transposed one, meets one filter of one group.
        data = shapes[node.output[0] if node.op_type == "Conv" else node.input[0]]
        return math.prod(data) * math.prod(shapes[node.input[1]][1:])
    if node.op_type == "Gemm":
        turned = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
        return math.prod(shapes[node.output[0]]) * shapes[node.input[0]][0 if turned else 1]
    if node.op_type == "MatMul":
        return math.prod(shapes[node.output[0]]) * shapes[node.input[0]][-1]
    return 0


def clock(threads: int) -> Callable[[], float]:
    """The clock that other programs disturb least: processor time, which is fair with one thread only."""
    return time.process_time if threads == 1 else time.perf_counter


def fastest_rate(threads: int) -> float:
    """Operations per second of a large float32 matrix multiplication in onnxruntime, best of several."""
    import onnxruntime

    rows, columns, inner = _PRODUCT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["c"])],
        "product",
        [
            helper.make_tensor_value_info("a", TensorProto.FLOAT, [rows, inner]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, [inner, columns]),
        ],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [rows, columns])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"a": np.ones((rows, inner), np.float32), "b": np.ones((inner, columns), np.float32)}
    seconds, now = [], clock(threads)
    for _ in range(_REPEATS):
        begin = now()
        session.run(None, feeds)
        seconds.append(now() - begin)
    return 2.0 * rows * columns * inner / min(seconds)
