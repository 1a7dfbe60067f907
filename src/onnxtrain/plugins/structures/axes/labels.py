"""Labels of the indices along axes: which stand for the same structure, which must stay, and what a cut removes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, constant_tensor


@dataclass(frozen=True, eq=False)
class Axis:
    """An axis of a tensor: a label per index, or the reason why its indices cannot be removed."""

    labels: np.ndarray | None
    reason: str = ""
    zero: bool = False
    repeats: bool = False

    def with_zero(self, zero: bool) -> Axis:
        """Return the axis with other knowledge about removed entries."""
        return self if zero == self.zero else replace(self, zero=zero)

    def taken(self, labels: np.ndarray) -> Axis:
        """Return an axis with labels that were selected or rearranged from this one's."""
        return replace(self, labels=labels)


def length(axis: Axis, size: Dimension) -> Axis | Dimension:
    """Return what counts the entries of an axis: its labels, or its size where all of them stay."""
    return size if axis.labels is None else axis


def fixed(reason: str) -> Axis:
    """Return an axis whose indices stay."""
    return Axis(None, reason)


class Labels:
    """All labels of a model, what joins them, and what locks them."""

    def __init__(self) -> None:
        self.count = 0
        self._joined: list[tuple[np.ndarray, np.ndarray]] = []
        self._locked: list[tuple[np.ndarray, str]] = []

    def new(self, size: int) -> np.ndarray:
        """Return new labels for an axis of this size."""
        self.count += size
        return np.arange(self.count - size, self.count)

    def join(self, one: np.ndarray, other: np.ndarray) -> None:
        """Join labels pair by pair: these indices are removed together."""
        if one is not other:
            self._joined.append((one, np.broadcast_to(other, one.shape)))

    def lock(self, labels: np.ndarray, reason: str) -> None:
        """Lock labels: no structure with one of them can be removed."""
        self._locked.append((labels, reason))

    def resolve(self) -> tuple[np.ndarray, dict[int, str]]:
        """Return the smallest joined label of every label, and the reason of each of these that is locked."""
        root = np.arange(self.count)
        if self._joined:
            one = np.concatenate([pair[0].reshape(-1) for pair in self._joined])
            other = np.concatenate([pair[1].reshape(-1) for pair in self._joined])
            while True:
                a, b = root[one], root[other]
                if np.array_equal(a, b):
                    break
                np.minimum.at(root, np.maximum(a, b), np.minimum(a, b))
                while not np.array_equal(jumped := root[root], root):
                    root = jumped
        reasons: dict[int, str] = {}
        for labels, reason in self._locked:
            for label in np.unique(root[labels]).tolist():
                reasons.setdefault(label, reason)
        return root, reasons


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
