"""Copy nodes with other inputs and attributes: for function bodies, substitution and joining graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import onnx_ir as ir

Values = dict[ir.Value, ir.Value | None]
"""The substitute in the copy for each original value; ``None`` for an input that is left out."""


def clone_nodes(
    nodes: Iterable[ir.Node],
    values: Values,
    *,
    rename: Callable[[str], str] = lambda name: name,
    attributes: Mapping[str, ir.Attr] | None = None,
) -> list[ir.Node]:
    """Copy nodes in order."""
    return [_clone_node(node, values, rename, attributes) for node in nodes]


def _clone_node(
    node: ir.Node, values: Values, rename: Callable[[str], str], attributes: Mapping[str, ir.Attr] | None
) -> ir.Node:
    made = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else values.get(value, value) for value in node.inputs],
        [
            clone
            for attribute in node.attributes.values()
            if (clone := _clone_attribute(attribute, values, rename, attributes)) is not None
        ],
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
        name=rename(node.name) if node.name else None,
        doc_string=node.doc_string,
        metadata_props=dict(node.metadata_props),
    )
    for old, new in zip(node.outputs, made.outputs, strict=True):
        _copy_description(old, new, rename)
        values[old] = new
    return made


def _copy_description(old: ir.Value, new: ir.Value, rename: Callable[[str], str]) -> None:
    new.name = rename(old.name) if old.name else old.name
    new.type = old.type
    new.shape = None if old.shape is None else old.shape.copy()


def _clone_attribute(
    attribute: ir.Attr, values: Values, rename: Callable[[str], str], attributes: Mapping[str, ir.Attr] | None
) -> ir.Attr | None:
    if attribute.is_ref():
        if attributes is None:
            return attribute
        given = attributes.get(attribute.ref_attr_name or "")
        if given is None:
            return None  # an optional attribute that the caller left out: the inner node leaves it out, too
        return ir.Attr(attribute.name, given.type, given.value)
    if attribute.type == ir.AttributeType.GRAPH:
        graph = clone_graph(attribute.as_graph(), values, rename=rename, attributes=attributes)
        return ir.AttrGraph(attribute.name, graph)
    if attribute.type == ir.AttributeType.GRAPHS:
        graphs = [clone_graph(g, values, rename=rename, attributes=attributes) for g in attribute.as_graphs()]
        return ir.AttrGraphs(attribute.name, graphs)
    return attribute


def clone_graph(
    graph: ir.Graph,
    outer: Values,
    *,
    rename: Callable[[str], str] = lambda name: name,
    attributes: Mapping[str, ir.Attr] | None = None,
) -> ir.Graph:
    """Copy a subgraph; values of the surrounding graph are read through ``outer``."""
    values: Values = dict(outer)

    def copy(old: ir.Value) -> ir.Value:
        new = ir.Value(name=old.name, const_value=old.const_value)
        _copy_description(old, new, rename)
        values[old] = new
        return new

    inputs = [copy(value) for value in graph.inputs]
    initializers = [values.get(value) or copy(value) for value in graph.initializers.values()]
    nodes = clone_nodes(graph, values, rename=rename, attributes=attributes)
    outputs = [values.get(value, value) for value in graph.outputs]
    return ir.Graph(
        inputs,
        [value for value in outputs if value is not None],
        nodes=nodes,
        initializers=[value for value in initializers if value is not None],
        opset_imports=dict(graph.opset_imports),
        name=graph.name,
        doc_string=graph.doc_string,
    )


def captured_values(node: ir.Node) -> list[ir.Value]:
    """Values of surrounding graphs that the subgraphs of a node read, each once, in order of first use."""
    bodies = subgraphs(node)
    if not bodies:
        return []
    found: dict[ir.Value, None] = {}
    for graph in bodies:
        _collect_captured(graph, set(), found)
    return list(found)


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs among a node's attributes: its bodies."""
    found: list[ir.Graph] = []
    attributes = node.attributes.data  # the dictionary itself: this is called for every node, many times
    if not attributes:
        return found
    for attribute in attributes.values():
        if attribute.type not in _GRAPH_TYPES or attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        else:
            found += attribute.as_graphs()
    return found


def all_nodes(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Iterate over the nodes of a graph or function and of all bodies in it, each node before its bodies."""
    for node in nodes:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def all_graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Iterate over a graph and all bodies in it."""
    yield graph
    for node in all_nodes(graph):
        yield from subgraphs(node)


_GRAPH_TYPES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _collect_captured(graph: ir.Graph, known: set[ir.Value], found: dict[ir.Value, None]) -> None:
    inner = known | set(graph.inputs) | set(graph.initializers.values())
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in inner:
                found[value] = None
        for value in captured_values(node):
            if value not in inner:
                found[value] = None
        inner.update(node.outputs)
    for value in graph.outputs:
        if value not in inner:
            found[value] = None


def values_read(node: ir.Node) -> list[ir.Value]:
    """The values that a node, or a body inside it, reads."""
    return [*(value for value in node.inputs if value is not None), *captured_values(node)]


def computed_from(nodes: Iterable[ir.Node], values: Iterable[ir.Value]) -> set[ir.Value]:
    """The values, and all that nodes in the order of their graph compute from them."""
    found = set(values)
    for node in nodes:
        if any(value in found for value in values_read(node)):
            found.update(node.outputs)
    return found


def producers(node: ir.Node) -> list[ir.Node]:
    """The nodes whose outputs a node, or a body inside it, reads."""
    return [producer for value in values_read(node) if (producer := value.producer()) is not None]


def ancestors(nodes: Iterable[ir.Node], *, known: Collection[ir.Node] = ()) -> set[ir.Node]:
    """The nodes and all nodes that they depend on, without known nodes and those behind them only."""
    found: set[ir.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in known and node not in found:
            found.add(node)
            waiting.extend(producers(node))
    return found


def needed_for(values: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that compute values, and all that these depend on."""
    return ancestors(producer for value in values if (producer := value.producer()) is not None)
