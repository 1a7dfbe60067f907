"""Find convolutions that stay dense in front of Relu and MaxPool: a kernel computes all with fewer multiplications."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN, is_default_domain
from onnxtrain.model_file.proto import default_opset
from onnxtrain.plugins.sparse.functions import POOLED, function
from onnxtrain.plugins.sparse.layers import Layer, LayerSearch, Shape, attributes, declare, remove_unread, unused

_BLOCK, _TAPS, _STRIDES = 8, 4, {1, 2, 4}
"""The kernel multiplies this many outputs together, at most so many columns of a weight for each step of a stride, and
has these strides."""


def with_pooled_convolutions(proto: onnx.ModelProto, shapes: Mapping[str, Shape | None]) -> onnx.ModelProto | None:
    """Return the model with dense convolutions, their Relu and MaxPool as one node each; ``None`` if there is none."""
    search = LayerSearch(proto.graph, shapes)
    found = [(layer, pool) for layer in search.layers() if (pool := _pool(search, layer)) is not None]
    if not found:
        return None
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph = made.graph
    opset = default_opset(made.opset_import)
    assert opset is not None
    made.functions.append(function(POOLED, opset))
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    names |= {value.name for value in (*graph.input, *graph.initializer)}
    nodes = {pool.output[0]: _node(graph, layer, pool, names) for layer, pool in found}
    gone = {node.output[0] for layer, _ in found for node in layer.nodes}
    kept = [nodes.get(node.output[0], node) for node in graph.node if not node.output or node.output[0] not in gone]
    del graph.node[:]
    graph.node.extend(kept)
    declare(graph, nodes, shapes)
    remove_unread(graph, {name for layer, _ in found for node in layer.nodes for name in node.input})
    return made


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


def _node(graph: onnx.GraphProto, layer: Layer, pool: onnx.NodeProto, names: set[str]) -> onnx.NodeProto:
    """Add the tensors of a layer to the graph and return its node."""
    inputs = [layer.x]
    weight = layer.matrix.reshape(layer.windows["weight_shape"])
    for label, array in (("dense", weight), ("bias", layer.bias)):
        name = unused(f"{layer.nodes[0].input[1]}.{label}", names)
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name))
        inputs.append(name)
    given = attributes(pool)
    windows: dict[str, Any] = {name: layer.windows[name] for name in ("kernel_shape", "strides", "pads")}
    return helper.make_node(
        POOLED,
        inputs,
        [pool.output[0]],
        name=layer.nodes[0].name,
        domain=ONNXTRAIN_DOMAIN,
        **windows,
        pool_shape=list(given["kernel_shape"]),
        pool_pads=list(given.get("pads", [0, 0, 0, 0])),
    )
