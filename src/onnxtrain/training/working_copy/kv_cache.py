"""Keys and values of the past, which language models take as inputs: training begins with none, and they go."""

from __future__ import annotations

import re

import onnx_ir as ir

from onnxtrain.ir import Builder
from onnxtrain.ir.domains import MICROSOFT_DOMAIN
from onnxtrain.ir.value import PASTS, dimensions

_ROWS = 2
"""The axis of [batch, heads, rows, size] along which a past grows."""

_PLACES = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7)}
"""Operators of ONNX Runtime, and their inputs that are a past."""

_LAYER_AND_KIND = r"\d+|keys?|values?"
"""What tells the caches of one model apart in their names."""


def leave_out_pasts(model: ir.Model) -> list[str]:
    """Take inputs for keys and values of the past out of a working copy, in place, as if they were empty.

    Such an input has four axes, [batch, heads, rows, size], with any number of rows; what reads it are attention nodes,
    a Concat along the rows, or a Shape. Keys and values of an encoder, which nothing is appended to, stay, and so do
    caches of a fixed size. Where one input that grows is read in another way, all stay: they go together or not at all.

    Returns:
        The names of the inputs that went.
    """
    graph = model.graph
    growing = [value for value in graph.inputs if _may_be_past(value)]
    for value in growing:
        _read_itself(graph, value)
    pasts = [value for value in growing if _is_past(value)]
    rows = {(dimensions(past) or ())[_ROWS] for past in pasts} - {None}
    families = {_family(past) for past in pasts}
    kept = [value for value in growing if value not in pasts]
    # Exporters may give each cache a symbol of its own, so that equal symbols are not the only sign.
    if any((dimensions(value) or ())[_ROWS] in rows or _family(value) in families for value in kept):
        return []
    others = [value for value in graph.inputs if value not in pasts and dimensions(value)]
    if not others:
        return []
    for past in pasts:
        for node, place in list(past.uses()):
            if node.domain == MICROSOFT_DOMAIN:
                node.replace_input_with(place, None)
            elif node.op_type == "Concat":
                _leave_out(node, place)
            else:
                _tell_shape(graph, node, past, _with_batch_of(past, others))
        graph.inputs.remove(past)
    names = [str(past.name) for past in pasts]
    for value in graph.inputs:
        value.meta[PASTS] = tuple(names)
    return names


def _family(value: ir.Value) -> str:
    """The name of a cache without its layer and without key or value: equal for all caches of one kind."""
    return re.sub(_LAYER_AND_KIND, "#", str(value.name).lower())


def _may_be_past(value: ir.Value) -> bool:
    """Whether an input has the axes of a past: any number of rows."""
    shape = dimensions(value)
    if shape is None or len(shape) != 4 or isinstance(shape[_ROWS], int) or not isinstance(shape[1], int):
        return False
    return not value.is_graph_output() and not value.is_initializer()


def _read_itself(graph: ir.Graph, value: ir.Value) -> None:
    """Let those read a past that read copies of it, in place: a cache that starts from it is a Concat of one input."""
    waiting = [value]
    while waiting:
        for node, _ in list(waiting.pop().uses()):
            copies = node.op_type == "Identity" or (node.op_type == "Concat" and len(node.inputs) == 1)
            if copies and not node.domain and node.graph is graph and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(value)
                graph.remove(node, safe=True)
                waiting.append(value)
                break


def _is_past(value: ir.Value) -> bool:
    kinds = {_kind(node, place) for node, place in value.uses()}
    return kinds <= {"attention", "concat", "shape"} and bool(kinds - {"shape"})


def _kind(node: ir.Node, place: int) -> str:
    if node.domain == MICROSOFT_DOMAIN:
        return "attention" if place in _PLACES.get(node.op_type, ()) else ""
    if node.op_type == "Concat" and not node.domain and len(node.inputs) > 1:
        return "concat" if node.attributes["axis"].as_int() in (_ROWS, _ROWS - 4) else ""
    return "shape" if node.op_type == "Shape" and not node.domain else ""


def _leave_out(concat: ir.Node, place: int) -> None:
    """What is put side by side without one of it; the output keeps its name and shape."""
    inputs = [value for index, value in enumerate(concat.inputs) if index != place]
    concat.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        concat.replace_input_with(index, value)


def _with_batch_of(past: ir.Value, others: list[ir.Value]) -> ir.Value:
    """An input whose first axis is that of the past."""
    size = (dimensions(past) or (None,))[0]
    return next((value for value in others if (dimensions(value) or (None,))[0] == size), others[0])


def _tell_shape(graph: ir.Graph, node: ir.Node, past: ir.Value, other: ir.Value) -> None:
    """Put the shape of an empty past in the place of a node that asks for it."""
    op = Builder(graph, graph.opset_imports[""], before=node)
    sizes = [size if isinstance(size, int) else 0 for size in dimensions(past) or ()]
    sizes[_ROWS] = 0
    whole = op.Concat(op.Shape(op.wrap(other), start=0, end=1), op.ints(*sizes[1:]), axis=0)
    first, last = (node.attributes.get(name) for name in ("start", "end"))
    begin, end = 0 if first is None else first.as_int(), 4 if last is None else last.as_int()
    result = whole if (begin, end) == (0, 4) else op.Slice(whole, op.ints(begin), op.ints(end), op.ints(0))
    output = node.outputs[0]
    result.ir.type, result.ir.shape = output.type, output.shape
    name, output.name = output.name, None
    output.replace_all_uses_with(result.ir, replace_graph_outputs=True)
    result.ir.name = name
    graph.remove(node, safe=True)
