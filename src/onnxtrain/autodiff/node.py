"""The view that a rule has of its node, and the name of a node in messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import TooLargeError
from onnxtrain.graph.value import Dimension

Seeds = Sequence[tuple[ir.Value, ir.Value]]
"""Pairs of a value and the gradient of the final objective with respect to it."""

PullBack = Callable[[Builder, Seeds, Sequence[ir.Value]], list[Value | None]]
"""Carries gradients back inside a body: gets its builder, the seeds and the xs, returns one gradient per x."""


class Node:
    """The node that a rule differentiates, with typed inputs and outputs."""

    def __init__(
        self,
        node: ir.Node,
        op: Builder,
        captured: Sequence[ir.Value] = (),
        *,
        pull_back: PullBack | None = None,
        wanted: Collection[ir.Value] | None = None,
        reached: Collection[ir.Value] | None = None,
    ) -> None:
        self.ir = node
        self.op = op
        self.inputs = tuple(None if value is None else op.wrap(value) for value in node.inputs)
        self.outputs = tuple(op.wrap(value) for value in node.outputs)
        self.captured = tuple(op.wrap(value) for value in captured)
        self._pull_back = pull_back
        self._wanted = wanted
        self._reached = reached

    def with_values(self, inputs: Sequence[Value | None], outputs: Sequence[Value] | None = None) -> Node:
        """A copy of the view with other inputs and outputs, for the rule of another operator."""
        other = copy.copy(self)
        other.inputs = tuple(inputs)
        other.outputs = self.outputs if outputs is None else tuple(outputs)
        return other

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.ir.op_type

    @property
    def x(self) -> Value:
        """The first input."""
        return self.input_required(0)

    @property
    def y(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def input(self, index: int) -> Value | None:
        """An input, or ``None`` where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def input_required(self, index: int) -> Value:
        """An input that the operator's schema requires."""
        value = self.input(index)
        if value is None:
            raise GradientError(f"{describe(self.ir)} lacks its input {index}, which the operator requires.").about(
                describe(self.ir), wanted=index
            )
        return value

    def has_output(self, index: int) -> bool:
        """Return whether an optional output exists and has a name."""
        return index < len(self.outputs) and self.outputs[index].name != ""

    def output_required(self, index: int, dtype: ir.DataType, shape: tuple[Dimension, ...] | None = None) -> Value:
        """Return an optional output; add it to the forward node if it is missing."""
        if not self.has_output(index):
            self.ir.resize_outputs(max(index + 1, len(self.ir.outputs)))
            added = self.ir.outputs[index]
            added.name = f"{self.ir.outputs[0].name}/{self.operator}_{index}"
            added.dtype = dtype
            added.shape = None if shape is None else ir.Shape(shape)
            for skipped in self.ir.outputs[:index]:
                skipped.name = skipped.name or ""
            self.outputs = tuple(self.op.wrap(value) for value in self.ir.outputs)
        return self.outputs[index]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute as a Python value (numbers, strings, lists, tensors as arrays), or the default."""
        attribute = self.ir.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            return np.asarray(value.numpy())
        return list(value) if isinstance(value, (tuple, list)) else value

    def attributes(self, *names: str) -> dict[str, Any]:
        """The attributes of these names, all by default; ``None`` for one that the node lacks."""
        return {name: self.attribute(name) for name in names or self.ir.attributes}

    def wants(self, value: Value | None) -> bool:
        """Return whether the gradient of an input or captured value is needed.

        Nodes that a rule emits for the others are removed again; only rules that write bodies need to ask.
        """
        return value is not None and value.is_float and (self._wanted is None or value.ir in self._wanted)

    def arrives(self, index: int) -> bool:
        """Return whether a gradient arrives at an output; if not, the rule gets zeros for it."""
        return self.has_output(index) and (self._reached is None or self.ir.outputs[index] in self._reached)

    def pull_back(self, op: Builder, seeds: Sequence[tuple[Value, Value]], xs: Sequence[Value]) -> list[Value | None]:
        """Differentiate inside a body that this rule writes, as the engine does in the main graph."""
        assert self._pull_back is not None
        return self._pull_back(op, [(y.ir, seed.ir) for y, seed in seeds], [x.ir for x in xs])

    def rank(self, value: Value | None = None) -> int:
        """The rank of a value (the first input by default), for rules that require it."""
        value = self.x if value is None else value
        if value.rank is None:
            raise GradientError(
                f"{describe(self.ir)}: the gradient needs the rank of {value.name!r}, which shape inference "
                "could not find; add its shape to the model's value_info."
            ).about(value.name)
        return value.rank


def describe(node: ir.Node) -> str:
    """Describe a node for messages: its operator, its name and its first output."""
    operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    name = f" {node.name!r}" if node.name else ""
    output = f" (output {node.outputs[0].name!r})" if node.outputs and node.outputs[0].name else ""
    return f"{operator} node{name}{output}"


def too_large(node: ir.Node, error: TooLargeError) -> GradientError:
    """The error for a node whose gradient would write too large a constant or too many nodes."""
    return GradientError(
        f"The gradient of {describe(node)} {error}; give the model smaller sizes, or sizes that it finds as it runs."
    )
