"""Fuse additions into the node that computes a term: an adapter's matmul, a sum of rows at indices, a norm's gradient.

An adapter multiplies by a matrix of a few rows, and its result is added to that of a layer; in the backward pass it is
added to the other gradients of the layer's input. Writing that result, reading it again and writing the sum take longer
than the multiplication. As the bias of the multiplication, the other term is read and written once, in place if nothing
else reads it.

The gradient of an embedding is zero in most rows. If the output layer shares its weights, that gradient is added to a
dense one: three tensors of the size of the embedding exist at once. Rows that are added to the dense gradient in place
need one.

Where values are joined to those before them, as in a DenseNet, the gradient of a batch normalization is added to that
of the earlier channels, the first part of a Split: it is read where it lies, and added in the cache.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.rules.fused_linear import ACTIVATION
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import dimensions

MOST_ROWS, LEAST_COLUMNS_BY_ROW = 64, 2
"""Shape of an adapter's matrix: at most so many rows, and at least so many columns for each."""

_BY_CHANNEL = "BatchNormalizationGradient"
_PLACES = {"Linear": 2, "GatherGradient": 3, _BY_CHANNEL: 6}
"""Operators that add another term to their first output, and the input that has it."""


def fuse_additions(graph: ir.Graph) -> None:
    """Let linear layers, sums of rows and gradients of batch norms add the other terms of a sum to theirs, in place.

    ``Linear`` of the domain ``onnxtrain`` gets the other terms as its bias, of the shape of its result, and
    ``GatherGradient`` and ``BatchNormalizationGradient`` as their last input:

        x, w -> Linear -> t;  c, t -> Add -> y                  becomes     x, w, c -> Linear -> y
        dy, i, s -> GatherGradient -> t;  c, t -> Add -> y      becomes     dy, i, s, c -> GatherGradient -> y

    For ``BatchNormalizationGradient`` c may be the first part of a ``Split`` of the channels: it gets all of them.

    In a ``Sum`` of several terms each such node gets the sum before it, behind the sum of the terms of other nodes.
    Left alone are linear layers in sums without an adapter's output; gradients that come before another term;
    terms that others read or that have another shape or type than the sum; layers with a bias or an activation.

    Requires: a sorted graph with shapes, in which all gradients are built: neither gradient has a rule for such a term.
    Ensures: a sorted graph.
    """
    places = {node: place for place, node in enumerate(graph)}
    replaced = [node for node in list(graph) if _fuse(graph, node, places)]
    remove_nodes(graph, replaced)
    if replaced:
        for node in list(graph):
            if node.op_type == _BY_CHANNEL and len(node.inputs) > _PLACES[_BY_CHANNEL]:
                _read_unsplit(graph, node)
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
    others = [term for term in terms if term not in adding]
    # Another term may depend on another result of a gradient, if it comes later.
    last = max((places[producer] for term in others if (producer := term.producer()) is not None), default=-1)
    adding = {
        term: place
        for term, place in adding.items()
        if len(producers[term].outputs) == 1 or places[producers[term]] > last
    }
    if not adding or len(terms) < 2:
        return False
    found = sorted(adding, key=lambda term: places[producers[term]])
    others = [term for term in terms if term not in adding]
    if len(others) > 1:
        added = ir.Node("", "Sum", others, num_outputs=1, name=f"{node.name}/others")
        graph.insert_before(node, added)
        places[added] = places[node]
        total = added.outputs[0]
        total.name, total.type, total.shape = f"{y.name}/others", y.type, y.shape
    else:
        total = others[0] if others else found.pop(0)
    for term in found:
        producer = producers[term]
        producer.resize_inputs(adding[term] + 1)
        producer.replace_input_with(adding[term], total)
        places[producer] = places[node]
        total = term
    take_over(graph, {y: total})
    return True


def _place_of_other_term(term: ir.Value) -> int | None:
    """Return the input of a value's producer that is added to the value, if it is free and nothing else reads it."""
    node = term.producer()
    if node is None or node.domain != ONNXTRAIN_DOMAIN or len(term.uses()) != 1 or term.is_graph_output():
        return None
    place = _PLACES.get(node.op_type)
    if place is None or term is not node.outputs[0] or (node.op_type == "Linear" and ACTIVATION in node.attributes):
        return None
    if len(node.inputs) > place and node.inputs[place] is not None:
        return None
    # Nothing can stand for an input before the other term.
    is_lacking = node.op_type == _BY_CHANNEL and (len(node.inputs) < place or None in node.inputs[:place])
    return None if is_lacking else place


def _read_unsplit(graph: ir.Graph, gradient: ir.Node) -> None:
    """Let a gradient read the other term before a Split takes it from a tensor, if nothing else reads that part."""
    first = gradient.inputs[_PLACES[_BY_CHANNEL]]
    split = None if first is None else first.producer()
    if (
        first is None
        or split is None
        or split.op_type != "Split"
        or split.domain
        or len(split.outputs) != 2
        or len(first.uses()) != 1
    ):
        return
    whole, rest = split.inputs[0], split.outputs[1]
    if whole is None or first is not split.outputs[0] or split.attributes.get_int("axis", 0) != 1:
        return
    begin, count = ((dimensions(value) or (None, None))[1] for value in split.outputs)
    if not isinstance(begin, int) or not isinstance(count, int) or rest.is_graph_output():
        return
    op = Builder(graph, graph.opset_imports[""], before=split)
    op.scope = split.name or ""
    part = op.Slice(op.wrap(whole), op.ints(begin), op.ints(begin + count), op.ints(1)).with_shape(dimensions(rest))
    gradient.replace_input_with(_PLACES[_BY_CHANNEL], whole)
    take_over(graph, {rest: part.ir})
    remove_nodes(graph, [split])


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
