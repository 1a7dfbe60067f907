"""The driver of rewrites: a rule says what it finds and what it emits; the driver does the rest.

    NORM = Pattern("RMS norm", Op("Mul", Op("Div", Var("x"), ...), Var("scale")), {"ReduceMean"})

    def _emit(op: Builder, match: Match) -> Value:
        return op.several("SimplifiedLayerNormalization", op.wrap(match["x"]), op.wrap(match["scale"]), outputs=1)[0]

    fuse_norms = Rewrite(Rule(NORM, _emit, guard))

    fuse_norms(model)

The driver lets the new values take over the uses, names, types and shapes of the old ones, gives the name of the node
that computed the result to the one that does now (``recompute=`` names it), removes nodes that nothing needs any more,
and logs why other nodes were left (logger ``onnxtrain.lowering``, level DEBUG).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import values_read
from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.graph.replace import remove_nodes, set_inputs, take_over
from onnxtrain.graph.value import is_float
from onnxtrain.lowering.patterns import Match, Pattern, find, has_anchor

Results = Value | Sequence[Value | None] | None
"""The result, or one value for each output of the node that computed it; ``None`` for one that stays."""


@dataclass(frozen=True)
class Rule:
    """A rewrite of the nodes that a pattern describes."""

    pattern: Pattern
    emit: Callable[[Builder, Match], Results]
    guard: Callable[[Match], object] = lambda match: None
    namesake: str = ""
    everywhere: bool = False
    backwards: bool = False


class Rewrite:
    """A pass that applies rules, one after another, each to the whole graph, in place.

    Requires: a sorted graph with types and shapes. Ensures: the same; new nodes are where the last of the old ones was;
    values that graph outputs or Gradient nodes name stay, and so do their dependents.
    """

    def __init__(self, *rules: Rule, sort: bool = False) -> None:
        self.rules = rules
        self._sort = sort

    def __call__(self, model: ir.Model, backward: Backward | None = None) -> bool:
        """Apply the rules to a model; return whether anything changed."""
        changed = False
        graphs = [model.graph, *(model.graph.subgraphs() if any(rule.everywhere for rule in self.rules) else ())]
        main = Builder(model.graph)
        for graph in graphs:
            assert isinstance(graph, ir.Graph)
            for rule in self.rules:
                if (graph is model.graph or rule.everywhere) and has_anchor(graph, rule.pattern):
                    changed = _apply(rule, Context(model, graph, main), backward) or changed
        if changed and self._sort:
            model.graph.sort()
        return changed


@dataclass(eq=False)
class Context:
    """Answers to guards about the graph that a rule changes."""

    model: ir.Model
    graph: ir.Graph
    main: Builder

    @cached_property
    def named(self) -> set[str]:
        """Names of values that Gradient nodes name."""
        return named_by_gradients(self.graph)

    @cached_property
    def varying(self) -> set[ir.Value]:
        """Values through which a gradient may flow, of those that were there before the rule."""
        return varying_values(self.graph)

    @cached_property
    def options(self) -> GradientOptions:
        """The options of gradients that are not yet built."""
        return GradientOptions.read(self.model.metadata_props)

    @cached_property
    def places(self) -> dict[ir.Node, int]:
        """Indices of the nodes that were there before the rule."""
        return {node: place for place, node in enumerate(self.graph)}


def _apply(rule: Rule, context: Context, backward: Backward | None) -> bool:
    graph, gone, replaced = context.graph, dict[ir.Node, None](), dict[ir.Value, ir.Value]()
    changed = False

    def check(match: Match) -> str | None:
        match.context = context
        match.found = rule.guard(match)
        return match.found if isinstance(match.found, str) else None

    for match in find(graph, rule.pattern, context.named, check, backwards=rule.backwards, gone=gone):
        last, namesake = match.nodes[0], match[rule.namesake] if rule.namesake else match.nodes[0]
        op = context.main.before(last)
        op.scope = last.name or rule.pattern.name
        made = rule.emit(op, match)
        results = [made] if isinstance(made, Value) else made or ()
        pairs = {old: new.ir for old, new in zip(last.outputs, results, strict=False) if new is not None and old.name}
        _give_name(op, pairs.values(), namesake.name)
        take_over(graph, pairs)
        gone.update(_detach_unread(graph, match.nodes, context.named))
        if backward is not None:
            backward.nodes += op.emitted
            replaced |= pairs
        changed = True
    graph.remove(gone)  # at once: every removal looks at all outputs of the graph
    if backward is not None:
        lost = {output for node in gone for output in node.outputs}
        backward.arriving = {replaced.get(value, value) for value in backward.arriving} - lost
    return changed


def _give_name(op: Builder, results: Iterable[ir.Value], name: str | None) -> None:
    """Name the new node that computes the first result, unless a new node has the name already."""
    node = next((value.producer() for value in results), None)
    if node is not None and node in op.emitted and all(other.name != name for other in op.emitted):
        node.name = name


def gradient_nodes(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """Return the Gradient nodes of a graph."""
    return [node for node in nodes if node.op_type == "Gradient" and node.domain == TRAINING_DOMAIN]


def named_by_gradients(graph: ir.Graph) -> set[str]:
    """Return the names that Gradient nodes have in their attributes."""
    names: set[str] = set()
    for node in gradient_nodes(graph):
        lists = [node.attributes[key].as_strings() for key in ("xs", "zs") if key in node.attributes]
        names |= {name for listed in lists for name in listed} | {node.attributes["y"].as_string()}
    return names


def varying_values(graph: ir.Graph) -> set[ir.Value]:
    """Return the values through which a gradient may flow: the xs of Gradient nodes, and what is computed from them."""
    xs = {name for node in gradient_nodes(graph) for name in node.attributes["xs"].as_strings()}
    found = {value for value in (*graph.inputs, *graph.initializers.values()) if value.name in xs}
    for node in graph:
        varies = any(value in found for value in values_read(node))
        found.update(output for output in node.outputs if output.name in xs or (varies and is_float(output)))
    return found


def is_needed(value: ir.Value, named: Collection[str]) -> bool:
    """Return whether a value stays even if no node reads it: a graph output, or named by a Gradient node."""
    return value.is_graph_output() or value.name in named


def remove_unread(graph: ir.Graph, nodes: Iterable[ir.Node], named: Collection[str]) -> None:
    """Remove those of some nodes whose results nothing needs, and then the nodes that only they read, in place."""
    remove_nodes(graph, _detach_unread(graph, nodes, named))


def _detach_unread(graph: ir.Graph, nodes: Iterable[ir.Node], named: Collection[str]) -> Mapping[ir.Node, None]:
    """Take the inputs from the nodes that are to be removed, and return them."""
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
    return unread
