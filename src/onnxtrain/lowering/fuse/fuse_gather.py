"""Fuse a Gather of rows with its only reader: a sum of rows at other indices, or a Concat.

A layer of a graph network gathers a row for every edge and adds these up for every node; its gradient does the same the
other way around. The rows of all edges, many times those of the nodes, need not be written: they are added where they
lie. Rows of embeddings beside numbers are copied to their place at once.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import dimensions

OTHER, TAKEN = 3, 4
"""Inputs of a sum of rows: another term, and which rows of the first input are added."""


class _Joined(NamedTuple):
    """Rows of a table that a Concat joins to x, and the nodes between."""

    gather: ir.Node
    flat: ir.Node | None
    x: ir.Value
    before: bool


def fuse_gather(graph: ir.Graph) -> None:
    """Let ``GatherGradient`` take the rows that it adds up, and a Concat those that it joins, from a table, in place.

        x, j -> Gather -> r;  r, i, shape -> GatherGradient -> y    becomes    x, i, shape, [], j -> GatherGradient -> y
        t, i -> Gather -> r;  r -> Flatten -> f;  x, f -> Concat -> y    becomes    t, i, x -> GatherConcat -> y

    with the same bits; [] is an empty tensor (workarounds: optional inputs of custom operators). Left alone are rows
    that others read, gathered along another axis, or by indices that are not int64: a list for a sum, and one or
    several for each row of x.

    Requires: a sorted graph with types and shapes, in which all gradients are built. Ensures: a sorted graph.
    """
    if not any(node.op_type == "Gather" for node in graph):
        return
    main = Builder(graph, graph.opset_imports[""])
    for node in list(graph):
        if (gather := _gather_before(node)) is not None:
            node.resize_inputs(TAKEN + 1)
            node.replace_input_with(0, gather.inputs[0])
            if node.inputs[OTHER] is None:
                node.replace_input_with(OTHER, main.constant([], node.outputs[0].dtype).ir)
            node.replace_input_with(TAKEN, gather.inputs[1])
            for reader, slot in list(gather.outputs[0].uses()):  # the first axis has the size of the indices
                reader.replace_input_with(slot, gather.inputs[1])
            remove_nodes(graph, [gather])
        elif (joined := _joined_by(node)) is not None:
            op = main.before(node)
            op.scope = node.name or ""
            inputs = [op.wrap(value) for value in (*joined.gather.inputs, joined.x) if value is not None]
            (y,) = emit(op, "GatherConcat", *inputs, like=[op.wrap(node.outputs[0])], before=int(joined.before))
            take_over(graph, {node.outputs[0]: y.ir})
            remove_nodes(graph, [each for each in (node, joined.flat, joined.gather) if each is not None])


def _gather_before(node: ir.Node) -> ir.Node | None:
    """Return the Gather whose rows a node adds up, if nothing else reads them."""
    if node.op_type != "GatherGradient" or node.domain != ONNXTRAIN_DOMAIN or len(node.inputs) > TAKEN:
        return None
    gather = _only_read(node.inputs[0], "Gather", or_its_length=True)
    if gather is None:
        return None
    table, indices = gather.inputs
    sizes = [dimensions(value) for value in (table, indices, node.inputs[1]) if value is not None]
    if not sizes[0] or [len(each or ()) for each in sizes[1:]] != [1, 1]:
        return None
    axes = [each.attributes.get_int("axis", 0) % len(sizes[0]) for each in (gather, node)]
    if axes[0] != axes[1] or (axes[0] != 0 and len(gather.outputs[0].uses()) > 1):
        return None
    return gather if indices is not None and indices.dtype == ir.DataType.INT64 else None


def _joined_by(node: ir.Node) -> _Joined | None:
    """Return what a Concat of two matrices joins, if one of them is the rows of a table, which nothing else reads."""
    sizes = dimensions(node.outputs[0])
    if node.op_type != "Concat" or node.domain or len(node.inputs) != 2 or sizes is None or len(sizes) != 2:
        return None
    if node.attributes["axis"].as_int() not in (1, -1):
        return None
    for place, value in enumerate(node.inputs):
        x, flat = node.inputs[1 - place], _only_read(value, "Flatten")
        gather = _only_read(value if flat is None else flat.inputs[0], "Gather")
        if x is None or gather is None or (flat is not None and flat.attributes.get_int("axis", 1) != 1):
            continue
        table, indices = gather.inputs
        if table is None or indices is None or table.dtype not in KERNEL_TYPES or indices.dtype != ir.DataType.INT64:
            continue
        ranks = [len(dimensions(each) or ()) for each in (table, indices, x)]
        if ranks == [2, 2, 2] and gather.attributes.get_int("axis", 0) in (0, -2) and flat is not None:
            return _Joined(gather, flat, x, place == 1)
    return None


def _only_read(value: ir.Value | None, operator: str, *, or_its_length: bool = False) -> ir.Node | None:
    """Return the node of a standard operator that computes a value, if one input of one node reads it.

    Args:
        value: The value.
        operator: The operator.
        or_its_length: Other nodes may read the size of the first axis.
    """
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type != operator or node.domain or value.is_graph_output():
        return None
    readers = [reader for reader, _ in value.uses() if not (or_its_length and _is_length(reader))]
    return node if len(readers) == 1 else None


def _is_length(node: ir.Node) -> bool:
    """Return whether a node computes the size of the first axis."""
    ends = [node.attributes.get_int(name, default) for name, default in (("start", 0), ("end", -1))]
    return node.op_type == "Shape" and not node.domain and ends == [0, 1]
