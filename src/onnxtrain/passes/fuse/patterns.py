"""What recognising groups of nodes takes: what a value is a multiple of, and whether others look at it.

A Gradient node names values without reading them: a name means the value that the model's author saw, so a named
value stays, and what depended on it goes on depending on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.ir.clone import captured_values
from onnxtrain.ir.domains import TRAINING_DOMAIN
from onnxtrain.ir.replace import remove_nodes, set_inputs
from onnxtrain.ir.value import constant_number, is_float


def named_by_gradients(graph: ir.Graph) -> set[str]:
    """Names that Gradient nodes speak of."""
    names: set[str] = set()
    for node in gradient_nodes(graph):
        lists = [node.attributes[key].as_strings() for key in ("xs", "zs") if key in node.attributes]
        names |= {name for listed in lists for name in listed} | {node.attributes["y"].as_string()}
    return names


def gradient_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The Gradient nodes of a graph."""
    return [node for node in graph if node.op_type == "Gradient" and node.domain == TRAINING_DOMAIN]


def varying_values(graph: ir.Graph) -> set[ir.Value]:
    """The values through which a gradient may have to flow: those x that Gradient nodes name, and what follows.

    Requires: a sorted graph.
    """
    xs = {name for node in gradient_nodes(graph) for name in node.attributes["xs"].as_strings()}
    found = {value for value in (*graph.inputs, *graph.initializers.values()) if value.name in xs}
    for node in graph:
        varies = any(value in found for value in (*node.inputs, *captured_values(node)))
        found.update(output for output in node.outputs if output.name in xs or (varies and is_float(output)))
    return found


def multiple_of(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """What a value is a constant multiple of, and the factor."""
    node = None if value is None else value.producer()
    if node is None or node.domain or node.op_type not in ("Mul", "Div"):
        return None
    first, second = node.inputs
    factor = constant_number(second)
    if factor is not None and first is not None:
        return first, (factor if node.op_type == "Mul" else 1 / factor if factor else math.inf)
    factor = constant_number(first)
    if node.op_type == "Mul" and factor is not None and second is not None:
        return second, factor
    return None


def operands(value: ir.Value | None, operator: str) -> tuple[ir.Value, ir.Value] | None:
    """The first two inputs of the node that a value is the result of, where it is this operator."""
    node = None if value is None else value.producer()
    if node is None or node.domain or node.op_type != operator or None in node.inputs[:2]:
        return None
    first, second = node.inputs[:2]
    assert first is not None
    assert second is not None
    return first, second


def readers(value: ir.Value, operator: str) -> list[ir.Node]:
    """The nodes of a standard operator that read a value."""
    return [node for node, _ in value.uses() if node.op_type == operator and not node.domain]


def between(x: ir.Value, y: ir.Value) -> set[ir.Node]:
    """The nodes that compute y from x, constants apart."""
    found: set[ir.Node] = set()
    pending = [y]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found and node.op_type != "Constant":
            found.add(node)
            pending += [value for value in node.inputs if value is not None and value is not x]
    return found


def are_seen(inside: set[ir.Node], y: ir.Value, named: set[str]) -> bool:
    """Whether something else than y depends on what these nodes give, or may name it."""
    outputs = [output for node in inside for output in node.outputs if output is not y]
    return any(
        is_needed(output, named) or any(reader not in inside for reader, _ in output.uses()) for output in outputs
    )


def is_needed(value: ir.Value, named: set[str]) -> bool:
    """Whether a value has to exist whoever reads it: an output of the graph, or named by a Gradient node."""
    return value.is_graph_output() or value.name in named


def remove_unread(graph: ir.Graph, nodes: Iterable[ir.Node], named: set[str]) -> None:
    """Take away those of some nodes that nobody needs, and then what only they read, in place."""
    pending, unread = list(nodes), dict[ir.Node, None]()
    while pending:
        node = pending.pop()
        if node in unread or node.graph is not graph:
            continue
        if any(output.uses() or is_needed(output, named) for output in node.outputs):
            continue
        sources = [value.producer() for value in node.inputs if value is not None]
        set_inputs(node, [None] * len(node.inputs))
        unread[node] = None
        pending += [source for source in sources if source is not None]
    remove_nodes(graph, unread)  # at once: every removal looks at all outputs of the graph
