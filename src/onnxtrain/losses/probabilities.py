"""Tell logits from probabilities by what the graph proves, and find the logits behind probabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.bounds import Facts
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.lowering.training_info.recipe import free_names

ScoreKind = Literal["logits", "distribution", "independent", "log distribution", "log independent"]
"""Meaning of scores: logits; probabilities that sum to one, or independent ones; or their logarithms."""

_MOVING: Final = frozenset(
    {"Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Gather", "Expand", "Split"}
)
"""Operators that only move, repeat or select the elements of their first input."""

_KEEPING_SHAPES: Final = frozenset(
    {"Identity", "Sigmoid", "Softmax", "LogSoftmax", "Exp", "Log", "Clip", "Cast"}
    | {"QuantizeLinear", "DequantizeLinear", "QLinearSigmoid", "QLinearSoftmax"}
)

_LEAST: Final = -100.0
"""Least logarithm of a probability, as in PyTorch's ``BCELoss``."""


@dataclass(frozen=True)
class Scores:
    """Facts that the nodes of a graph prove about an output of scores."""

    kind: ScoreKind | None = None
    axis: int | None = None
    logits: ir.Value | None = None
    activation: str = ""
    relied: frozenset[str] = frozenset()

    @property
    def are_logarithms(self) -> bool:
        """True where scores are logarithms of probabilities."""
        return self.kind in ("log distribution", "log independent")

    def with_values(self, own: Callable[[ir.Value], ir.Value]) -> Scores:
        """Return the same for a copy of the graph, whose values a function finds."""
        return self if self.logits is None else replace(self, logits=own(self.logits))


def kind_of_scores(value: ir.Value, functions: Mapping[Any, ir.Function], learned: Collection[str] = ()) -> Scores:
    """Return what the nodes before an output of scores prove about it."""
    _declare_shapes(value)
    facts = Facts(functions, learned)
    fact = facts.of(value)
    found = fact if fact.is_probability else fact.log
    kind: ScoreKind | None = "logits" if fact.linear else None
    if found is not None and found.is_probability:
        kind = "independent" if found.axis is None else "distribution"
        if found is not fact:
            kind = "log independent" if found.axis is None else "log distribution"
    axis = None if found is None or kind in (None, "logits") else found.axis
    return Scores(kind, axis, relied=frozenset(facts.relied))


def _declare_shapes(value: ir.Value) -> None:
    """Give an output's shape to the values before it that operators without shape inference leave without one."""
    node = value.producer()
    while node is not None and node.op_type in _KEEPING_SHAPES and node.inputs[0] is not None:
        source = node.inputs[0]
        if source.shape is None and value.shape is not None:
            source.shape = value.shape.copy()
            if node.op_type in ("Identity", "Sigmoid", "Softmax", "LogSoftmax"):
                source.type = source.type or value.type
        value, node = source, source.producer()


def find_scores(model: ir.Model, output: ir.Value, learned: Collection[str], *, emit: bool) -> Scores:
    """Return what a working copy proves about an output of scores."""
    found = kind_of_scores(output, model.functions, learned)
    if not emit or found.kind in (None, "logits"):
        return found
    op = Builder(model.graph, model.opset_imports[""])
    reached = _reach(op, output)
    if reached is None and found.kind == "log independent":
        reached = logit(op, op.Exp(op.wrap(output)).with_shape(dimensions(output))), "Sigmoid"
    if reached is None:
        return found
    logits, activation = reached
    axis, shape = found.axis, dimensions(output) or ()
    if activation == "Sigmoid" and axis is not None and shape[axis : axis + 1] == (2,):
        # (1 - p, p) of a logit z is the softmax of (-z / 2, z / 2).
        logits, activation = (logits * 0.5).with_shape(logits.shape), "Softmax"
    if activation == "Softmax" and axis is None:
        return found  # the rows have lost classes
    if logits.ir.producer() in op.emitted:
        (logits.ir.name,) = free_names(model.graph, [f"{output.name}_logits"])
    return replace(found, logits=logits.ir, activation=activation)


def _reach(op: Builder, value: ir.Value | None) -> tuple[Value, str] | None:
    """Return logits moved as a value's probabilities are, and the activation between; ``None`` for other nodes."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.domain or node.graph is not op.graph:
        return None
    if node.op_type in ("Identity", "Log", "Exp"):
        return _reach(op, node.inputs[0])
    if node.op_type in ("Sigmoid", "Softmax", "LogSoftmax") and node.inputs[0] is not None:
        return op.wrap(node.inputs[0]), "Sigmoid" if node.op_type == "Sigmoid" else "Softmax"
    if node.op_type == "Sub":
        inner = _reach(op, node.inputs[1])
        one_minus = inner is not None and inner[1] == "Sigmoid" and Facts({}).number(node.inputs[0]) == 1
        return (-inner[0], "Sigmoid") if inner is not None and one_minus else None
    parts = list(node.inputs) if node.op_type == "Concat" else list(node.inputs[:1])
    if node.op_type not in _MOVING and node.op_type != "Concat":
        return None
    if node.op_type == "Cast" and (parts[0] is None or not is_float(parts[0]) or not is_float(value)):
        return None
    found = [_reach(op, part) for part in parts]
    activations = {each[1] for each in found if each is not None}
    if None in found or len(activations) != 1:
        return None
    logits = [each[0] for each in found if each is not None]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    rest = [None if each is None else op.wrap(each) for each in node.inputs[len(parts) :]]
    made = op.several(node.op_type, *logits, *rest, outputs=len(node.outputs), **attributes)
    result = made[value.index() or 0]
    result.ir.type = value.type
    return result.with_shape(dimensions(value)), activations.pop()


def logarithm(op: Builder, probability: Value) -> Value:
    """Emit the logarithm of probabilities, -100 for zero; there its gradient is zero."""
    tiny = op.scalar(np.finfo(probability.dtype.numpy()).tiny, probability)
    found = op.Log(op.Max(probability, tiny))
    above = op.binary("GreaterOrEqual", probability, tiny)
    return op.Where(above, found, op.scalar(_LEAST, probability)).with_shape(probability.shape)


def logit(op: Builder, probability: Value) -> Value:
    """Emit log p - log(1 - p), each at least -100: the binary cross-entropy of these logits is that of p."""
    return (logarithm(op, probability) - logarithm(op, 1.0 - probability)).with_shape(probability.shape)


def class_logits(op: Builder, value: ir.Value, axis: int, functions: Mapping[Any, ir.Function]) -> Value:
    """Return logits of classes for a value of a graph: itself, those behind it, or logarithms of its probabilities."""
    found = kind_of_scores(value, functions)
    rank = len(dimensions(value) or ())
    if found.axis is None or not rank or found.axis != axis % rank:
        return op.wrap(value)
    reached = _reach(op, value)
    if reached is not None and reached[1] == "Softmax":
        return reached[0]
    return op.wrap(value) if found.are_logarithms else logarithm(op, op.wrap(value))
