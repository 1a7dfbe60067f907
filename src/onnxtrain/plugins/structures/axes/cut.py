"""The removal of structures from a graph, as the rules see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import constant_tensor
from onnxtrain.plugins.structures.axes.labels import Axis


def initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer to a graph."""
    tensor.name = name
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


class Cut:
    """The removal of structures from a model, as the rules see it."""

    def __init__(self, graph: ir.Graph, kept: np.ndarray) -> None:
        self.graph, self._kept = graph, kept
        self._names: set[str | None] = {value.name for node in graph for value in node.outputs}
        self._names |= {*graph.initializers, *(value.name for value in graph.inputs)}

    def kept(self, axis: Axis) -> np.ndarray:
        """Return for each index of an axis whether it stays."""
        assert axis.labels is not None
        return np.asarray(self._kept[axis.labels])

    def count(self, axis: Axis) -> int:
        """Return how many indices of an axis stay."""
        return int(self.kept(axis).sum())

    def set_attribute(self, node: ir.Node, name: str, number: int) -> None:
        """Set an integer attribute."""
        node.attributes[name] = ir.AttrInt64(name, number)

    def set_constant(self, node: ir.Node, index: int, array: np.ndarray) -> None:
        """Replace an input by a constant that no other node reads."""
        if index >= len(node.inputs):
            node.resize_inputs(index + 1)
        node.replace_input_with(index, self._initializer(node, array))

    def set_elements(self, node: ir.Node, index: int, changes: Mapping[int, int | Fraction]) -> None:
        """Change elements of a vector of sizes that a node reads, also of one that the graph computes."""
        value = node.inputs[index]
        assert value is not None
        tensor = constant_tensor(value)
        if tensor is not None:
            changed = np.array(tensor.numpy())
            for position, number in changes.items():
                changed[position] = number
            if not np.array_equal(changed, tensor.numpy()):
                self.set_constant(node, index, changed)
            return
        parts: list[ir.Value] = []
        start = 0
        for position, number in sorted(changes.items()):
            if position > start:
                parts.append(self._part(node, value, start, position))
            parts.append(self._size(node, value, position, number))
            start = position + 1
        parts.append(self._part(node, value, start, np.iinfo(np.int64).max))
        joined = self._insert(node, "Concat", parts, axis=0)
        node.replace_input_with(index, joined)

    def _size(self, node: ir.Node, value: ir.Value, position: int, number: int | Fraction) -> ir.Value:
        if isinstance(number, int):
            return self._initializer(node, np.array([number], np.int64))
        size = self._part(node, value, position, position + 1)
        for operator, factor in (("Div", number.denominator), ("Mul", number.numerator)):
            size = self._insert(node, operator, [size, self._initializer(node, np.array([factor], np.int64))])
        return size

    def _part(self, node: ir.Node, value: ir.Value, start: int, end: int) -> ir.Value:
        bounds = [self._initializer(node, np.array([bound], np.int64)) for bound in (start, end, 0)]
        return self._insert(node, "Slice", [value, *bounds])

    def _insert(self, node: ir.Node, operator: str, inputs: Sequence[ir.Value], **attributes: int) -> ir.Value:
        made = ir.node(operator, inputs, attributes)
        made.outputs[0].name = self._name(node)
        made.outputs[0].dtype = ir.DataType.INT64
        self.graph.insert_before(node, made)
        return made.outputs[0]

    def _initializer(self, node: ir.Node, array: np.ndarray) -> ir.Value:
        return initializer(self.graph, self._name(node), ir.tensor(array))

    def _name(self, node: ir.Node) -> str:
        base = f"{node.outputs[0].name}/sizes"
        name, count = base, 1
        while name in self._names:
            count += 1
            name = f"{base}{count}"
        self._names.add(name)
        return name
