"""A loss on logits of many classes that are computed a chunk of rows at a time and never held as a whole.

Logits z = x W of S rows (tokens) and V classes (words of a vocabulary), their logarithms of probabilities and their
gradient take 4 S V bytes each: 131 MB for 1,024 tokens and 32,000 words. Here the product that makes them moves into
the body of a Scan over chunks of rows, which adds up the loss. Its gradient is a Scan, too, which computes the logits
of a chunk once more and adds up dW from chunk to chunk (:mod:`onnxtrain.autodiff.rules.loops`). In a step graph the
two become one (:mod:`onnxtrain.passes.join_scans`): nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.ir import Builder, Value
from onnxtrain.ir.domains import MICROSOFT_DOMAIN
from onnxtrain.ir.value import dimensions, is_float

_BY_ELEMENT = frozenset({"Identity", "Tanh", "Neg"})
"""Operators of one input that compute each logit from itself: Tanh, where logits are capped."""

_BY_CLASS = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that join logits with each other, or with one number for each class."""

_RESHAPING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators after which rows are still rows, as long as the last axis stays."""


@dataclass(eq=False)
class LogitHead:
    """The nodes that make logits of rows, each row by itself.

    Attributes:
        logits: What they give [..., V].
        nodes: In order.
        rows: What they start from, each [..., K].
    """

    logits: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)
    rows: list[ir.Value] = field(default_factory=list)

    def emit(self, op: Builder, values: dict[ir.Value, Value], count: int) -> Value:
        """Emit the nodes for some rows.

        Args:
            op: Where to.
            values: What stands for ``rows``, each [count, K].
            count: How many there are.
        """
        shape = (count, (dimensions(self.logits) or (None,))[-1])
        for node in self.nodes:
            (output,) = node.outputs
            given = [None if value is None else values.get(value, op.wrap(value)) for value in node.inputs]
            if not node.domain and node.op_type in _RESHAPING:
                assert given[0] is not None
                values[output] = given[0]
                continue
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            (made,) = op.several(node.op_type, *given, outputs=1, domain=node.domain, **attributes)
            made.ir.type = output.type
            is_row = output is self.logits or (dimensions(output) or ())[-1:] == shape[-1:]
            values[output] = made.with_shape(shape if is_row else dimensions(output))
        return values[self.logits]


def find_head(logits: ir.Value) -> LogitHead | None:
    """The nodes that make logits of something narrower; ``None`` where these are others than is known here.

    These are products with a weight (MatMul, Gemm, MatMulNBits), sums of several, as adapters make them, and behind
    them biases, factors, and caps.
    """
    found = LogitHead(logits)
    shape = dimensions(logits)
    classes = shape[-1] if shape else None
    return found if isinstance(classes, int) and _trace(found, logits, classes, set()) else None


def _trace(head: LogitHead, value: ir.Value, classes: int, seen: set[ir.Value]) -> bool:
    """Add the nodes that make a value [..., V], those that they read first; whether all are known."""
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
        return _start(head, first)
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
        alike = len({tuple(dimensions(value) or ()) for value in joined}) == 1  # nothing is repeated for other rows
        return alike and all(_trace(head, value, classes, seen) for value in joined)
    return False


def _trace_product(head: LogitHead, node: ir.Node, x: ir.Value) -> bool:
    """A product of rows with one matrix, to which a bias may be added."""
    w, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if w is None or len(dimensions(w) or ()) != 2 or not (bias is None or _is_by_class(bias)):
        return False
    if "transA" in node.attributes and node.attributes["transA"].as_int():
        return False
    widening = w.producer()
    if not _start(head, x):
        return False
    if widening is not None and widening.op_type == "Cast" and widening not in head.nodes:
        # A weight in half precision is in single precision for one product, not all the time.
        head.nodes.append(widening)
    return True


def _start(head: LogitHead, rows: ir.Value | None) -> bool:
    """Whether logits can be made from these rows."""
    shape = None if rows is None else dimensions(rows)
    if rows is None or not shape or len(shape) < 2 or not isinstance(shape[-1], int) or not is_float(rows):
        return False
    if rows not in head.rows:
        head.rows.append(rows)
    return True


def _is_by_class(value: ir.Value) -> bool:
    """Whether a value has one number for each class, or one for all."""
    shape = dimensions(value)
    return shape is not None and all(size == 1 for size in shape[:-1])


def sum_in_chunks(
    op: Builder, head: LogitHead, size: int, by_row: Sequence[tuple[Value, float]], term: Callable[..., Value]
) -> Value:
    """The sum over chunks of rows of what a function makes of their logits, 0-d.

    Args:
        op: Emits nodes beside the model.
        head: What makes logits of rows.
        size: How many rows a chunk has; the last is filled up.
        by_row: Vectors [S], such as labels, each with what fills it up.
        term: Emits the sum of a chunk, 0-d, from a builder, its logits [size, V], and what ``by_row`` has for it.
    """
    zero = op.constant(0, dtype_of(head.logits))
    body = op.body([], "chunk")
    state = ir.Value(name=f"{body.unique_prefix()}sum", type=zero.ir.type, shape=ir.Shape(()))
    body.graph.inputs.append(state)
    scanned: list[Value] = []

    def of_chunk(rows: Value, fill: float) -> Value:
        stacked = _in_chunks(op, rows, size, fill)
        scanned.append(stacked)
        inner = ir.Value(name=f"{body.unique_prefix()}rows", type=stacked.ir.type)
        body.graph.inputs.append(inner)
        return body.wrap(inner).with_shape((size, *(stacked.shape or ())[2:]))

    values = {rows: of_chunk(as_rows(op, op.wrap(rows)), 0) for rows in head.rows}
    given = [of_chunk(rows, fill) for rows, fill in by_row]
    summed = body.wrap(state) + term(body, head.emit(body, values, size), *given).with_shape(())
    body.output(summed.with_shape(()))
    (total,) = op.several("Scan", zero, *scanned, outputs=1, body=body.graph, num_scan_inputs=len(scanned))
    total.ir.type = zero.ir.type
    return total.with_shape(())


def dtype_of(value: ir.Value) -> ir.DataType:
    """The element type, which inference has found."""
    assert value.dtype is not None
    return value.dtype


def as_rows(op: Builder, x: Value) -> Value:
    """All axes but the last as one: [rows, columns]."""
    if x.rank == 2:
        return x
    static = x.static_shape
    rows = None if static is None else math.prod(static[:-1])
    return op.Flatten(x, axis=-1).with_shape((rows, None if x.shape is None else x.shape[-1]))


def _in_chunks(op: Builder, rows: Value, size: int, fill: float) -> Value:
    """Rows [S, ...] as chunks [ceil(S / size), size, ...], filled up."""
    rest = tuple((rows.shape or ())[1:])
    count = None if rows.static_shape is None else -(-rows.static_shape[0] // size)
    if rows.static_shape is None or rows.static_shape[0] % size:
        missing = op.Mod(-op.dimension(rows, 0), op.ints(size))
        zeros = op.ints(*[0] * len(rest))
        pads = op.Concat(op.ints(0), zeros, missing, zeros, axis=0)
        rows = op.Pad(rows, pads, op.scalar(fill, rows))
    sizes = [int(axis) for axis in rest if isinstance(axis, int)]
    return op.reshape(rows, [-1, size, *sizes], known=(count, size, *sizes))
