"""Fuse chains of elementwise operators into one node, which reads and writes memory once."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule

OPERATOR = "Elementwise"

STEPS = frozenset(
    {"Abs", "Add", "Cast", "Div", "Greater", "Less", "Mul", "Neg", "Relu", "Sigmoid", "Sub", "Sum", "Where"}
)
"""Operators that a chain may have; a Sum is several additions."""

_COPIED = "Sigmoid"
"""Recomputed in each chain that reads it, if only chains do: it is then not kept for the gradient."""

MOST_INPUTS, MOST_STEPS = 8, 16


def fuse_elementwise(model: ir.Model) -> None:
    """Replace elementwise nodes of one shape, of which only the last is read by others, by one node, in place.

    Operands have the shape of the result, or one element. All operators but Sigmoid round as ONNX Runtime's do. Left
    alone is a node that would keep several inputs, instead of its one result, while other nodes run.

    Requires: a sorted graph with shapes. Ensures: a sorted graph; the new node is where the last of the old ones was,
    and has its name.
    """
    chains = _Chains(model.graph)
    Rewrite(Rule(operators("chain", *STEPS), _emit, chains.ending_with, backwards=True))(model)


class _Chains:
    """The chains of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self.order = {node: place for place, node in enumerate(graph)}
        self.before = [0, *itertools.accumulate(_computes(node) for node in graph)]
        self.fitting = {node: shape for node in graph if (shape := _shape(node)) is not None}

    def ending_with(self, match: Match) -> list[ir.Node] | str:
        """Return the nodes that compute the result of a node and nothing else, in order."""
        (last,) = match.nodes
        if last not in self.fitting or _is_truth(match.y):
            return "it is not elementwise in one shape"
        refused: set[ir.Node] = set()
        while True:
            chain = self._grown(last, refused)
            open_ended = [node for node in chain if any(_is_truth(value) for value in _inputs([node], chain))]
            if not open_ended:
                return sorted(chain, key=self.order.__getitem__) if len(chain) > 1 else "no other node fits before it"
            if last in open_ended:
                return "its condition is computed outside of the chain"
            refused.update(open_ended)  # truth is a number inside a chain only

    def _grown(self, last: ir.Node, refused: Collection[ir.Node]) -> list[ir.Node]:
        chain, grows, fitting = [last], True, self.fitting
        while grows:
            grows = False
            for value in _inputs(chain, chain):
                node = value.producer()
                if node is None or node in refused or node not in fitting or fitting[node] != fitting[last]:
                    continue
                readers = value.consumers()
                alone = all(reader in chain for reader in readers)
                copied = node.op_type == _COPIED and all(fitting.get(reader) == fitting[last] for reader in readers)
                if value.is_graph_output() or not (alone or copied) or self._keeps_more(node, last, chain):
                    continue
                longer = [*chain, node]
                if len(_inputs(longer, longer)) <= MOST_INPUTS and sum(map(_count, longer)) <= MOST_STEPS:
                    chain, grows = longer, True
                    break
        return chain

    def _keeps_more(self, node: ir.Node, last: ir.Node, chain: Collection[ir.Node]) -> bool:
        """Return whether a node in the chain keeps several inputs in memory until the last one, not its one result."""
        begin, end = self.order[node], self.order[last]
        if self.before[begin + 1] == self.before[end]:
            return False
        kept = 0
        for value in dict.fromkeys(node.inputs):
            if value is None or value.producer() is None or all(size == 1 for size in dimensions(value) or ()):
                continue  # weights and inputs of the model stay anyway
            readers = (reader for reader in value.consumers() if reader is not node and reader not in chain)
            kept += not value.is_graph_output() and all(self.order.get(reader, -1) < end for reader in readers)
        return kept > 1


def _computes(node: ir.Node) -> bool:
    """Return whether a node takes memory: whether it is no elementwise one, and has a tensor of floats."""
    return bool(node.domain) or (node.op_type not in STEPS and any(is_float(value) for value in node.outputs))


def _emit(op: Builder, match: Match) -> Value:
    chain: list[ir.Node] = match.found
    shape = dimensions(match.y)
    inputs = sorted(_inputs(chain, chain), key=lambda value: dimensions(value) != shape)  # numbers at the end
    names = {value: f"x{place}" for place, value in enumerate(inputs)}
    steps: list[str] = []
    for node in chain:
        total, *others = [names[value] for value in node.inputs if value is not None]
        if node.op_type != "Sum":
            steps.append(" ".join([node.op_type, total, *others]))
        for operand in others if node.op_type == "Sum" else ():
            steps.append(f"Add {total} {operand}")
            total = f"s{len(steps) - 1}"
        names[node.outputs[0]] = f"s{len(steps) - 1}"
    match.nodes = tuple(reversed(chain))
    return emit(op, OPERATOR, *map(op.wrap, inputs), like=[None], program=";".join(steps))[0]


def _inputs(nodes: Iterable[ir.Node], chain: Sequence[ir.Node]) -> list[ir.Value]:
    """The values that some nodes of a chain read from outside it."""
    inside = {node.outputs[0] for node in chain}
    read = (value for node in nodes for value in node.inputs)
    return list(dict.fromkeys(value for value in read if value is not None and value not in inside))


def _count(node: ir.Node) -> int:
    return len(node.inputs) - 1 if node.op_type == "Sum" else 1


def _is_truth(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.BOOL


def _shape(node: ir.Node) -> tuple[object, ...] | None:
    """The type and the shape of a node that may be in a chain."""
    if node.domain or node.op_type not in STEPS or len(node.outputs) != 1 or not node.inputs:
        return None
    y = node.outputs[0]
    sizes = dimensions(y)
    floats = [value for value in (*node.inputs, y) if value is not None and not _is_truth(value)]
    if not sizes or None in sizes or 0 in sizes or any(value is None for value in node.inputs) or not floats:
        return None
    kind = floats[0].dtype
    if kind not in KERNEL_TYPES or any(value.dtype != kind for value in floats):
        return None
    truths = [place for place, value in enumerate(node.inputs) if value is not None and _is_truth(value)]
    if truths != ([0] if node.op_type == "Where" or (node.op_type == "Cast" and truths) else []):
        return None
    if _count(node) == 0 or (node.op_type == "Cast" and y.dtype != kind):
        return None
    whole = [_is_whole(value, sizes) for value in node.inputs if value is not None]
    return (kind, *sizes) if any(whole) and all(fits is not None for fits in whole) else None


def _is_whole(value: ir.Value, sizes: tuple[object, ...]) -> bool | None:
    """True for a value of the result's shape, False for a single number, else None."""
    known = dimensions(value)
    if known is None or len(known) > len(sizes):
        return None
    if known == sizes:
        return True
    return False if all(size == 1 for size in known) else None
