"""Losses on groups of rows: an example is several rows of the model's inputs, such as a chosen and a rejected answer.

The inputs of the working copy get another axis, [N, k, ...] for N examples of k rows each, which is joined to
[N k, ...] in front of the model. Behind the model the loss emits what it compares, such as the log-probability of each
row, as the prediction [N, ...]. So batches, micro-batches, ranks and sample weights count examples, never rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, dimensions, is_float
from onnxtrain.losses.base import ReducedLoss, node_rank
from onnxtrain.losses.chunks import head_in_chunks, map_in_chunks
from onnxtrain.losses.probabilities import class_logits
from onnxtrain.lowering.logits import as_rows
from onnxtrain.lowering.training_info.recipe import free_names
from onnxtrain.runtime.failures import require_shape

_EXAMPLES = "examples"
"""Symbol of the axis of examples."""

IGNORED = -100
"""Label of tokens that are not compared."""


@dataclass(frozen=True)
class Rows:
    """The rows of a model that takes groups, for the nodes of a loss behind it."""

    op: Builder
    output: Value
    inputs: dict[str, Value]
    grouped: Value
    size: int | str

    def add_input(self, name: str, dtype: ir.DataType, shape: tuple[Dimension, ...]) -> Value:
        """Add an input [N, ...] of the loss itself; data give its array by name."""
        graph = self.op.graph
        (name,) = free_names(graph, [name])
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape((_EXAMPLES, *shape)))
        graph.inputs.append(value)
        return self.op.wrap(value)

    def group(self, rows: Value) -> Value:
        """Divide rows [N k, ...] into examples [N, k, ...]."""
        op, rest = self.op, (rows.shape or ())[1:]
        known = (_EXAMPLES, self.size, *rest)
        if isinstance(self.size, int) and all(isinstance(size, int) for size in rest):
            return op.reshape(rows, [-1, self.size, *(int(size) for size in rest if size is not None)], known=known)
        shape = op.Shape(self.grouped, start=0, end=2)
        if rest:
            shape = op.Concat(shape, op.Shape(rows, start=1), axis=0)
        return op.reshape(rows, shape, known=known)

    def tokens(self) -> Dimension:
        """Return the number of tokens of a row: the second axis of the output [N k, T, ...]."""
        return (self.output.shape or (None, None))[1]

    def log_probabilities(self, labels: Value, loss: str, chunk: int | None = None) -> Value:
        """Emit the log-probability of each label [N, k, T] by the logits of the token before it, 0 where ignored."""
        op, logits = self.op, self.output
        if node_rank(logits) == 3:
            logits = class_logits(op, logits.ir, 2, {})
        else:
            raise OptionError(
                f"The loss compares log-probabilities of tokens, but {logits.name!r} has shape {logits.shape}; it "
                "needs the logits [batch, tokens, vocabulary] of a language model."
            )
        head = None if chunk is None else head_in_chunks(logits.ir, loss, chunk)
        labels = self._of_its_tokens(labels, logits if head is None else op.wrap(head.rows[0]))
        end = op.Expand(op.scalar(IGNORED, labels), op.Concat(op.Shape(labels, start=0, end=2), op.ints(1), axis=0))
        later = op.Slice(labels, op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(2))
        following = op.Concat(later, end, axis=2).with_shape(labels.shape)
        flat = op.reshape(following, [-1], known=(None,))
        if head is None or chunk is None:
            negative = _negative(op, as_rows(op, logits), flat)
        else:
            negative = map_in_chunks(op, head, chunk, [(flat, IGNORED)], _negative)
        return -op.reshape(negative, op.Shape(labels), known=labels.shape)

    def _of_its_tokens(self, labels: Value, rows: Value) -> Value:
        """Emit labels [N, k, T] that a step refuses where rows [N k, T, ...] have another T, if no input names it."""
        named = {size for value in self.inputs.values() for size in (value.shape or ())[1:]} - {None}
        if rows.rank != 3 or isinstance(self.tokens(), int) or self.tokens() in named:
            return labels
        op = self.op
        needed = op.Concat(op.Shape(labels, start=0, end=2), op.Shape(rows, start=1, end=2), axis=0)
        sentence = f"The labels do not have the number of tokens of the prediction {self.output.name!r}."
        return require_shape(labels, needed, sentence, may_differ=1)

    def mask(self) -> Value | None:
        """Return the mask of tokens [N k, T], where the model has one."""
        return next((value for name, value in self.inputs.items() if "mask" in name.lower() and value.rank == 2), None)


def _negative(op: Builder, logits: Value, labels: Value) -> Value:
    """Emit the negative log-probability of the label of each row."""
    made = op.several("SoftmaxCrossEntropyLoss", logits, labels, outputs=1, reduction="none", ignore_index=IGNORED)
    return made[0].with_shape(labels.shape)


class GroupLoss(ReducedLoss):
    """Base of losses that compare the rows of an example."""

    rows: ClassVar[int | str] = 2
    """Rows of an example, or a symbol for any number."""
    texts: ClassVar[str] = "pairs"
    """The kind of rows of texts that are read for this loss."""
    compares_examples: ClassVar[bool] = False
    """True where the term of an example depends on the others of its (micro-)batch."""
    has_reference: ClassVar[bool] = False
    """True where targets are predictions of the reference: the model before this training."""

    def read(self, rows: Rows) -> Value:
        """Emit what the loss compares, [N, ...], from the rows of the model."""
        raise OptionError(f"{type(self).__name__} does not define read().")


def attach(model: ir.Model, output: ir.Value, loss: GroupLoss) -> ir.Value:
    """Let a working copy take groups of rows, in place; return what the loss compares, its only output."""
    graph = model.graph
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    shapes = {value: dimensions(value) for value in inputs}
    batch = next((shape[0] for shape in shapes.values() if shape), None)
    if isinstance(batch, int):
        raise OptionError(
            f"The loss {loss.name} gives the model several rows per example, but its batch size is fixed to {batch}; "
            "set dynamic_batch=True, or export it with a dynamic batch axis."
        ).about(loss.name, got=batch)
    op = Builder(graph, model.opset_imports[""])
    first = op.before(graph[0])
    rows: dict[str, Value] = {}
    grouped: list[Value] = []
    for index, value in enumerate(list(graph.inputs)):
        shape = shapes.get(value)
        if not shape or shape[0] != batch:
            continue  # a scalar, or an input without examples
        name, rest = str(value.name), shape[1:]
        given = ir.Value(name=name, type=value.type, shape=ir.Shape((_EXAMPLES, loss.rows, *rest)))
        given.meta.update(value.meta)
        graph.inputs[index] = given
        value.name = f"{name}/rows"
        joined = _joined(first, first.wrap(given), shape)
        ir.convenience.replace_all_uses_with(value, joined.ir)
        rows[name] = joined
        grouped.append(first.wrap(given))
    if not grouped:
        raise OptionError(f"The loss {loss.name} needs an input with an axis of examples, but the model has none.")
    found = loss.read(Rows(op, op.wrap(_wide(output)), rows, grouped[0], loss.rows))
    graph.outputs.clear()
    graph.outputs.append(found.ir)
    return found.ir


def _joined(op: Builder, given: Value, shape: tuple[Dimension, ...]) -> Value:
    """Join the first two axes [N, k, ...]."""
    rest = shape[1:]
    if len(rest) == 1:
        return op.Flatten(given, axis=2).with_shape(shape)
    if all(isinstance(size, int) for size in rest):
        return op.reshape(given, [-1, *(int(size) for size in rest if size is not None)], known=shape)
    return op.reshape(given, op.Concat(op.ints(-1), op.Shape(given, start=2), axis=0), known=shape)


def _wide(value: ir.Value) -> ir.Value:
    """Return the floating value before casts to a narrower type."""
    producer = value.producer()
    while producer is not None and producer.op_type in ("Cast", "Identity") and not producer.domain:
        source = producer.inputs[0]
        if source is None or not is_float(source) or (source.dtype or value.dtype) == ir.DataType.DOUBLE:
            break
        value, producer = source, source.producer()
    return value
