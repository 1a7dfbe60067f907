"""Recompute values in the backward pass instead of keeping them from the forward pass (activation checkpointing).

Copies of forward nodes must neither run before the backward pass arrives at them, nor be recognized as copies: by
this package, by ONNX Runtime's elimination of common subexpressions, or by any other runtime. So a copy reads its input
through a Reshape to its own shape plus a zero that the graph computes from a gradient. ONNX Runtime gives a Reshape the
memory of its input: nothing is copied.

A value that gradients do not read any more could be fused with its reader, and a fused operator rounds differently from
its parts. A Reshape before the reader keeps ONNX Runtime from fusing: numbers stay as they are.

Of a numbered layer only its input is kept, and what other layers read, such as masks. Names say the layer of most
nodes; those between two nodes of a layer belong to it, too. A sum of what came before ends the layer before: where an
exporter fuses it with the norm behind it, the layer would keep both terms.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder
from onnxtrain.graph.clone import Values, clone_nodes, producers, subgraphs, values_read
from onnxtrain.graph.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.graph.passes import RANDOM
from onnxtrain.graph.patterns import matches, no_match
from onnxtrain.graph.replace import set_inputs
from onnxtrain.graph.value import is_float
from onnxtrain.model_file.exporters.pytorch import scopes

LAYERS = "layers"
"""The pattern of ``recompute`` that recomputes each numbered layer separately."""

_LAYER = r"(?:^|[/._])(?:layers?|blocks?|h)[/._]?\d+(?=$|[/._])"
"""A numbered layer in the name of a node, as exporters write it: ``/model/layers.3/mlp``, ``layer0.norm1``."""

_ONCE = RANDOM | {"Dropout", "AllReduce"}
"""Operators whose second result may differ, or that communicate between processes."""

_FUSED_ANYWAY = frozenset({"MatMul"})
"""Operators that ONNX Runtime fuses with their producers, however many others read them."""

_SUMS = frozenset({"Add", "Sum"})
"""Operators that end a layer."""

COPY = "again/"
"""Prefix of the names of recomputed values."""

SHAPES_ONLY = frozenset({"Shape", "Size"})
"""Operators that read no element of their input."""


def number_layers(graph: ir.Graph, patterns: Sequence[str]) -> dict[str, str]:
    """Return the layer of each value that a node of a numbered layer computes, by the names of both.

    Later passes fuse nodes, and give the result of the new one the name of the old.

    Requires: a graph with all of its nodes, before any is fused. Ensures: it is unchanged.
    """
    if LAYERS not in patterns:
        return {}
    found = {node: name for node in graph if (name := _layer_of(node))}
    full = _full_names(set(found.values()))
    return {value.name: full[name] for node, name in found.items() for value in node.outputs if value.name}


def _layer_of(node: ir.Node) -> str:
    """Return the dotted path of the layer that a node is in; "" if it is in none."""
    for name in (node.name or "", *(scopes(node.metadata_props) or ())):
        match = re.search(_LAYER, name)
        if match is not None:
            return name[: match.end()].replace("/", ".").strip(".")
    return ""


def _full_names(names: set[str]) -> dict[str, str]:
    """Map the names of layers to the longest that ends in them: adapters are named by weights, others by modules."""
    ordered = sorted(names, key=len, reverse=True)
    full: dict[str, str] = {}
    for name in ordered:
        longer = [other for other in full if other.endswith("." + name) and full[other] == other]
        full[name] = longer[0] if len(longer) == 1 else name
    return full


def check_patterns(graph: ir.Graph, patterns: Sequence[str], layers: Mapping[str, str]) -> None:
    """Refuse patterns that match no node name.

    Requires: a graph with all of its nodes, before any is fused. Ensures: it is unchanged; each pattern matches a name.
    """
    if not patterns:
        return
    nodes = [node for node in graph if node.name and not (node.op_type == "Gradient" and node.domain)]
    names = [node.name or "" for node in nodes]
    for pattern in patterns:
        if pattern == LAYERS and not layers:
            raise GradientError(
                "recompute='layers', but no node has a name with a numbered layer, such as 'layers.3'; name nodes by "
                f"patterns; the model has {', '.join(map(repr, names[:8])) or 'no node with a name'}."
            ).about("recompute", got=names)
        if pattern != LAYERS and not matches(pattern, *names):
            raise GradientError(no_match("recompute", pattern, "named node", names))


def recompute(graph: ir.Graph, backward: Backward, patterns: Sequence[str], layers: Mapping[str, str]) -> None:
    """Let gradient nodes read copies of the forward nodes whose names match a pattern, in place.

    Neighbouring matching nodes are recomputed together, from the inputs of the first of them. Values that are not
    floating (shapes, indices) and nodes that draw random numbers are not recomputed. Requires: a sorted graph without
    dead nodes.
    Ensures: the same, and every output equal bit by bit.
    """
    if not patterns:
        return
    carrying = {node for node in backward.nodes if node.graph is graph}
    forward = [node for node in graph if node not in carrying]
    by_layer = _by_layer(forward, layers)
    chosen = {node: by_layer.get(node, "") for node in _choose(forward, patterns, by_layer)}
    order = {node: index for index, node in enumerate(graph)}
    late = _late(graph, carrying, backward.arriving)
    for nodes in _neighbours(graph, chosen):
        layer = chosen[nodes[0]]
        kept = _read_elsewhere(nodes, layer, by_layer, carrying) if layer else set()
        segment = _Segment(graph, nodes, [node for node in graph if node in carrying], order, kept)
        trigger = segment.trigger(late)
        if trigger is not None:
            segment.copy(trigger)
    graph.sort()


def _by_layer(forward: Sequence[ir.Node], layers: Mapping[str, str]) -> dict[ir.Node, str]:
    """Return the layers of the forward nodes that are in one."""
    own = {node: layer for node in forward for value in node.outputs if (layer := layers.get(value.name or ""))}
    order = {layer: place for place, layer in enumerate(dict.fromkeys(own.values()))}
    leads = set[ir.Node]()  # nodes on which a node of a layer depends
    for node in reversed(forward):
        if any(reader in own or reader in leads for value in node.outputs for reader in value.consumers()):
            leads.add(node)
    found: dict[ir.Node, str] = {}
    for node in forward:
        before = [found[producer] for producer in _producers(node) if producer in found]
        if node in own:
            found[node] = own[node]
            if before and own[node] not in before and node.op_type in _SUMS and not node.domain:
                found[node] = max(before, key=order.__getitem__)
        elif before and node in leads:
            found[node] = max(before, key=order.__getitem__)
    return found


def _producers(node: ir.Node) -> list[ir.Node]:
    """Return the nodes that compute the floating inputs of a node."""
    floating = filter(is_float, values_read(node))
    return [producer for value in floating if (producer := value.producer()) is not None]


def _read_elsewhere(
    nodes: Sequence[ir.Node], layer: str, by_layer: Mapping[ir.Node, str], carrying: Collection[ir.Node]
) -> set[ir.Value]:
    """Return the results of a layer's nodes that forward nodes outside of the layer read: they are kept in any case."""
    return {
        value
        for node in nodes
        for value in node.outputs
        if any(reader not in carrying and by_layer.get(reader) != layer for reader in value.consumers())
    }


def _choose(forward: Sequence[ir.Node], patterns: Sequence[str], by_layer: Mapping[ir.Node, str]) -> set[ir.Node]:
    matching = [
        node
        for node in forward
        if node in by_layer or any(matches(pattern, node.name or "") for pattern in patterns if pattern != LAYERS)
    ]
    return {node for node in matching if any(map(is_float, node.outputs)) and not _draws(node)}


def _draws(node: ir.Node) -> bool:
    if node.op_type in _ONCE or node.domain not in ("", MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN):
        return True  # an unknown operator may draw random numbers
    return any(_draws(inner) for graph in subgraphs(node) for inner in graph)


def _late(graph: ir.Graph, carrying: Collection[ir.Node], arriving: Collection[ir.Value]) -> set[ir.Node]:
    """Return the gradient nodes that cannot run before the backward pass arrives at them.

    They depend on the gradient of some forward value, and through it on an activation; a gradient node that only reads
    a forward value (to transpose it, say) could run in the forward pass.
    """
    active: set[ir.Node] = set()
    late: set[ir.Node] = set()
    for node in graph:
        if node not in carrying or node.op_type in SHAPES_ONLY:
            continue
        producers = {value.producer() for value in node.inputs if value is not None and is_float(value)} - {None}
        if any(producer in active or producer not in carrying for producer in producers):
            active.add(node)
        if producers & late or (node in active and any(output in arriving for output in node.outputs)):
            late.add(node)
    return late


def _neighbours(graph: ir.Graph, chosen: Mapping[ir.Node, str]) -> list[list[ir.Node]]:
    """Return the chosen nodes of one layer in groups connected by their inputs, in order."""
    group: dict[ir.Node, list[ir.Node]] = {}
    for node in graph:
        if node not in chosen:
            continue
        merged = [node]
        for producer in producers(node):
            if producer in group and chosen[producer] == chosen[node] and group[producer] is not merged:
                merged = group[producer] + merged
                for member in merged:
                    group[member] = merged
        for member in merged:
            group[member] = merged
    return list({id(members): members for members in group.values()}.values())


class _Segment(NamedTuple):
    """Nodes that are recomputed together."""

    graph: ir.Graph
    nodes: Sequence[ir.Node]  # in order
    backward: Sequence[ir.Node]  # the gradient nodes, in order
    order: dict[ir.Node, int]  # indices of all nodes in the graph
    kept: Collection[ir.Value]  # results of the segment that are kept, as others read them

    def trigger(self, late: Collection[ir.Node]) -> ir.Value | None:
        """Return the gradient that starts the recomputation once it is computed; ``None`` if no gradient node needs it.

        It is an input of the first gradient node that reads the segment, or else the last gradient before that node;
        neither depends on the segment.
        """
        reader = next((node for node in self.readers() if node.op_type not in SHAPES_ONLY), None)
        if reader is None:
            return None
        for value in reader.inputs:
            if value is not None and value.producer() in late and is_float(value):
                return value
        before = [node for node in self.backward if self.order[node] < self.order[reader] and node in late]
        return next((v for node in reversed(before) for v in node.outputs if v.name and is_float(v)), None)

    def readers(self) -> list[ir.Node]:
        """Return the gradient nodes that read results of the segment."""
        results = self._results()
        return [node for node in self.backward if any(value in results for value in node.inputs)]

    def _results(self) -> set[ir.Value]:
        return {output for node in self.nodes for output in node.outputs if output not in self.kept}

    def copy(self, trigger: ir.Value) -> None:
        """Replace the segment by copies for the gradient nodes from the first reader on."""
        readers = self.readers()
        first = next(node for node in readers if node.op_type not in SHAPES_ONLY)
        readers = [node for node in readers if self.order[node] >= self.order[first]]
        op = Builder(self.graph, before=first)
        op.scope = f"again: {self.nodes[0].name}"
        mapping: Values = {}
        for node in self._needed(readers):
            if not any(value in mapping for value in node.inputs):
                source = next((value for value in node.inputs if value is not None and not _is_constant(value)), None)
                if source is None:
                    continue  # computed from constants: runtimes fold it
                mapping[source] = _behind(op, source, trigger)
            copies = clone_nodes([node], mapping, rename=lambda name: COPY + name)
            self.graph.insert_before(first, copies)
        own = self._results()
        copied = {old: new for old, new in mapping.items() if old in own and new is not None}
        lost: dict[ir.Value, None] = {}
        for reader in readers:
            lost.update((value, None) for value in reader.inputs if value in copied)
            set_inputs(reader, [value if value is None else copied.get(value, value) for value in reader.inputs])
        for value in lost:
            self._keep_apart(value)

    def _keep_apart(self, value: ir.Value) -> None:
        """Let the forward nodes read a value that gradients do not read any more through a Reshape."""
        readers = {node for node in value.consumers() if node in self.order and node.op_type not in _FUSED_ANYWAY}
        if not readers - set(self.backward):
            return
        op = Builder(self.graph, before=min(readers, key=self.order.__getitem__))
        op.scope = f"apart: {value.name}"
        same = op.Reshape(op.wrap(value), op.Shape(op.wrap(value)), allowzero=1).ir
        same.type, same.shape = value.type, value.shape
        for reader in readers:
            set_inputs(reader, [same if old is value else old for old in reader.inputs])

    def _needed(self, readers: Iterable[ir.Node]) -> list[ir.Node]:
        """Return the nodes of the segment that the readers depend on."""
        needed = {value for node in readers for value in node.inputs}
        found = []
        for node in reversed(self.nodes):
            if any(output in needed and output not in self.kept for output in node.outputs):
                found.append(node)
                needed.update(values_read(node))
        return found[::-1]


def _is_constant(value: ir.Value) -> bool:
    if value.producer() is None:
        return value.is_initializer()
    return value.producer().op_type == "Constant"  # type: ignore[union-attr]


def _behind(op: Builder, source: ir.Value, trigger: ir.Value) -> ir.Value:
    """Return the same tensor in the same memory, not before the trigger is computed."""
    gradient, value = op.wrap(trigger), op.wrap(source)
    element = op.Slice(op.Reshape(gradient, op.ints(-1)), op.ints(0), op.ints(1))
    element = op.cast(element, ir.DataType.FLOAT)  # not every runtime compares every type
    zero = op.ReduceSum(op.cast(op.Less(element, element), ir.DataType.INT64), op.ints(0), keepdims=1)
    again = op.Reshape(value, op.Shape(value) + zero, allowzero=1)
    again.ir.type = source.type
    return again.with_shape(value.shape).ir
