"""Prepare a model: dense layers for compiled ones, initializers for weights that the graph computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.layers import computed_constants
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.plugins.sparse.edited import Edited, assign, attributes, names_in_subgraphs
from onnxtrain.plugins.sparse.layouts import check_padded_images
from onnxtrain.plugins.sparse.operators import CONV, LINEAR, POOLED, TRANSPOSE, dense_matrix

Computed = dict[str, tuple[str, np.ndarray]]
"""By name of an initializer, the value that the graph computes instead, and its elements."""

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
    made = Edited(proto)
    graph = made.graph
    results = {node.output[0] for node in layers}
    try:
        check_padded_images(graph, layers)
    except _MISFITS as error:
        raise ModelError(
            f"The padding of sparse convolutions does not fit together ({error}); the file is damaged or was changed: "
            "compile the pruned model again."
        ).about(got=str(error)) from error
    _read_as_given(made)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if not node.output or node.output[0] not in results:
            nodes.append(node)
            continue
        try:
            nodes.extend(_dense(made, node, constants))
        except _MISFITS as error:
            raise ModelError(
                f"The packed weights of the sparse layer {node.output[0]!r} do not fit together ({error}); the file is "
                "damaged: compile the pruned model again."
            ) from error
    assign(graph.node, nodes)
    made.remove_unread({name for node in layers for name in node.input[1:]})
    left = {node.op_type for node in graph.node if node.domain == ONNXTRAIN_DOMAIN}
    functions = made.proto.functions
    assign(functions, (entry for entry in functions if entry.domain != ONNXTRAIN_DOMAIN or entry.name in left))
    return made.proto


def _read_as_given(made: Edited) -> None:
    """Let layers read what is transposed for several of them, without the nodes that transpose it."""
    graph = made.graph
    sources = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.domain == ONNXTRAIN_DOMAIN and node.op_type == TRANSPOSE
    }
    for node in graph.node:
        if node.domain == ONNXTRAIN_DOMAIN and node.op_type == LINEAR:
            node.input[0] = sources.get(node.input[0], node.input[0])
    unread = sources.keys() - made.read()
    assign(graph.node, (node for node in graph.node if node.output[0] not in unread))


def _dense(made: Edited, node: onnx.NodeProto, constants: dict[str, np.ndarray]) -> Iterator[onnx.NodeProto]:
    """Yield the standard operators of a compiled layer; its weight becomes an initializer."""
    given = attributes(node)
    windows = {name: given[name] for name in _WINDOWS if name in given}

    def constant(label: str, array: np.ndarray) -> str:
        return made.constant(f"{node.output[0]}.{label}", array)

    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    if node.op_type == POOLED:
        steps.append(("Conv", list(node.input), windows))
    else:
        x, values, deltas, bias, residual = node.input
        matrix = dense_matrix(constants[values], constants[deltas], given["shape"])
        if node.op_type == CONV:
            steps.append(("Conv", [x, constant("weight", matrix.reshape(given["weight_shape"])), bias], windows))
        else:
            steps.append(("MatMul", [x, constant("weight", matrix.T)], {}))
            if constants[bias].any():
                steps.append(("Add", [bias], {}))
        if residual not in constants or constants[residual].any():
            steps.append(("Add", [residual], {}))
    lower, upper = (0.0, np.inf) if node.op_type == POOLED else (given["lower"], given["upper"])
    if lower == 0 and upper == np.inf:
        steps.append(("Relu", [], {}))
    elif lower > -np.inf or upper < np.inf:
        limits = [constant(label, np.array(limit, np.float32)) for label, limit in (("lower", lower), ("upper", upper))]
        steps.append(("Clip", limits, {}))
    if node.op_type == POOLED:
        pool = {"kernel_shape": given["pool_shape"], "strides": [2, 2], "pads": given["pool_pads"]}
        steps.append(("MaxPool", [], pool))
    before: list[str] = []
    for index, (operator, inputs, settings) in enumerate(steps):
        last = index == len(steps) - 1
        y = node.output[0] if last else made.unused(f"{node.output[0]}.{operator}")
        yield helper.make_node(operator, [*before, *inputs], [y], name="" if index else node.name, **settings)
        before = [y]


def with_computed_weights(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Computed]:
    """Return the model with initializers for what nodes compute from constants; the nodes stay, unread."""
    model = infer_shapes(ir.from_proto(proto))
    arrays = {str(value.name): array for value, array in computed_constants(model, weights=True).items()}
    if not arrays:
        return proto, {}
    made = Edited(proto)
    constants = {name: made.constant(f"{name}.computed", array) for name, array in arrays.items()}
    for node in made.graph.node:
        node.input[:] = [constants.get(name, name) for name in node.input]
    return made.proto, {constants[name]: (name, array) for name, array in arrays.items()}


def as_stored(proto: onnx.ModelProto, computed: Computed) -> onnx.ModelProto:
    """Let the graph compute again what has not changed, and remove what nothing reads any more."""
    if not computed:
        return proto
    made = Edited(proto)
    graph = made.graph
    outputs = {name for node in graph.node for name in node.output}
    back = {
        tensor.name: computed[tensor.name][0]
        for tensor in graph.initializer
        if tensor.name in computed
        and computed[tensor.name][0] in outputs
        and np.array_equal(numpy_helper.to_array(tensor), computed[tensor.name][1])
    }
    for node in graph.node:
        node.input[:] = [back.get(name, name) for name in node.input]
    read = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            read.update(*(node.input, names_in_subgraphs(node)))
    alive = read.union(*(node.output for node in kept))
    assign(graph.node, kept[::-1])
    assign(graph.initializer, (tensor for tensor in graph.initializer if tensor.name in read))
    assign(graph.value_info, (value for value in graph.value_info if value.name in alive))
    return made.proto
