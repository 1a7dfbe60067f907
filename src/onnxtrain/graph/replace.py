"""Replace many values of a graph at once.

onnx-ir replaces one input of a node in time linear in the number of inputs; an optimizer node over thousands of
parameters has tens of thousands. These functions take time linear in all uses of the replaced values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

_WIDE = 32
"""Number of inputs from which a node is rewritten at once."""


def replace_values(graph: ir.Graph, pairs: Sequence[tuple[ir.Value, ir.Value]]) -> None:
    """Replace all uses of each old value by the new one, under the old name, through an Identity at the graph's end.

    The new values keep their own names, by which other code may look for them; :func:`onnxtrain.graph.passes.clean`
    removes Identities that are not needed. The nodes are not in order afterwards: sort the graph.
    """
    substitutes: dict[ir.Value, ir.Value] = {}
    for old, new in pairs:
        identity = ir.Node("", "Identity", [new], num_outputs=1)
        graph.append(identity)
        output = identity.outputs[0]
        output.type, output.shape = new.type, new.shape
        substitutes[old] = output
    substitute_and_rename(graph, substitutes)


def substitute_and_rename(graph: ir.Graph, substitutes: Mapping[ir.Value, ir.Value]) -> None:
    """Replace old values by new ones, which take their names; see :func:`substitute`."""
    substitute(graph, substitutes)
    for old, new in substitutes.items():
        name, old.name = old.name, None
        new.name = name


def take_over(graph: ir.Graph, substitutes: Mapping[ir.Value, ir.Value]) -> None:
    """Replace old values by equal new ones, which take their names, types and shapes."""
    for old, new in substitutes.items():
        new.type, new.shape = old.type, old.shape
    substitute_and_rename(graph, substitutes)


def substitute(graph: ir.Graph, substitutes: Mapping[ir.Value, ir.Value]) -> None:
    """Replace old values by new ones in all nodes and in the graph's outputs; the new values keep their names."""
    if any(value.is_graph_output() for value in substitutes):
        for index, value in enumerate(list(graph.outputs)):
            if value in substitutes:
                graph.outputs[index] = substitutes[value]
    for reader in dict.fromkeys(reader for value in substitutes for reader, _ in value.uses()):
        set_inputs(reader, [value if value is None else substitutes.get(value, value) for value in reader.inputs])


def set_inputs(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    """Replace the inputs of a node by as many others."""
    changed = [
        (index, old, new) for index, (old, new) in enumerate(zip(node.inputs, inputs, strict=True)) if old is not new
    ]
    if len(node.inputs) < _WIDE or len(changed) == 1:
        for index, _, new in changed:
            node.replace_input_with(index, new)
        return
    # As replace_input_with does, once for all inputs.
    node._inputs = tuple(inputs)
    for index, old, new in changed:
        if old is not None:
            old._remove_usage(node, index)
        if new is not None:
            new._add_usage(node, index)


def remove_nodes(graph: ir.Graph, nodes: Iterable[ir.Node]) -> None:
    """Remove nodes whose outputs have no readers; their inputs lose these uses."""
    nodes = list(nodes)
    for node in nodes:
        set_inputs(node, [None] * len(node.inputs))
    assert not any(output.uses() or output.is_graph_output() for node in nodes for output in node.outputs)
    graph.remove(nodes)
