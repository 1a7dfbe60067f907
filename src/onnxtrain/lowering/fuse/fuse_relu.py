"""Fuse the gradient of a Relu into the gradient of the linear layer behind it.

In a layer y = x w + b with x = relu(z), the gradient by x is in the nearest cache when it is complete, and so is the
part of x that says where z was above zero. A separate node for Relu reads both once more, and costs the runtime the
start of a kernel, which is most of the time of a small layer.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.rules.fused_linear import ACTIVATION, RELU
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over


def fuse_relu(graph: ir.Graph) -> None:
    """Let the gradients of linear layers return the gradient by the input of the Relu before the layer, in place.

    ``LinearGradient`` of the domain ``onnxtrain`` gets ``activation`` = "Relu" and replaces

        dy, w, x -> LinearGradient -> dx, dw, db
        dx, x -> ReluGradient -> dz

    with dz as its first output, with the same bits. Left alone is a dx that is an output, or that others read, as where
    several nodes read x.

    Requires: a sorted graph. Ensures: the same.
    """
    fused: dict[ir.Node, ir.Node] = {}
    for node in graph:
        layer = _layer_gradient(node)
        if layer is not None:
            fused[node] = layer
            layer.attributes[ACTIVATION] = ir.AttrString(ACTIVATION, RELU)
    take_over(graph, {relu.outputs[0]: layer.outputs[0] for relu, layer in fused.items()})
    remove_nodes(graph, fused)


def _layer_gradient(relu: ir.Node) -> ir.Node | None:
    """Return the LinearGradient whose dx only this ReluGradient reads, if both have the same x."""
    if not _is(relu, "ReluGradient"):
        return None
    dx, x = relu.inputs[:2]
    layer = None if dx is None else dx.producer()
    if dx is None or layer is None or not _is(layer, "LinearGradient") or dx is not layer.outputs[0]:
        return None
    if dx.is_graph_output() or len(dx.uses()) != 1 or layer.inputs[2] is not x or ACTIVATION in layer.attributes:
        return None
    return layer if layer.graph is relu.graph else None


def _is(node: ir.Node, operator: str) -> bool:
    return node.domain == ONNXTRAIN_DOMAIN and node.op_type == operator
