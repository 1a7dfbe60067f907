"""Turn the sparse layers of a compiled model back into dense ones, so that they can be decided anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.model_file.checks import is_plausible
from onnxtrain.plugins.sparse.functions import CONV, LINEAR, POOLED, TRANSPOSE
from onnxtrain.plugins.sparse.layers import attributes, names_in_subgraphs, remove_unread, unused
from onnxtrain.plugins.sparse.padded import check_padded_images

_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of layers whose attributes and weights do not fit together."""

_WINDOWS = ("kernel_shape", "strides", "pads", "dilations")


def with_dense_layers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with standard operators for its compiled layers, or the model itself if it has none."""
    own = [node for node in proto.graph.node if node.domain == ONNXTRAIN_DOMAIN]
    layers = [node for node in own if node.op_type in (LINEAR, CONV, POOLED)]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    layers = [node for node in layers if all(name in constants for name in node.input[1:4])]
    if not layers:
        return proto
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph = made.graph
    names = {name for node in graph.node for name in (*node.input, *node.output)} | set(constants)
    names |= {value.name for value in graph.input}
    results = {node.output[0] for node in layers}
    try:
        check_padded_images(graph, layers)
    except _MISFITS as error:
        raise ModelError(
            f"The padding of sparse convolutions does not fit together ({error}); the file is damaged or was changed: "
            "compile the pruned model again."
        ).about(got=str(error)) from error
    _read_as_given(graph)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if not node.output or node.output[0] not in results:
            nodes.append(node)
            continue
        try:
            nodes.extend(_dense(graph, node, constants, names))
        except _MISFITS as error:
            raise ModelError(
                f"The packed weights of the sparse layer {node.output[0]!r} do not fit together ({error}); the file is "
                "damaged: compile the pruned model again."
            ) from error
    del graph.node[:]
    graph.node.extend(nodes)
    remove_unread(graph, {name for node in layers for name in node.input[1:]})
    left = {(node.domain, node.op_type) for node in graph.node}
    kept = [entry for entry in made.functions if (entry.domain, entry.name) in left or entry.domain != ONNXTRAIN_DOMAIN]
    del made.functions[:]
    made.functions.extend(kept)
    return made


def _read_as_given(graph: onnx.GraphProto) -> None:
    """Let layers read what is transposed for several of them, without the nodes that transpose it."""
    sources = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.domain == ONNXTRAIN_DOMAIN and node.op_type == TRANSPOSE
    }
    for node in graph.node:
        if node.domain == ONNXTRAIN_DOMAIN and node.op_type == LINEAR:
            node.input[0] = sources.get(node.input[0], node.input[0])
    read = {name for node in graph.node for name in (*node.input, *names_in_subgraphs(node))}
    read |= {value.name for value in graph.output}
    kept = [node for node in graph.node if node.output[0] not in sources.keys() - read]
    del graph.node[:]
    graph.node.extend(kept)


def dense_matrix(values: np.ndarray, deltas: np.ndarray, shape: list[int]) -> np.ndarray:
    """Return the matrix [outputs, depth] of packed weights.

    Example:
        >>> packed = np.array([[2], [3]], np.float32), np.array([1, 4], np.uint16)
        >>> dense_matrix(*packed, [2, 3, 1]).tolist()
        [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]]
    """
    rows, depth, block = shape
    if min(shape) < 1 or not is_plausible(4 * rows * depth * block, values.nbytes + deltas.nbytes):
        raise ValueError(f"a shape of {shape}")
    blocks = np.zeros((rows * depth, block), np.float32)
    blocks[np.cumsum(deltas, dtype=np.int64)] = values
    return blocks.reshape(rows, depth, block).transpose(0, 2, 1).reshape(rows * block, depth)


def _dense(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    constants: dict[str, np.ndarray],
    names: set[str],
) -> Iterator[onnx.NodeProto]:
    """Yield the standard operators of a compiled layer; its weight becomes an initializer."""
    given = attributes(node)
    windows = {name: given[name] for name in _WINDOWS if name in given}

    def put(label: str, array: np.ndarray) -> str:
        name = unused(f"{node.output[0]}.{label}", names)
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    if node.op_type == POOLED:
        steps.append(("Conv", list(node.input), windows))
    else:
        x, values, deltas, bias, residual = node.input
        matrix = dense_matrix(constants[values], constants[deltas], given["shape"])
        if node.op_type == CONV:
            steps.append(("Conv", [x, put("weight", matrix.reshape(given["weight_shape"])), bias], windows))
        else:
            steps.append(("MatMul", [x, put("weight", matrix.T)], {}))
            if constants[bias].any():
                steps.append(("Add", [bias], {}))
        if residual not in constants or constants[residual].any():
            steps.append(("Add", [residual], {}))
    lower, upper = (0.0, np.inf) if node.op_type == POOLED else (given["lower"], given["upper"])
    if lower == 0 and upper == np.inf:
        steps.append(("Relu", [], {}))
    elif lower > -np.inf or upper < np.inf:
        limits = [put(label, np.array(limit, np.float32)) for label, limit in (("lower", lower), ("upper", upper))]
        steps.append(("Clip", limits, {}))
    if node.op_type == POOLED:
        pool = {"kernel_shape": given["pool_shape"], "strides": [2, 2], "pads": given["pool_pads"]}
        steps.append(("MaxPool", [], pool))
    before: list[str] = []
    for index, (operator, inputs, settings) in enumerate(steps):
        last = index == len(steps) - 1
        y = node.output[0] if last else unused(f"{node.output[0]}.{operator}", names)
        yield helper.make_node(operator, [*before, *inputs], [y], name="" if index else node.name, **settings)
        before = [y]
