"""Weights and biases that the graph computes from what the file stores, such as transposed ones, as initializers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from onnxtrain.graph.layers import computed_constants
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.plugins.sparse.layers import names_in_subgraphs, unused

Computed = dict[str, tuple[str, np.ndarray]]
"""By name of an initializer, the value that the graph computes instead, and its elements."""


def with_computed_weights(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Computed]:
    """Return the model with initializers for what nodes compute from constants; the nodes stay, unread."""
    model = infer_shapes(ir.from_proto(proto))
    arrays = {str(value.name): array for value, array in computed_constants(model, weights=True).items()}
    if not arrays:
        return proto, {}
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    names = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    names |= {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    renamed = {name: unused(f"{name}.computed", names) for name in arrays}
    for node in made.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for name, array in arrays.items():
        made.graph.initializer.append(numpy_helper.from_array(array, renamed[name]))
    return made, {renamed[name]: (name, array) for name, array in arrays.items()}


def as_stored(proto: onnx.ModelProto, computed: Computed) -> onnx.ModelProto:
    """Let the graph compute again what has not changed, and remove what nothing reads any more."""
    if not computed:
        return proto
    made = onnx.ModelProto()
    made.CopyFrom(proto)
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
    tensors = [tensor for tensor in graph.initializer if tensor.name in read]
    alive = read.union(*(node.output for node in kept))
    infos = [value for value in graph.value_info if value.name in alive]
    for field, items in ((graph.node, kept[::-1]), (graph.initializer, tensors), (graph.value_info, infos)):
        del field[:]
        field.extend(items)
    return made
