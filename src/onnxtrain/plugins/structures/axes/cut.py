"""The removal of structures from a graph, as the rules see it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import constant_tensor
from onnxtrain.plugins.structures.axes.labels import Axis


class Cut:
    """The removal of structures from a model, as the rules see it."""

    def __init__(self, graph: ir.Graph, kept: np.ndarray) -> None:
        self._graph, self._kept = graph, kept

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
        node.replace_input_with(index, self._in_front_of(node).constant(array).ir)

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
        op = self._in_front_of(node)

        def part(start: int, end: int) -> Value:
            return op.Slice(op.wrap(value), op.ints(start), op.ints(end), op.ints(0))

        parts: list[Value] = []
        start = 0
        for position, number in sorted(changes.items()):
            if position > start:
                parts.append(part(start, position))
            if isinstance(number, int):
                parts.append(op.ints(number))
            else:
                parts.append(part(position, position + 1) / number.denominator * number.numerator)
            start = position + 1
        parts.append(part(start, np.iinfo(np.int64).max))
        node.replace_input_with(index, op.Concat(*parts, axis=0).ir)

    def _in_front_of(self, node: ir.Node) -> Builder:
        """Return a builder of the sizes that a node reads."""
        op = Builder(self._graph, self._graph.opset_imports.get("", 1), before=node)
        op.prefix = f"{node.outputs[0].name}/sizes/"
        return op
