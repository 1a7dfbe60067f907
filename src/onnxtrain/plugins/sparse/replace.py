"""Replace layers by nodes of our operators: sparse ones, and dense convolutions with their Relu and MaxPool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN, is_default_domain
from onnxtrain.plugins.sparse.edited import Edited, assign, attributes
from onnxtrain.plugins.sparse.layers import Layer, LayerSearch, Shape
from onnxtrain.plugins.sparse.operators import CONV, LINEAR, POOLED, PackedWeight, define

_ZERO = "onnxtrain.plugins.sparse.no_residual"

_BLOCK, _TAPS, _STRIDES = 8, 4, {1, 2, 4}
"""The kernel multiplies this many outputs together, at most so many columns of a weight for each step of a stride, and
has these strides."""


class _Replacement(NamedTuple):
    """A layer, and the node that replaces it and the nodes behind it."""

    layer: Layer
    nodes: Sequence[onnx.NodeProto]
    operator: str
    tensors: Mapping[str, np.ndarray]
    residual: Sequence[str]
    attributes: Mapping[str, Any]


def with_sparse_layers(
    proto: onnx.ModelProto, layers: Sequence[tuple[Layer, PackedWeight]], shapes: Mapping[str, Shape | None]
) -> onnx.ModelProto:
    """Return the model with sparse layers instead of their nodes."""
    replacements = [
        _Replacement(
            layer,
            layer.nodes,
            CONV if layer.windows else LINEAR,
            {"values": weight.values, "deltas": weight.deltas, "bias": layer.bias},
            [layer.residual or _ZERO],
            {"shape": weight.shape, "lower": layer.lower, "upper": layer.upper, **layer.windows},
        )
        for layer, weight in layers
    ]
    made = _replaced(proto, replacements, shapes)
    initializers = made.graph.initializer
    if any(layer.residual is None for layer, _ in layers) and _ZERO not in {tensor.name for tensor in initializers}:
        initializers.append(numpy_helper.from_array(np.zeros((), np.float32), _ZERO))
    return made


def with_pooled_convolutions(proto: onnx.ModelProto, shapes: Mapping[str, Shape | None]) -> onnx.ModelProto | None:
    """Return the model with dense convolutions, their Relu and MaxPool as one node each; ``None`` if there is none.

    A kernel computes all of it with fewer multiplications.
    """
    search, found = LayerSearch(proto.graph, shapes), []
    for layer in search.layers():
        if (pool := _pool(search, layer)) is None:
            continue
        given = attributes(pool)
        tensors = {"dense": layer.matrix.reshape(layer.windows["weight_shape"]), "bias": layer.bias}
        settings = {name: layer.windows[name] for name in ("kernel_shape", "strides", "pads")}
        settings |= {"pool_shape": list(given["kernel_shape"]), "pool_pads": list(given.get("pads", [0, 0, 0, 0]))}
        found.append(_Replacement(layer, [*layer.nodes, pool], POOLED, tensors, [], settings))
    return _replaced(proto, found, shapes) if found else None


def _replaced(
    proto: onnx.ModelProto, replacements: Sequence[_Replacement], shapes: Mapping[str, Shape | None]
) -> onnx.ModelProto:
    """Return the model with one node instead of the nodes of each layer."""
    made = Edited(proto)
    graph = made.graph
    define(made.proto, {each.operator for each in replacements})
    ends: dict[str, onnx.NodeProto] = {}
    for each in replacements:
        first, y = each.layer.nodes[0], each.nodes[-1].output[0]
        tensors = [made.constant(f"{first.input[1]}.{label}", array) for label, array in each.tensors.items()]
        inputs = [each.layer.x, *tensors, *each.residual]
        ends[y] = helper.make_node(
            each.operator, inputs, [y], name=first.name, domain=ONNXTRAIN_DOMAIN, **each.attributes
        )
    replaced = [node for each in replacements for node in each.nodes]
    gone = {node.output[0] for node in replaced} - set(ends)
    assign(graph.node, (ends.get(node.output[0], node) for node in graph.node if node.output[0] not in gone))
    # ONNX Runtime does not infer the shapes of results of a library's operators.
    declared = {value.name for value in (*graph.value_info, *graph.output)}
    graph.value_info.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name in ends
        if name not in declared and (shape := shapes.get(name)) is not None
    )
    made.remove_unread({name for node in replaced for name in node.input})
    return made.proto


def _pool(search: LayerSearch, layer: Layer) -> onnx.NodeProto | None:
    """Return the MaxPool behind a convolution and its Relu if the kernel computes all."""
    readers = search.readers(layer.y)
    node = readers[0] if len(readers) == 1 else None
    if node is None or node.op_type != "MaxPool" or not is_default_domain(node.domain):
        return None
    is_relu = layer.residual is None and (layer.lower, layer.upper) == (0.0, float("inf"))
    return node if is_relu and _fits(layer) and _is_plain(node) else None


def _fits(layer: Layer) -> bool:
    windows = layer.windows
    if len(windows.get("kernel_shape", ())) != 2 or len(layer.matrix) % _BLOCK or set(windows["dilations"]) != {1}:
        return False
    return set(windows["strides"]) <= _STRIDES and windows["kernel_shape"][1] <= _TAPS * windows["strides"][1]


def _is_plain(node: onnx.NodeProto) -> bool:
    given = attributes(node)
    return (
        len([name for name in node.output if name]) == 1
        and set(given["kernel_shape"]) <= {2, 3}
        and list(given.get("strides", ())) == [2, 2]
        and set(given.get("pads", [0])) <= {0, 1}
        and set(given.get("dilations", [1])) == {1}
        and not given.get("ceil_mode")
        and given.get("auto_pad", b"NOTSET") == b"NOTSET"
    )
