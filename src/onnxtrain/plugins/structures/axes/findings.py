"""Results of the rules in one pass over a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import Dimension, dimensions, is_float
from onnxtrain.plugins.structures.axes.cut import Cut
from onnxtrain.plugins.structures.axes.labels import Axis, Labels, fixed

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
