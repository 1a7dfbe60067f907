"""Passes that clean a graph: merge common subexpressions, remove identities and dead nodes.

onnx-ir has passes of the same names; unlike those, these keep the names of graph outputs and never merge random nodes
(workarounds: merged random nodes, merged outputs).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.replace import remove_nodes, substitute
from onnxtrain.graph.value import attributes_of

RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)

# Random nodes must sample again, nodes with bodies are not compared, and an Identity gives a value a second name.
NEVER_SHARED = RANDOM | {"Dropout", "If", "Loop", "Scan", "Identity"}


def attribute_key(attributes: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key that is equal for equal attributes; ``None`` if one of them (a graph) cannot be compared."""
    parts: list[Any] = []
    for name, item in sorted(attributes.items()):
        if hasattr(item, "tobytes") and hasattr(item, "dtype"):  # a check against the protocol would cost 0.1 ms
            texts = item.dtype == ir.DataType.STRING
            content = tuple(item.numpy().reshape(-1)) if texts else item.tobytes()
            parts.append((name, str(item.dtype), tuple(item.shape.numpy()), content))
        elif isinstance(item, (list, tuple)) and all(isinstance(i, (int, float, str)) for i in item):
            parts.append((name, *map(repr, item)))
        elif isinstance(item, (int, float, str)):
            parts.append((name, repr(item)))
        else:
            return None
    return tuple(parts)


def clean(model: ir.Model) -> ir.Model:
    """Merge common subexpressions, remove identities and dead nodes, in place.

    Requires: a topologically sorted graph. Ensures: inputs, outputs and their names stay.
    """
    merge_common_subexpressions(model.graph)
    remove_identities(model.graph)
    return remove_unused(model)


def merge_common_subexpressions(graph: ir.Graph) -> None:
    """Merge nodes that apply the same operator to the same values, in place."""
    seen: dict[Hashable, ir.Node] = {}
    substitutes: dict[ir.Value, ir.Value] = {}
    removed: list[ir.Node] = []
    for node in list(graph):
        attributes = attribute_key(attributes_of(node))
        if attributes is None or node.op_type in NEVER_SHARED or any(a.is_ref() for a in node.attributes.values()):
            continue
        inputs = tuple(id(value if value is None else substitutes.get(value, value)) for value in node.inputs)
        first = seen.setdefault((node.op_identifier(), len(node.outputs), inputs, attributes), node)
        if first is node:
            continue
        removed.append(node)
        for old, new in zip(node.outputs, first.outputs, strict=True):
            know_as_much(new, old)
            if old.is_graph_output():
                _name_again(graph, node, old, new)
            else:
                substitutes[old] = new
    substitute(graph, substitutes)
    remove_nodes(graph, removed)


def _name_again(graph: ir.Graph, before: ir.Node, old: ir.Value, new: ir.Value) -> None:
    """Keep the name of a graph output whose node is merged into another one."""
    identity = ir.Node("", "Identity", [new], num_outputs=1)
    output = identity.outputs[0]
    output.type, output.shape, name = old.type, old.shape, old.name
    graph.insert_before(before, identity)
    old.replace_all_uses_with(output, replace_graph_outputs=True)
    old.name = None
    output.name = name


def remove_identities(graph: ir.Graph) -> None:
    """Remove Identity nodes, in place, except those that give a graph output its name."""
    substitutes: dict[ir.Value, ir.Value] = {}
    names: dict[ir.Value, str | None] = {}
    removed: list[ir.Node] = []
    for node in graph:
        if node.op_type != "Identity" or node.domain or node.inputs[0] is None:
            continue
        source, result = substitutes.get(node.inputs[0], node.inputs[0]), node.outputs[0]
        if result.is_graph_output():
            if source.producer() is None or source.graph is not graph or source.is_graph_output() or source in names:
                continue
            names[source] = result.name
        substitutes[result] = source
        removed.append(node)
        know_as_much(source, result)
    substitute(graph, substitutes)
    for node in removed:
        if substitutes[node.outputs[0]] in names:
            node.outputs[0].name = None
    for source, name in names.items():
        source.name = name
    remove_nodes(graph, removed)


def know_as_much(value: ir.Value, other: ir.Value) -> None:
    """Take over type and shape from an equal value; onnx-ir warns of a shape without a type."""
    value.type = other.type if value.type is None else value.type
    value.shape = other.shape if value.shape is None else value.shape


def remove_dead_nodes(graph: ir.Graph) -> None:
    """Remove the nodes of one graph that no output of it depends on, in place."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            remove_nodes(graph, [node])


def remove_unused(model: ir.Model) -> ir.Model:
    """Remove nodes and initializers that no output depends on, in place."""
    common.RemoveUnusedNodesPass()(model)
    return model


def forget_unused_domains(model: ir.Model, domains: Iterable[str]) -> None:
    """Drop those of some imports whose domain no node has, in place."""
    nodes = [all_nodes(part) for part in (model.graph, *model.functions.values())]
    used = {node.domain for node in itertools.chain(*nodes)}
    for domain in {*domains} - used:
        model.graph.opset_imports.pop(domain, None)
