"""Put values in the place of others, many at a time.

onnx-ir replaces one input of a node in time linear in their number; an optimizer node over thousands of parameters
has tens of thousands. What is done here to many values takes time linear in all of their uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

_WIDE = 32
"""Inputs from which on a node is rewritten at once."""


def replace_value(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` stand wherever ``old`` did; see :func:`replace_values`."""
    replace_values(graph, [(old, new)])


def replace_values(graph: ir.Graph, pairs: Sequence[tuple[ir.Value, ir.Value]]) -> None:
    """Let each new value stand wherever the old one did, under the old name, through an Identity at the graph's end.

    The new values keep their own names, by which others may look for them;
    :func:`onnxtrain.ir.passes.clean` removes Identities that nobody needs. Ensures no order: sort the graph
    afterwards.
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
    """Let new values take the places of old ones, and their names; see :func:`substitute`."""
    substitute(graph, substitutes)
    for old, new in substitutes.items():
        name, old.name = old.name, None
        new.name = name


def take_over(graph: ir.Graph, substitutes: Mapping[ir.Value, ir.Value]) -> None:
    """Let new values that are what old ones were take their places, names, types and shapes."""
    for old, new in substitutes.items():
        new.type, new.shape = old.type, old.shape
    substitute_and_rename(graph, substitutes)


def substitute(graph: ir.Graph, substitutes: Mapping[ir.Value, ir.Value]) -> None:
    """Let all readers of the old values, and the graph's outputs, have the new ones, which keep their names."""
    if any(value.is_graph_output() for value in substitutes):
        for place, value in enumerate(list(graph.outputs)):
            if value in substitutes:
                graph.outputs[place] = substitutes[value]
    for reader in dict.fromkeys(reader for value in substitutes for reader, _ in value.uses()):
        set_inputs(reader, [value if value is None else substitutes.get(value, value) for value in reader.inputs])


def set_inputs(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    """Give a node other inputs, as many as it has."""
    changed = [
        (place, old, new) for place, (old, new) in enumerate(zip(node.inputs, inputs, strict=True)) if old is not new
    ]
    if len(node.inputs) < _WIDE or len(changed) == 1:
        for place, _, new in changed:
            node.replace_input_with(place, new)
        return
    # What replace_input_with does, once for all of them.
    node._inputs = tuple(inputs)
    for place, old, new in changed:
        if old is not None:
            old._remove_usage(node, place)
        if new is not None:
            new._add_usage(node, place)


def remove_nodes(graph: ir.Graph, nodes: Iterable[ir.Node]) -> None:
    """Take nodes away whose outputs nobody reads: they are no readers of others any more, either."""
    nodes = list(nodes)
    for node in nodes:
        set_inputs(node, [None] * len(node.inputs))
    assert not any(output.uses() or output.is_graph_output() for node in nodes for output in node.outputs)
    graph.remove(nodes)
