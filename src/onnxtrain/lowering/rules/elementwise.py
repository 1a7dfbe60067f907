"""Fuse chains of elementwise operators into one node, which reads and writes memory once."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import constant_number, dimensions, is_float
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule
from onnxtrain.operators.registry import OPTIMIZERS

OPERATOR = "Elementwise"

SLOW = frozenset({"Abs", "Atanh", "Cos", "Cosh", "Log", "Mod", "Pow", "Sign", "Sin", "Sinh", "Tan", "Where"})
"""Steps that ONNX Runtime computes element by element, which are a chain even alone."""

STEPS = SLOW | {
    *("Add", "Cast", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mul", "Neg", "Relu", "Sigmoid", "Sub", "Sum")
}
"""Operators that a chain may have; a Sum is several additions."""

WRITTEN: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "Celu": ("Div x alpha; Exp s0; Sub s1 1; Mul s2 alpha; Less x 0; Where s4 s3 x", {"alpha": 1}),
    "Elu": ("Exp x; Sub s0 1; Mul s1 alpha; Less x 0; Where s3 s2 x", {"alpha": 1}),
    "HardSigmoid": ("Mul x alpha; Add s0 beta; Min s1 1; Relu s2", {"alpha": 0.2, "beta": 0.5}),
    "HardSwish": ("Mul x 0.16666666666666666; Add s0 0.5; Min s1 1; Relu s2; Mul x s3", {}),
    "LeakyRelu": ("Mul x alpha; Less x 0; Where s1 s0 x", {"alpha": 0.01}),
    "Mish": ("Sigmoid x; Sub 1 s0; Add s1 1; Mul s0 s2; Mul s1 s1; Add s4 1; Div s3 s5; Mul x s6", {}),
    "Selu": (
        "Exp x; Sub s0 1; Mul s1 alpha; Less x 0; Where s3 s2 x; Mul s4 gamma",
        {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805},
    ),
    "Shrink": (
        "Sub x bias; Add x bias; Neg x; Greater s2 lambd; Greater x lambd; Where s4 s0 0; Where s3 s1 s5",
        {"bias": 0, "lambd": 0.5},
    ),
    "Softplus": ("Abs x; Neg s0; Exp s1; Log1p s2; Relu x; Add s3 s4", {}),
    "Swish": ("Mul x alpha; Sigmoid s0; Mul x s1", {"alpha": 1}),
    "ThresholdedRelu": ("Greater x alpha; Where s0 x 0", {"alpha": 1}),
}
"""Operators that a chain has as several steps, with the defaults of their attributes; they are a chain even alone."""

_ALONE = SLOW | set(WRITTEN)

_ELEMENTWISE = STEPS | set(WRITTEN)

_COPIED = "Sigmoid"
"""Recomputed in each chain that reads it, if only chains do: it is then not kept for the gradient."""

MOST_INPUTS, MOST_STEPS = 8, 16

_SPLIT = {name: [step.split() for step in text.split(";")] for name, (text, _) in WRITTEN.items()}


def fuse_elementwise(model: ir.Model) -> None:
    """Replace elementwise nodes of one shape, of which only the last is read by others, by one node, in place.

    Operands have the shape of the result, or one element. All operators but Sigmoid round as ONNX Runtime's do. Left
    alone is a node that would keep several inputs, instead of its one result, while other nodes run.

    Requires: a sorted graph with shapes. Ensures: a sorted graph; the new node is where the last of the old ones was,
    and has its name.
    """
    chains = _Chains(model.graph)
    Rewrite(Rule(operators("chain", *STEPS, *WRITTEN), _emit, chains.ending_with, backwards=True))(model)


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
        chain = self._grown(last)
        if len(chain) == 1 and (last.op_type not in _ALONE or _masks_gradient(match.y)):
            return "no other node fits before it"
        if all(_is_truth(value) or dimensions(value) != dimensions(match.y) for value in _inputs(chain, chain)):
            return "no number that it reads has the shape of the result"
        return sorted(chain, key=self.order.__getitem__)

    def _grown(self, last: ir.Node) -> list[ir.Node]:
        chain, grows, fitting = [last], True, self.fitting
        while grows:
            grows = False
            for value in _inputs(chain, chain):
                node = value.producer()
                if node is None or node not in fitting or fitting[node] != fitting[last]:
                    continue
                readers = value.consumers()
                alone = all(reader in chain for reader in readers)
                copied = node.op_type == _COPIED and all(fitting.get(reader) == fitting[last] for reader in readers)
                if value.is_graph_output() or not (alone or copied) or self._keeps_more(node, last, chain):
                    continue
                longer = [*chain, node]
                inputs = len(_inputs(longer, longer)) + len({number for each in longer for number in _numbers(each)})
                if inputs <= MOST_INPUTS and sum(map(_count, longer)) <= MOST_STEPS:
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


def _masks_gradient(value: ir.Value) -> bool:
    """Return whether an optimizer reads a value: its update applies the mask."""
    return any(reader.op_type in OPTIMIZERS for reader in value.consumers())


def _computes(node: ir.Node) -> bool:
    """Return whether a node takes memory: whether it is no elementwise one, and has a tensor of floats."""
    return bool(node.domain) or (node.op_type not in _ELEMENTWISE and any(is_float(value) for value in node.outputs))


def _emit(op: Builder, match: Match) -> Value:
    chain: list[ir.Node] = match.found
    shape = dimensions(match.y)
    # The first input has the shape of the result, and numbers are at the end.
    inputs = sorted(_inputs(chain, chain), key=lambda value: (dimensions(value) != shape, _is_truth(value)))
    numbers = list(dict.fromkeys(number for node in chain for number in _numbers(node)))
    names: dict[object, str] = {value: f"x{place}" for place, value in enumerate([*inputs, *numbers])}
    steps: list[str] = []
    for node in chain:
        total, *others = [names[value] for value in node.inputs if value is not None]
        if node.op_type in WRITTEN:
            start = len(steps)
            for operator, words in _written(node):
                read = {"x": total} | {f"s{place}": f"s{start + place}" for place in range(len(steps) - start)}
                steps.append(" ".join([operator, *(read[w] if isinstance(w, str) else names[w] for w in words)]))
        elif node.op_type != "Sum":
            steps.append(" ".join([node.op_type, total, *others]))
        for operand in others if node.op_type == "Sum" else ():
            steps.append(f"Add {total} {operand}")
            total = f"s{len(steps) - 1}"
        names[node.outputs[0]] = f"s{len(steps) - 1}"
    match.nodes = tuple(reversed(chain))
    first = op.wrap(inputs[0])
    given = [first, *(op.cast(op.wrap(value), first.dtype) for value in inputs[1:])]  # truth is a number in a chain
    constants = [op.scalar(number, first) for number in numbers]
    return emit(op, OPERATOR, *given, *constants, like=[None], program=";".join(steps))[0]


def _written(node: ir.Node) -> list[tuple[str, list[str | float]]]:
    """The steps of an operator that a chain has as several: operator and operands, of which some are numbers."""
    defaults = WRITTEN[node.op_type][1]
    given = {name: node.attributes.get_float(name, default) for name, default in defaults.items()}
    return [(operator, [_operand(word, given) for word in words]) for operator, *words in _SPLIT[node.op_type]]


def _operand(word: str, given: Mapping[str, float]) -> str | float:
    return given[word] if word in given else word if word[0] in "xs" else float(word)


def _numbers(node: ir.Node) -> list[float]:
    """The constants that the steps of a node read."""
    if node.op_type not in WRITTEN:
        return []
    return [word for _, words in _written(node) for word in words if not isinstance(word, str)]


def _inputs(nodes: Iterable[ir.Node], chain: Sequence[ir.Node]) -> list[ir.Value]:
    """The values that some nodes of a chain read from outside it."""
    inside = {node.outputs[0] for node in chain}
    read = (value for node in nodes for value in node.inputs)
    return list(dict.fromkeys(value for value in read if value is not None and value not in inside))


def _count(node: ir.Node) -> int:
    if node.op_type in WRITTEN:
        return len(_SPLIT[node.op_type])
    return len(node.inputs) - 1 if node.op_type == "Sum" else 1


def _is_truth(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.BOOL


def _shape(node: ir.Node) -> tuple[object, ...] | None:
    """The type and the shape of a node that may be in a chain."""
    if node.domain or node.op_type not in _ELEMENTWISE or len(node.outputs) != 1 or not node.inputs:
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
    if node.op_type in ("Max", "Min") and len(node.inputs) != 2:
        return None
    if node.op_type == "Pow" and constant_number(node.inputs[1]) in (2, 3):
        return None  # ONNX Runtime multiplies
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
