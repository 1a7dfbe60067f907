"""Prove which states a step may update in place: outputs bound to the buffers of inputs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.graph.clone import captured_values

# Operators whose output may be the same memory as their input in ONNX Runtime: who reads it, reads the input.
_VIEWS = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})

# Operators that finish reading an element of an input of the output's shape before they write that element.
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Where", "Neg", "Abs", "Sqrt", "Clip", "Max", "Min", "Sum", "Relu"}
)

_UPDATES = ("Adagrad", "Adam", "Momentum", "SSGD")
_IN_PLACE_KERNELS = frozenset({*_UPDATES, *(f"Fused{name}" for name in _UPDATES)})


def in_place_states(graph: ir.Graph, states: Mapping[str, str | None]) -> set[str]:
    """The states whose new value may be written where the old one stands.

    The writer of the new value runs at some time; the old value must not be read after. It is safe where
    every node that reads the state, or a view of it, is the writer itself (and reads each element before it
    writes it) or an ancestor of the writer, which therefore has run before. Everything else gets a second
    buffer.

    Args:
        graph: The step graph.
        states: Input names to output names (``None``: never written).
    """
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    ancestors, readers = _Ancestors(graph), _Readers(graph)
    proved = set()
    for state, new_name in states.items():
        if new_name is None:
            continue
        value, new = inputs.get(state), outputs[new_name]
        writer = new.producer()
        if value is None:
            proved.add(state)  # nothing reads the old value
        elif writer is not None and all(
            _reads_in_step(node, writer, value, new) if node is writer else ancestors.includes(writer, node)
            for node in readers.of(value)
        ):
            proved.add(state)
    return proved


class _Readers:
    """Which nodes of the main graph read a value: by themselves, through subgraphs, or through views of it."""

    def __init__(self, graph: ir.Graph) -> None:
        self._by_value: dict[ir.Value, list[ir.Node]] = {}
        for node in graph:
            for value in _read(node):
                self._by_value.setdefault(value, []).append(node)

    def of(self, value: ir.Value) -> set[ir.Node]:
        readers = set(self._by_value.get(value, ()))
        for node in tuple(readers):
            if node.op_type in _VIEWS:
                readers |= self.of(node.outputs[0])
        return readers


def _reads_in_step(node: ir.Node, writer: ir.Node, value: ir.Value, new: ir.Value) -> bool:
    """Whether the writer itself may read the buffer that it writes."""
    if node.op_type in _IN_PLACE_KERNELS:
        return True
    return node.op_type in _ELEMENTWISE and value.shape is not None and value.shape == new.shape


class _Ancestors:
    """Which nodes are certain to have run before a node: bit sets over the graph's order."""

    def __init__(self, graph: ir.Graph) -> None:
        self._index = {node: position for position, node in enumerate(graph)}
        self._before: dict[ir.Node, int] = {}
        for node, position in self._index.items():
            before = 0
            for predecessor in _predecessors(node):
                if predecessor in self._before:
                    before |= self._before[predecessor]
            self._before[node] = before | (1 << position)

    def includes(self, node: ir.Node, candidate: ir.Node) -> bool:
        """Whether ``candidate`` is an ancestor of ``node``."""
        return bool(self._before[node] >> self._index[candidate] & 1)


def _predecessors(node: ir.Node) -> list[ir.Node]:
    return [producer for value in _read(node) if (producer := value.producer()) is not None]


def _read(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None] + captured_values(node)
