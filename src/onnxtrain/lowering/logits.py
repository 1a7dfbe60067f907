"""Logits computed row by row: the last linear layer of a language model with what follows it, for rows that count."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.layers import reads_transposed
from onnxtrain.graph.sizes import product
from onnxtrain.graph.value import Dimension, attributes_of, dimensions, input_of, is_float, made_by
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule, is_needed

_BY_ELEMENT = frozenset({"Identity", "Tanh", "Neg"})
"""Elementwise unary operators on logits; Tanh caps them."""

_BY_CLASS = frozenset({"Add", "Sub", "Mul", "Div"})
"""Elementwise binary operators: logits with logits, or with one value per class."""

_RESHAPING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators that keep rows intact as long as the last axis stays."""


@dataclass(eq=False)
class LogitHead:
    """Nodes that compute logits row by row."""

    logits: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)
    rows: list[ir.Value] = field(default_factory=list)

    def emit(self, op: Builder, values: dict[ir.Value, Value], count: int | str) -> Value:
        """Emit the nodes for some of the rows."""
        shape = (count, (dimensions(self.logits) or (None,))[-1])
        for node in self.nodes:
            (output,) = node.outputs
            for value in node.inputs:
                if value is not None and value not in values:
                    values[value] = _for_rows(op, node, value)
            given = [None if value is None else values[value] for value in node.inputs]
            if not node.domain and node.op_type in _RESHAPING:
                assert given[0] is not None
                values[output] = given[0]
                continue
            attributes = attributes_of(node)
            (made,) = op.several(node.op_type, *given, outputs=1, domain=node.domain, **attributes)
            made.ir.type = output.type
            is_row = output is self.logits or (dimensions(output) or ())[-1:] == shape[-1:]
            values[output] = made.with_shape(shape if is_row else dimensions(output))
        return values[self.logits]


def find_head(logits: ir.Value) -> LogitHead | None:
    """Find the nodes that compute logits from narrower rows; ``None`` where an operator is not supported."""
    found = LogitHead(logits)
    shape = dimensions(logits)
    classes = shape[-1] if shape else None
    return found if isinstance(classes, int) and _trace(found, logits, classes, set()) else None


def _trace(head: LogitHead, value: ir.Value, classes: int, seen: set[ir.Value]) -> bool:
    """Add the nodes that compute a value [..., V], producers first; return whether all are supported."""
    if value in seen:
        return True
    seen.add(value)
    node, shape = value.producer(), dimensions(value)
    if node is None or len(node.outputs) != 1 or not shape or shape[-1] != classes or not is_float(value):
        return False
    if not _trace_inputs(head, node, classes, seen):
        return False
    head.nodes.append(node)
    return True


def _trace_inputs(head: LogitHead, node: ir.Node, classes: int, seen: set[ir.Value]) -> bool:
    inputs = list(node.inputs)
    first = inputs[0]
    if node.domain == MICROSOFT_DOMAIN and node.op_type == "MatMulNBits":
        return _start(head, first, node.outputs[0], node.attributes["K"].as_int())
    if node.domain or first is None:
        return False
    if node.op_type in ("MatMul", "Gemm"):
        return _trace_product(head, node, first)
    if node.op_type in _BY_ELEMENT | _RESHAPING:
        return _trace(head, first, classes, seen)
    if node.op_type == "Cast":
        return is_float(first) and _trace(head, first, classes, seen)
    if node.op_type in _BY_CLASS:
        joined = [value for value in inputs if value is not None and not _is_by_class(value)]
        alike = len({tuple(dimensions(value) or ()) for value in joined}) == 1  # no broadcasting over rows
        return alike and all(_trace(head, value, classes, seen) for value in joined)
    return False


def _trace_product(head: LogitHead, node: ir.Node, x: ir.Value) -> bool:
    """Trace a matmul of rows with one matrix, and perhaps a bias."""
    w, bias = node.inputs[1], input_of(node, 2)
    if w is None or len(dimensions(w) or ()) != 2 or not (bias is None or _is_by_class(bias)):
        return False
    if reads_transposed(node, 0):
        return False
    widening = made_by(w, "Cast")
    if not _start(head, x, node.outputs[0], (dimensions(w) or ())[1 if reads_transposed(node) else 0]):
        return False
    if widening is not None and widening not in head.nodes:
        # Widen a float16 weight within the chunk, not for the whole step.
        head.nodes.append(widening)
    return True


def _start(head: LogitHead, rows: ir.Value | None, product: ir.Value, columns: Dimension) -> bool:
    """Add rows as an input of the head; return whether they are valid."""
    given = dimensions(product)
    if rows is not None and dimensions(rows) is None and given is not None:
        rows.shape = ir.Shape((*given[:-1], columns))
        if rows.dtype is None and product.dtype is not None:
            rows.dtype = product.dtype
    shape = dimensions(rows)
    if rows is None or not shape or len(shape) < 2 or not isinstance(shape[-1], int) or not is_float(rows):
        return False
    if rows not in head.rows:
        head.rows.append(rows)
    return True


def _for_rows(op: Builder, node: ir.Node, value: ir.Value) -> Value:
    """Return an input that the rows share; one value per class [1, 1, V] as [V], since rows have two axes."""
    shared = op.wrap(value)
    if node.op_type not in _BY_CLASS or shared.rank is None or shared.rank <= 2:
        return shared
    return op.reshape(shared, [-1], known=(shared.shape or (None,))[-1:])


def _is_by_class(value: ir.Value) -> bool:
    """Return whether a value has one element per class, or one for all."""
    shape = dimensions(value)
    return shape is not None and all(size == 1 for size in shape[:-1])


def as_rows(op: Builder, x: Value) -> Value:
    """Flatten all axes but the last: [rows, columns]."""
    if x.rank == 2:
        return x
    if x.shape is None:
        return op.Flatten(x, axis=-1).with_shape((None, None))
    return op.Flatten(x, axis=-1).with_shape((product(x.shape[:-1]), x.shape[-1]))


# A training on the answers of chats, or on padded batches, ignores the labels of many rows. The last layer has as many
# columns as there are tokens, so that these rows take a large part of a step and of its memory.

LEAST_CLASSES = 256
"""With fewer classes, selecting rows may take longer than computing their logits."""


def _ignoring(match: Match) -> LogitHead | str:
    """Return the nodes that compute many logits by row for this loss alone, if its labels may be ignored."""
    (node,), named = match.nodes, match.context.named
    logits, labels = node.inputs[:2]
    if "ignore_index" not in node.attributes or labels is None or labels.shape is None or len(labels.shape) != 1:
        return "no label of a row is ignored"
    if any(output.uses() or is_needed(output, named) for output in node.outputs[1:]):
        return "its log probabilities are read"
    classes = None if logits is None else (dimensions(logits) or (None,))[-1]
    if logits is None or not isinstance(classes, int) or classes < LEAST_CLASSES or logits.dtype not in KERNEL_TYPES:
        return "it has few classes, or no kernel has its type"
    head = find_head(logits)
    if head is None or not head.rows:
        return "its logits are not computed row by row"
    own = {node, *head.nodes}
    outputs = [output for inner in head.nodes for output in inner.outputs]
    alone = all(reader in own for output in outputs for reader, _ in output.uses())
    return head if alone and not any(is_needed(output, named) for output in outputs) else "something else reads logits"


def _emit_for_rows(op: Builder, match: Match) -> Value:
    (node,), head = match.nodes, match.found
    attributes = attributes_of(node)
    labels, *weights = [op.wrap(value) for value in node.inputs[1:] if value is not None]
    count = f"{op.scope} rows"
    kept = _kept(op, labels, attributes["ignore_index"]).with_shape((count,))
    taken = {}
    for value in head.rows:
        rows = as_rows(op, op.wrap(value))
        taken[value] = op.Gather(rows, kept, axis=0).with_shape((count, *(rows.shape or ())[1:]))
    logits = head.emit(op, taken, count)
    of_kept = op.Gather(labels, kept, axis=0).with_shape((count,))
    (loss,) = op.several(node.op_type, logits, of_kept, *weights, outputs=1, **attributes)
    op.emitted[-1].name = node.name
    if attributes.get("reduction") != "none":
        return loss
    loss = loss.with_shape((count,))
    return emit(op, "GatherGradient", loss, kept, op.shape_of(labels), like=[op.wrap(match.y)], axis=0)[0]


def _kept(op: Builder, labels: Value, ignored: int) -> Value:
    """Emit the indices of the rows that count, and of the first, since ONNX Runtime has no loss of no rows."""
    compared = op.Not(op.Equal(labels, op.scalar(ignored, labels)))
    others = op.Slice(compared, op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(0))
    return op.reshape(op.NonZero(op.Concat(op.constant([True], np.bool_), others, axis=0)), [-1], known=(None,))


skip_ignored_rows = Rewrite(Rule(operators("ignored rows", "SoftmaxCrossEntropyLoss"), _emit_for_rows, _ignoring))
"""Select the rows whose labels count in front of the layer that computes their logits.

For SoftmaxCrossEntropyLoss with a label to ignore: L(x W, t) = L(x[k] W, t[k]) with k the rows whose label counts; a
loss by row is 0 elsewhere. The values are the same to rounding.
"""
