"""The view that an axis rule has of its node, and what the rules find in one pass over a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import Dimension, constant_array, constant_number, dimensions, is_float
from onnxtrain.plugins.structures.axes.labels import Axis, Cut, Labels, fixed

Outputs = Sequence[Axis] | list[list[Axis]]
"""The axes of the first output, or a list of the axes of each output."""


_ZERO_WITH_PARAMETERS = frozenset(
    {"Abs", "Cast", "Expand", "Identity", "Mul", "Pow", "ReduceL1", "ReduceL2", "ReduceSum", "ReduceSumSquare"}
    | {"Reshape", "Sqrt", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators whose results are zero for zero parameters, such as the norms that weights are divided by."""


class Findings:
    """The axes of values, what joins them, and what follows from a cut."""

    def __init__(
        self,
        choices: dict[ir.Node, int],
        kept_values: set[ir.Value],
        constants: set[ir.Value],
        contents: Mapping[ir.Value, np.ndarray],
    ) -> None:
        self.labels = Labels()
        self.tags: list[tuple[np.ndarray, str]] = []
        self.costs: list[tuple[Axis | Dimension, ...]] = []
        self.changes: list[Callable[[Cut], None]] = []
        self.judged: dict[ir.Node, list[np.ndarray]] = {}
        self.counts: dict[ir.Node, int] = {}
        self.known: dict[ir.Value, list[Axis]] = {}
        self.constants, self.contents = constants, contents
        self._choices, self._kept_values = choices, kept_values

    def axes(self, value: ir.Value) -> list[Axis]:
        """Return the axes of a value of known rank."""
        found = self.known.get(value)
        if found is None:
            sizes = dimensions(value) or ()
            if value.is_initializer():
                zero = is_float(value) and value not in self._kept_values
                found = [self._initial(size, zero) for size in sizes]
            else:
                found = [fixed(f"{value.name!r} is an input of the model") for _ in sizes]
            self.known[value] = found
        return found

    def _initial(self, size: Dimension, zero: bool) -> Axis:
        if not isinstance(size, int) or size < 2:
            return fixed("its size is below 2")
        return Axis(self.labels.new(size), zero=zero)

    def keep_values(self, value: ir.Value | None) -> None:
        """Leave a parameter as it is when structures are masked; or the parameters that make a computed value zero."""
        if value is None or value in self._kept_values or value not in self.constants:
            return
        self._kept_values.add(value)
        node = value.producer()
        if node is not None and node.op_type in _ZERO_WITH_PARAMETERS:
            for source in node.inputs:
                self.keep_values(source)

    def choice(self, node: ir.Node, count: int) -> int:
        """Return the way to relate the axes of a node that is tried in this pass."""
        self.counts[node] = count
        return min(self._choices.get(node, 0), count - 1)


class Node:
    """The node whose axes a rule relates."""

    def __init__(self, node: ir.Node, findings: Findings, opset: int) -> None:
        self.ir, self.opset, self._findings = node, opset, findings
        self._axes: list[list[Axis] | None] = [
            None if value is None or dimensions(value) is None else findings.axes(value) for value in node.inputs
        ]
        self._taken: set[tuple[int, int]] = set()

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.ir.op_type

    def has(self, index: int) -> bool:
        """Return whether an input is given."""
        return index < len(self.ir.inputs) and self.ir.inputs[index] is not None

    def shape(self, index: int = 0) -> tuple[Dimension, ...]:
        """The shape of an input."""
        value = self.ir.inputs[index]
        found = None if value is None else dimensions(value)
        if found is None:
            raise UnknownShapeError(f"the shape of {'' if value is None else value.name!r} is not known")
        return found

    def output_shape(self, index: int = 0) -> tuple[Dimension, ...]:
        """The shape of an output."""
        found = dimensions(self.ir.outputs[index])
        if found is None:
            raise UnknownShapeError(f"the shape of {self.ir.outputs[index].name!r} is not known")
        return found

    def rank(self, index: int = 0) -> int:
        """The rank of an input."""
        return len(self.shape(index))

    def constant(self, index: int) -> np.ndarray | None:
        """The value of an input that is a constant."""
        value = self.ir.inputs[index] if self.has(index) else None
        return constant_array(value)

    def content(self, index: int) -> np.ndarray | None:
        """The elements of an input that holds sizes, as far as they are known: integers, or ``None``."""
        value = self.ir.inputs[index] if self.has(index) else None
        return None if value is None else self._findings.contents.get(value)

    def number(self, index: int) -> float | None:
        """The number of an input that is a constant with one element."""
        return constant_number(self.ir.inputs[index]) if self.has(index) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute as a Python value, or the default."""
        attribute = self.ir.attributes.get(name)
        if attribute is None:
            return default
        return list(attribute.value) if isinstance(attribute.value, (tuple, list)) else attribute.value

    def integers(self, name: str, index: int) -> list[int] | None:
        """Integers that newer operator sets give as an input and older ones as an attribute."""
        if name in self.ir.attributes:
            return [int(number) for number in self.attribute(name)]
        constant = self.constant(index)
        return None if constant is None else [int(number) for number in constant.reshape(-1)]

    def is_float(self, index: int) -> bool:
        """Return whether an input holds floating-point numbers."""
        value = self.ir.inputs[index]
        return value is not None and is_float(value)

    def is_8_bit(self, index: int) -> bool:
        """Return whether an input holds integers of 8 or fewer bits."""
        value = self.ir.inputs[index]
        return value is not None and value.dtype is not None and value.dtype.is_integer() and value.dtype.bitwidth <= 8

    def is_constant(self, index: int) -> bool:
        """Return whether an input depends on weights alone."""
        return self.has(index) and self.ir.inputs[index] in self._findings.constants

    def axis(self, index: int, axis: int) -> Axis:
        """Take an axis of an input: the rule says what happens to it."""
        shape = self.shape(index)
        position = axis % len(shape)
        self._taken.add((index, position))
        axes = self._axes[index]
        assert axes is not None
        return axes[position]

    def positions(self, index: int, axis: int) -> Axis:
        """Take an axis whose indices the rule selects or counts; one of unknown size is fixed."""
        found = self.axis(index, axis)
        return self.fix(found, f"{self.describe()} needs its size, which is not fixed") if found.repeats else found

    def all_axes(self, index: int = 0) -> list[Axis]:
        """Take all axes of an input."""
        return [self.axis(index, axis) for axis in range(self.rank(index))]

    def new(self, size: Dimension) -> Axis:
        """Return an axis with new labels, fixed if its size is not known."""
        if not isinstance(size, int):
            return fixed("its size is not fixed")
        return Axis(self._findings.labels.new(size))

    def join(self, *axes: Axis) -> Axis:
        """Join axes of one size index by index; one that is fixed fixes all."""
        labelled = [axis for axis in axes if axis.labels is not None]
        held = next((axis for axis in axes if axis.labels is None), None)
        if held is not None or len({(len(axis.labels), axis.repeats) for axis in labelled}) > 1:  # type: ignore[arg-type]
            reason = "its size is not fixed" if held is None else held.reason
            for axis in labelled:
                self.fix(axis, reason)
            return fixed(reason)
        first = labelled[0]
        assert first.labels is not None
        for other in labelled[1:]:
            assert other.labels is not None
            self._findings.labels.join(first.labels, other.labels)
        return first

    def unite(self, labels: np.ndarray) -> np.ndarray:
        """Join the labels in each row of a matrix; return the first of each row."""
        self._findings.labels.join(labels, labels[:, :1])
        return np.ascontiguousarray(labels[:, 0])

    def sum_over(self, *axes: Axis) -> None:
        """Join axes over which the node sums products: one factor must be zero at removed indices."""
        joined = self.join(*axes)
        if not any(axis.zero for axis in axes):
            self.fix(
                joined, f"{self.describe()} sums over it, and its entries are not zero where a structure is masked"
            )

    def fix(self, axis: Axis, reason: str) -> Axis:
        """Fix an axis: none of its indices can be removed."""
        if axis.labels is not None:
            self._findings.labels.lock(axis.labels, reason)
        return fixed(axis.reason or reason)

    def keep_values(self, index: int) -> None:
        """Say that masking a structure must not set this parameter to zero: it is a divisor, or a statistic."""
        self._findings.keep_values(self.ir.inputs[index])

    def tag(self, axis: Axis, structure: str) -> None:
        """Say which kind of structure the indices of an axis are."""
        if axis.labels is not None:
            self._findings.tags.append((axis.labels, structure))

    def choice(self, count: int) -> int:
        """Return which of several ways to relate the axes to try; the first that leaves something to remove is kept."""
        return self._findings.choice(self.ir, count)

    def judge_by(self, axis: Axis) -> None:
        """Name an axis with structures to remove if this node's choice is a good one."""
        if axis.labels is not None:
            self._findings.judged.setdefault(self.ir, []).append(axis.labels)

    def multiplies(self, *factors: Axis | Dimension) -> None:
        """Add multiply-adds to the cost of the model: the product of the lengths of these axes."""
        self._findings.costs.append(factors)

    def on_cut(self, change: Callable[[Cut], None]) -> None:
        """Register how the node's attributes and constants change when structures are removed."""
        self._findings.changes.append(change)

    def fix_rest(self) -> None:
        """Fix all axes of inputs that the rule did not take."""
        for index, axes in enumerate(self._axes):
            for position, axis in enumerate(axes or ()):
                if (index, position) not in self._taken and axis.labels is not None:
                    self.fix(axis, f"{self.describe()} needs all of it")

    def describe(self) -> str:
        """Describe the node in messages."""
        operator = f"{self.ir.domain}::{self.operator}" if self.ir.domain else self.operator
        return f"{operator} (output {self.ir.outputs[0].name!r})"


class UnknownShapeError(Exception):
    """A rule needs a shape that is not known."""
