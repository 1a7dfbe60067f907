"""Fuse the addition of an adapter's output into its matrix multiplication.

An adapter multiplies by a matrix of a few rows, and its result is added to that of a layer; in the backward pass it is
added to the other gradients of the layer's input. Writing that result, reading it again and writing the sum take longer
than the multiplication. As the bias of the multiplication, the other term is read and written once, in place if nothing
else reads it.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.rules.fused_linear import ACTIVATION
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.ir.replace import remove_nodes, take_over
from onnxtrain.ir.value import dimensions

MOST_ROWS, LEAST_COLUMNS_BY_ROW = 64, 2
"""Shape of an adapter's matrix: at most so many rows, and at least so many columns for each."""


def fuse_additions(graph: ir.Graph) -> None:
    """Let linear layers add the other terms of a sum that an adapter's output belongs to, in place.

    ``Linear`` of the domain ``onnxtrain`` gets the other terms as its bias, of the shape of its result:

        x, w -> Linear -> t;  c, t -> Add -> y     becomes     x, w, c -> Linear -> y

    In a ``Sum`` of several terms each layer has the sum before it as its bias, behind the sum of the terms that are no
    such layers. Left alone are sums without an adapter's output; terms that others read or that have another shape or
    type than the sum; layers with a bias or an activation.

    Requires: a sorted graph with shapes, in which all gradients are built: the gradient of ``Linear`` has no rule for
    such a bias. Ensures: a sorted graph.
    """
    places = {node: place for place, node in enumerate(graph)}
    replaced = [node for node in list(graph) if _fuse(graph, node, places)]
    remove_nodes(graph, replaced)
    if replaced:
        graph.sort()


def _fuse(graph: ir.Graph, node: ir.Node, places: dict[ir.Node, int]) -> bool:
    if node.domain or node.op_type not in ("Add", "Sum"):
        return False
    y, terms = node.outputs[0], [term for term in node.inputs if term is not None]
    sizes = dimensions(y)
    if not sizes or None in sizes or any(dimensions(term) != sizes or term.dtype != y.dtype for term in terms):
        return False
    layers = [term.producer() for term in terms if _is_layer(term)]
    found = sorted((layer for layer in layers if layer is not None), key=lambda layer: places[layer])
    others = [term for term in terms if not _is_layer(term)]
    if not any(_is_narrow(layer) for layer in found) or len(terms) < 2:
        return False
    if len(others) > 1:
        added = ir.Node("", "Sum", others, num_outputs=1, name=f"{node.name}/others")
        graph.insert_before(node, added)
        total = added.outputs[0]
        total.name, total.type, total.shape = f"{y.name}/others", y.type, y.shape
    else:
        total = others[0] if others else found.pop(0).outputs[0]
    for layer in found:
        layer.resize_inputs(3)
        layer.replace_input_with(2, total)
        total = layer.outputs[0]
    take_over(graph, {y: total})
    return True


def _is_layer(term: ir.Value) -> bool:
    """Return whether a value is the output of a linear layer that can take a bias, and is read once."""
    layer = term.producer()
    if layer is None or layer.domain != ONNXTRAIN_DOMAIN or layer.op_type != "Linear":
        return False
    has_bias = len(layer.inputs) > 2 and layer.inputs[2] is not None
    return not (has_bias or ACTIVATION in layer.attributes or len(term.uses()) != 1 or term.is_graph_output())


def _is_narrow(layer: ir.Node) -> bool:
    """Return whether a linear layer multiplies by a matrix of few rows."""
    weight = None if layer.inputs[1] is None else dimensions(layer.inputs[1])
    if weight is None or len(weight) != 2:
        return False
    transposed = layer.attributes.get("transB")
    rows, columns = weight[::-1] if transposed is not None and transposed.as_int() else weight
    if not isinstance(rows, int) or not isinstance(columns, int):
        return False
    return rows <= MOST_ROWS and columns >= LEAST_COLUMNS_BY_ROW * rows
