"""Fuse additions into the node that computes a term: an adapter's matrix multiplication, or a sum of rows at indices.

An adapter multiplies by a matrix of a few rows, and its result is added to that of a layer; in the backward pass it is
added to the other gradients of the layer's input. Writing that result, reading it again and writing the sum take longer
than the multiplication. As the bias of the multiplication, the other term is read and written once, in place if nothing
else reads it.

The gradient of an embedding is zero in most rows. If the output layer shares its weights, that gradient is added to a
dense one: three tensors of the size of the embedding exist at once. Rows that are added to the dense gradient in place
need one.
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
    """Let linear layers and sums of rows add the other terms of a sum that they belong to, in place.

    ``Linear`` of the domain ``onnxtrain`` gets the other terms as its bias, of the shape of its result, and
    ``GatherGradient`` as its fourth input:

        x, w -> Linear -> t;  c, t -> Add -> y                  becomes     x, w, c -> Linear -> y
        dy, i, s -> GatherGradient -> t;  c, t -> Add -> y      becomes     dy, i, s, c -> GatherGradient -> y

    In a ``Sum`` of several terms each such node gets the sum before it, behind the sum of the terms of other nodes.
    Left alone are linear layers in sums without an adapter's output; terms that others read or that have another shape
    or type than the sum; layers with a bias or an activation.

    Requires: a sorted graph with shapes, in which all gradients are built: neither gradient has a rule for such a term.
    Ensures: a sorted graph.
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
    adding = {term: place for term in terms if (place := _place_of_other_term(term)) is not None}
    producers = {term: producer for term in adding if (producer := term.producer()) is not None}
    if not any(producer.op_type == "Linear" and _is_narrow(producer) for producer in producers.values()):
        adding = {term: place for term, place in adding.items() if producers[term].op_type != "Linear"}
    if not adding or len(terms) < 2:
        return False
    found = sorted(adding, key=lambda term: places[producers[term]])
    others = [term for term in terms if term not in adding]
    if len(others) > 1:
        added = ir.Node("", "Sum", others, num_outputs=1, name=f"{node.name}/others")
        graph.insert_before(node, added)
        total = added.outputs[0]
        total.name, total.type, total.shape = f"{y.name}/others", y.type, y.shape
    else:
        total = others[0] if others else found.pop(0)
    for term in found:
        producer = producers[term]
        producer.resize_inputs(adding[term] + 1)
        producer.replace_input_with(adding[term], total)
        total = term
    take_over(graph, {y: total})
    return True


def _place_of_other_term(term: ir.Value) -> int | None:
    """Return the input of a value's producer that is added to the value, if it is free and nothing else reads it."""
    node = term.producer()
    if node is None or node.domain != ONNXTRAIN_DOMAIN or len(term.uses()) != 1 or term.is_graph_output():
        return None
    place = {"Linear": 2, "GatherGradient": 3}.get(node.op_type)
    if place is None or ACTIVATION in node.attributes:
        return None
    return place if len(node.inputs) <= place or node.inputs[place] is None else None


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
