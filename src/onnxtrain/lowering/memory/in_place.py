"""Prove which states a step may update in place: outputs bound to the buffers of inputs.

The proof holds for any runtime: nodes may run in any order that respects their inputs; a result that only moves, casts
or scales elements need not be stored, so that its readers may read the original; and an elementwise node may be fused
with its producer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph.clone import producers, subgraphs, values_read
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN, TRAINING_DOMAIN
from onnxtrain.graph.value import made_by
from onnxtrain.operators.registry import OPTIMIZERS


def _operators(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Operators whose result has the elements of the input in the same order.
_IN_ORDER = _operators("Identity Reshape Flatten Squeeze Unsqueeze Cast CastLike")

# Operators whose result a runtime need not store: a view of the input, or computed by its readers.
_MOVING = _IN_ORDER | _operators(
    """Transpose Slice Split Expand BitCast Concat Pad Tile Gather Dropout DepthToSpace SpaceToDepth
    Optional OptionalGetElement SequenceConstruct SequenceInsert SequenceErase SequenceAt SplitToSequence
    ConcatFromSequence"""
)
_SCALING = _operators("Add Sub Mul Div")  # with a constant: x * 1 is x, and matmuls absorb factors

# Operators that finish reading an element of an input of the output's shape before they write that element.
_IN_STEP = _operators("Add Sub Mul Div Pow Where Neg Abs Sqrt Clip Relu")
_OF_SEVERAL = _operators("Max Min Sum Mean")  # with two inputs; of more, one may be read after the first result

# The same for operators with native kernels: the inputs whose memory the output may have.
_OWN_IN_STEP = {"Elementwise": range(8), "GatherGradient": range(3, 4)}

_POINTWISE = _IN_STEP | _OF_SEVERAL
_POINTWISE |= _operators("And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Mod Not Or Xor")
_POINTWISE |= _operators(
    "Ceil Celu Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish LeakyRelu Log Mish PRelu Reciprocal"
)
_POINTWISE |= _operators("Round Selu Sigmoid Sign Sin Softplus Softsign Swish Tanh ThresholdedRelu")

_OPERATOR_DOMAINS = frozenset({"", MACHINE_LEARNING_DOMAIN, TRAINING_DOMAIN, ONNXTRAIN_DOMAIN, MICROSOFT_DOMAIN})
"""A node of another domain is a function, whose body may do anything."""


def in_place_states(graph: ir.Graph, states: Mapping[str, str | None]) -> set[str]:
    """Return the states whose new value may be written into the buffer of the old one.

    The old value must not be read after the writer of the new value ran. That holds if every node that reads the state,
    directly or through values that need not be stored, is the writer itself (and reads each element before it writes
    it), or an ancestor of the writer, which runs earlier, and is not fused with the writer. Any other state needs a
    second buffer.

    Requires: the final graph, which no later pass changes. Ensures: it is unchanged.
    """
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    ancestors, readers = Ancestors(graph), Readers(graph)
    proved = set()
    for state, new_name in states.items():
        if new_name is None:
            continue
        value, new = inputs.get(state), outputs[new_name]
        if value is None or _is_safe(value, new, readers, ancestors):  # not an input: nothing reads the old value
            proved.add(state)
    return proved


def _is_safe(value: ir.Value, new: ir.Value, readers: Readers, ancestors: Ancestors) -> bool:
    writer = _Writer(value, new)
    root = new.producer()
    if root is None or not writer.computes or value in readers.outputs:
        return False
    for reading in readers.of(value):
        if any(result is not new for result in reading.results):
            return False
        if reading.node in writer.kernel:
            if not writer.may_read(reading):
                return False
        elif not ancestors.includes(root, reading.node):
            return False
    return True


class Reading(NamedTuple):
    """One node that reads a value, perhaps through others."""

    node: ir.Node
    operand: ir.Value  # the input that it reads
    as_it_is: bool  # true if the operand has the elements of the value in the same order
    results: tuple[ir.Value, ...]  # graph outputs that it computes and that need not be stored apart from the value


class _Writer:
    """Nodes that write a new value: they may become one kernel, which then writes into the buffer of the old value.

    These are the producer of the new value and, as far as they are elementwise or only move elements, the producers of
    its inputs; and the first nodes behind them that are neither. Reductions, loops and branches end before their
    results are read, and stay outside.
    """

    def __init__(self, value: ir.Value, new: ir.Value) -> None:
        self._value, self._new = value, new
        self.kernel: dict[ir.Node, bool] = {}
        self._last: set[ir.Node] = set()  # the writers of the new value if no nodes are fused
        waiting = [(new, True, True)]
        while waiting:
            result, in_order, is_last = waiting.pop()
            node = result.producer()
            if node is None or (_stays_apart(node) and not is_last):
                continue
            if node in self.kernel and self.kernel[node] <= in_order and not is_last:
                continue
            self.kernel[node] = in_order and self.kernel.get(node, True)
            if is_last and not _is_moving(node):
                self._last.add(node)
            if _is_moving(node) or _is_pointwise(node):
                keeps = in_order and (_is_in_order(node) or not _is_moving(node))
                waiting += [(item, keeps, is_last and _is_moving(node)) for item in node.inputs if item is not None]
        self.computes = bool(self._last)

    def may_read(self, reading: Reading) -> bool:
        """Return whether one of these nodes may read the buffer that is written."""
        node = reading.node
        if node.op_type.removeprefix("Fused") in OPTIMIZERS:
            return node is self._new.producer() and reading.operand is self._value
        if _is_in_order(node):
            return True  # the readers of its result decide
        shape = self._value.shape
        in_order = self.kernel[node] and reading.as_it_is and shape is not None and shape == self._new.shape
        if node in self._last:
            return in_order and _reads_in_step(node, reading.operand)
        return in_order and _is_pointwise(node)


class Readers:
    """Nodes of the main graph that read a value: by themselves, in subgraphs, or through values not stored."""

    def __init__(self, graph: ir.Graph) -> None:
        self.outputs = set(graph.outputs)
        self._by_value: dict[ir.Value, dict[ir.Node, None]] = {}
        for node in graph:
            for value in values_read(node):
                self._by_value.setdefault(value, {})[node] = None

    def of(self, value: ir.Value) -> Iterator[Reading]:
        """Return all readers of a value."""
        waiting, seen = [(value, True)], {value}
        while waiting:
            operand, as_it_is = waiting.pop()
            for node in self._by_value.get(operand, ()):
                shared = _not_stored(node, operand)
                yield Reading(node, operand, as_it_is, tuple(output for output in shared if output in self.outputs))
                keeps = as_it_is and (_is_in_order(node) or _is_pointwise(node))
                waiting += [(output, keeps) for output in shared if output not in seen]
                seen.update(shared)


def _is_in_order(node: ir.Node) -> bool:
    return not node.domain and node.op_type in _IN_ORDER


def _is_moving(node: ir.Node) -> bool:
    return not node.domain and node.op_type in _MOVING


def _stays_apart(node: ir.Node) -> bool:
    return not node.domain and (node.op_type.startswith("Reduce") or bool(subgraphs(node)))


def _is_pointwise(node: ir.Node) -> bool:
    return not node.domain and node.op_type in _POINTWISE


def _reads_in_step(node: ir.Node, operand: ir.Value) -> bool:
    if node.domain == ONNXTRAIN_DOMAIN:
        safe = _OWN_IN_STEP.get(node.op_type, ())
        return all(value is not operand or index in safe for index, value in enumerate(node.inputs))
    return node.op_type in _IN_STEP or (node.op_type in _OF_SEVERAL and len(node.inputs) <= 2)


def _not_stored(node: ir.Node, operand: ir.Value) -> Sequence[ir.Value]:
    """Return the outputs of a node that may share the memory of an operand, or be computed from it by their readers."""
    outputs = node.outputs  # an update has thousands: they are not copied for each operand
    if node.domain not in _OPERATOR_DOMAINS or _is_moving(node):
        return outputs
    if not node.domain and node.op_type in _SCALING:
        others = [value for value in node.inputs if value is not None and value is not operand]
        return outputs if any(value.const_value is not None or made_by(value, "Constant") for value in others) else ()
    bodies = subgraphs(node)
    # A loop that does not run, or that forwards a value, returns it as it is.
    if bodies and operand in node.inputs:
        return outputs
    return outputs if any(_leads_back(value, operand) for body in bodies for value in body.outputs) else ()


def _leads_back(value: ir.Value, operand: ir.Value) -> bool:
    """Return whether a result of a body may share the memory of a value outside of it."""
    if value is operand:
        return True
    node = value.producer()
    if node is None:
        return False
    given = [item for item in node.inputs if item is not None]
    if subgraphs(node):
        return operand in values_read(node) or any(_leads_back(item, operand) for item in given)
    passes_on = any(value in _not_stored(node, item) for item in given)
    return passes_on and any(_leads_back(item, operand) for item in given)


class Ancestors:
    """Nodes that are certain to have run before a node: bit sets over the order of the graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._index = {node: position for position, node in enumerate(graph)}
        self._before: dict[ir.Node, int] = {}
        for node, position in self._index.items():
            before = 0
            for predecessor in producers(node):
                if predecessor in self._before:
                    before |= self._before[predecessor]
            self._before[node] = before | (1 << position)

    def position(self, node: ir.Node) -> int:
        """Return the index of a node in the order of the graph."""
        return self._index[node]

    def includes(self, node: ir.Node, candidate: ir.Node) -> bool:
        """Return whether ``candidate`` is an ancestor of ``node``."""
        return bool(self._before[node] >> self._index[candidate] & 1)
