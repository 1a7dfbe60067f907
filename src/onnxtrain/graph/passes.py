"""Passes over a graph: what is computed twice is computed once, what nobody reads goes away.

onnx-ir ships passes of the same names; these differ in that the names of graph outputs are never given to
another value, and that nothing random is merged.
"""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.graph.builder import NEVER_SHARED, attribute_key


def clean(model: ir.Model) -> ir.Model:
    """Merge common subexpressions, remove identities and dead nodes, in place.

    Requires: a topologically sorted graph. Ensures: inputs, outputs and their names stay.
    """
    merge_common_subexpressions(model.graph)
    remove_identities(model.graph)
    return remove_unused(model)


def merge_common_subexpressions(graph: ir.Graph) -> None:
    """Let one node serve where several apply the same operator to the same values, in place."""
    seen: dict[Hashable, ir.Node] = {}
    for node in list(graph):
        attributes = attribute_key({name: a.value for name, a in node.attributes.items()})
        if attributes is None or node.op_type in NEVER_SHARED or any(a.is_ref() for a in node.attributes.values()):
            continue
        key = (node.op_identifier(), len(node.outputs), tuple(map(id, node.inputs)), attributes)
        first = seen.setdefault(key, node)
        if first is node:
            continue
        for old, new in zip(node.outputs, first.outputs, strict=True):
            new.shape = old.shape if new.shape is None else new.shape
            if any(old is output for output in graph.outputs):
                _name_again(graph, node, old, new)
            else:
                old.replace_all_uses_with(new)
        graph.remove(node, safe=True)


def _name_again(graph: ir.Graph, before: ir.Node, old: ir.Value, new: ir.Value) -> None:
    """Keep the name of a graph output whose value another node computes already."""
    identity = ir.Node("", "Identity", [new], num_outputs=1)
    output = identity.outputs[0]
    output.type, output.shape, name = old.type, old.shape, old.name
    graph.insert_before(before, identity)
    old.replace_all_uses_with(output, replace_graph_outputs=True)
    old.name = None
    output.name = name


def remove_identities(graph: ir.Graph) -> None:
    """Remove Identity nodes, in place, except those that give a graph output its name."""
    for node in list(graph):
        if node.op_type != "Identity" or node.domain or node.inputs[0] is None:
            continue
        source, result = node.inputs[0], node.outputs[0]
        if result.is_graph_output():
            if source.producer() is None or source.graph is not graph or source.is_graph_output():
                continue
            name = result.name
            result.replace_all_uses_with(source, replace_graph_outputs=True)
            result.name = None
            source.name = name
        else:
            result.replace_all_uses_with(source)
        if source.shape is None:
            source.shape = result.shape
        graph.remove(node, safe=True)


def remove_dead_nodes(graph: ir.Graph) -> None:
    """Remove the nodes of one graph that no output of it depends on, in place."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def remove_unused(model: ir.Model) -> ir.Model:
    """Remove nodes and initializers that no output depends on, in place."""
    common.RemoveUnusedNodesPass()(model)
    return model
