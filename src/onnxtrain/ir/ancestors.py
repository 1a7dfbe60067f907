"""What nodes depend on, wherever they stand in a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from onnxtrain.ir.clone import captured_values


def producers(node: ir.Node) -> list[ir.Node]:
    """The nodes that a node, or a graph inside it, takes values from."""
    values = [*node.inputs, *captured_values(node)]
    return [producer for value in values if value is not None and (producer := value.producer()) is not None]


def ancestors(nodes: Iterable[ir.Node], *, known: Collection[ir.Node] = ()) -> set[ir.Node]:
    """Nodes and all that they depend on, but those that are known already and what only these depend on."""
    found: set[ir.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in known and node not in found:
            found.add(node)
            waiting.extend(producers(node))
    return found
