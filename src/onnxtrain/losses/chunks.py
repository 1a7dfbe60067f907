"""Chunked losses on logits of many classes: logits are computed a chunk of rows at a time, never all at once.

Logits z = x W of S rows (tokens) and V classes (vocabulary), their log-probabilities and their gradient take 4 S V
bytes each: 131 MB for 1,024 tokens and a vocabulary of 32,000. The matmul that computes the logits moves into the body
of a Scan over chunks of rows, which sums the loss. The gradient is another Scan, which recomputes the logits of a chunk
and accumulates dW over the chunks (:mod:`onnxtrain.autodiff.rules.loops`). A step graph merges the two Scans
(:mod:`onnxtrain.passes.join_scans`), so that nothing is computed twice. A loss that compares sums of log-probabilities,
such as DPO, needs all of them before its gradient, which computes the logits again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.domains import MICROSOFT_DOMAIN
from onnxtrain.ir.value import Dimension, dimensions, is_float

_BY_ELEMENT = frozenset({"Identity", "Tanh", "Neg"})
"""Elementwise unary operators on logits; Tanh caps them."""

_BY_CLASS = frozenset({"Add", "Sub", "Mul", "Div"})
"""Elementwise binary operators: logits with logits, or with one value per class."""

_RESHAPING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators that keep rows intact as long as the last axis stays."""


@dataclass(eq=False)
class LogitHead:
    """Nodes that compute logits row by row.

    Attributes:
        logits: Their result [..., V].
        nodes: The nodes in order.
        rows: Their inputs, each [..., K].
    """

    logits: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)
    rows: list[ir.Value] = field(default_factory=list)

    def emit(self, op: Builder, values: dict[ir.Value, Value], count: int) -> Value:
        """Emit the nodes for a chunk of rows.

        Args:
            op: The builder.
            values: Replacements of ``rows``, each [count, K].
            count: Number of rows.
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
    """Find the nodes that compute logits from narrower rows; ``None`` where an operator is not supported.

    Supported are linear layers (MatMul, Gemm, MatMulNBits), sums of several, as of adapters, and after them biases,
    scales and caps.
    """
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
    w, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if w is None or len(dimensions(w) or ()) != 2 or not (bias is None or _is_by_class(bias)):
        return False
    if "transA" in node.attributes and node.attributes["transA"].as_int():
        return False
    widening = w.producer()
    transposed = "transB" in node.attributes and node.attributes["transB"].as_int()
    if not _start(head, x, node.outputs[0], (dimensions(w) or ())[1 if transposed else 0]):
        return False
    if widening is not None and widening.op_type == "Cast" and widening not in head.nodes:
        # Widen a float16 weight within the chunk, not for the whole step.
        head.nodes.append(widening)
    return True


def _start(head: LogitHead, rows: ir.Value | None, product: ir.Value, columns: Dimension) -> bool:
    """Add rows as an input of the head; return whether they are valid.

    Args:
        head: The head.
        rows: The rows [..., K].
        product: Their product with a matrix [K, V], which tells their shape where the model does not.
        columns: K.
    """
    given = dimensions(product)
    if rows is not None and dimensions(rows) is None and given is not None:
        rows.shape = ir.Shape((*given[:-1], columns))
        if rows.dtype is None and product.dtype is not None:
            rows.dtype = product.dtype
    shape = None if rows is None else dimensions(rows)
    if rows is None or not shape or len(shape) < 2 or not isinstance(shape[-1], int) or not is_float(rows):
        return False
    if rows not in head.rows:
        head.rows.append(rows)
    return True


def _is_by_class(value: ir.Value) -> bool:
    """Return whether a value has one element per class, or one for all."""
    shape = dimensions(value)
    return shape is not None and all(size == 1 for size in shape[:-1])


def head_in_chunks(logits: ir.Value, loss: str, chunk: int) -> LogitHead | None:
    """Find the nodes that compute logits; ``None`` for logits that no node computes.

    Raises:
        OptionError: The logits cannot be computed in chunks.
    """
    producer = logits.producer()
    found = None if producer is None else find_head(logits)
    if producer is not None and found is None:
        raise OptionError(
            f"{loss}: chunk={chunk} computes the logits {logits.name!r} chunk by chunk, for which they must come from "
            "a linear layer (MatMul, Gemm, MatMulNBits) with one matrix for all rows, perhaps with biases, scales and "
            f"caps, of known types and shapes; they come from {producer.op_type} of {_operands(producer)}. Leave "
            "chunk out."
        )
    return found


def _operands(node: ir.Node) -> str:
    """Describe the inputs of a node with their shapes."""
    values = [value for value in node.inputs if value is not None]
    return ", ".join(
        f"{value.name!r} {'of unknown shape' if value.shape is None else list(dimensions(value) or ())}"
        for value in values
    )


def check_chunk(chunk: int | None) -> None:
    """Refuse chunks without a row.

    Raises:
        OptionError: The number of rows is below 1.
    """
    if chunk is not None and chunk < 1:
        raise OptionError(f"chunk is {chunk}; it is a number of rows, 1 or more.")


def sum_in_chunks(
    op: Builder, head: LogitHead, size: int, by_row: Sequence[tuple[Value, float]], term: Callable[..., Value]
) -> Value:
    """Emit the sum over chunks of rows of a function of their logits, 0-d.

    Args:
        op: The builder of the model's graph.
        head: The nodes that compute logits.
        size: Rows per chunk; the last chunk is padded.
        by_row: Vectors [S], such as labels, each with its padding value.
        term: Emits the 0-d sum of a chunk from a builder, the logits [size, V] and the chunk's slices of ``by_row``.
    """
    zero = op.constant(0, dtype_of(head.logits))
    body = op.body([], "chunk")
    state = ir.Value(name=f"{body.unique_prefix()}sum", type=zero.ir.type, shape=ir.Shape(()))
    body.graph.inputs.append(state)
    scanned, found = _of_chunk(op, body, head, size, by_row, term)
    body.output((body.wrap(state) + found.with_shape(())).with_shape(()))
    (total,) = op.several("Scan", zero, *scanned, outputs=1, body=body.graph, num_scan_inputs=len(scanned))
    total.ir.type = zero.ir.type
    return total.with_shape(())


def map_in_chunks(
    op: Builder, head: LogitHead, size: int, by_row: Sequence[tuple[Value, float]], term: Callable[..., Value]
) -> Value:
    """Emit a number for each row, computed from its logits a chunk of rows at a time, [S].

    Args are those of :func:`sum_in_chunks`, but ``term`` emits the numbers [size] of a chunk. A loss of them is known
    after the last chunk only, so that their gradient computes the logits again.
    """
    body = op.body([], "chunk")
    scanned, found = _of_chunk(op, body, head, size, by_row, term)
    body.output(found.with_shape((size,)))
    (stacked,) = op.several("Scan", *scanned, outputs=1, body=body.graph, num_scan_inputs=len(scanned))
    stacked.ir.dtype = dtype_of(head.logits)
    flat = op.reshape(stacked.with_shape((None, size)), [-1], known=(None,))
    first, _ = by_row[0]
    return op.Slice(flat, op.ints(0), op.dimension(first, 0), op.ints(0)).with_shape(first.shape)


def _of_chunk(
    op: Builder,
    body: Builder,
    head: LogitHead,
    size: int,
    by_row: Sequence[tuple[Value, float]],
    term: Callable[..., Value],
) -> tuple[list[Value], Value]:
    """Emit the term of a chunk into the body of a Scan; return the stacked chunks to scan, and the term."""
    scanned: list[Value] = []

    def of_chunk(rows: Value, fill: float) -> Value:
        stacked = _in_chunks(op, rows, size, fill)
        scanned.append(stacked)
        inner = ir.Value(name=f"{body.unique_prefix()}rows", type=stacked.ir.type)
        body.graph.inputs.append(inner)
        return body.wrap(inner).with_shape((size, *(stacked.shape or ())[2:]))

    values = {rows: of_chunk(as_rows(op, op.wrap(rows)), 0) for rows in head.rows}
    given = [of_chunk(rows, fill) for rows, fill in by_row]
    return scanned, term(body, head.emit(body, values, size), *given)


def dtype_of(value: ir.Value) -> ir.DataType:
    """Return the inferred element type."""
    assert value.dtype is not None
    return value.dtype


def as_rows(op: Builder, x: Value) -> Value:
    """Flatten all axes but the last: [rows, columns]."""
    if x.rank == 2:
        return x
    static = x.static_shape
    # The rows have a name, so that onnxruntime sees that results have the sizes of x and may take its memory.
    rows = f"rows of {x.name}" if static is None else math.prod(static[:-1])
    return op.Flatten(x, axis=-1).with_shape((rows, None if x.shape is None else x.shape[-1]))


def _in_chunks(op: Builder, rows: Value, size: int, fill: float) -> Value:
    """Pad and reshape rows [S, ...] into chunks [ceil(S / size), size, ...]."""
    rest = tuple((rows.shape or ())[1:])
    count = None if rows.static_shape is None else -(-rows.static_shape[0] // size)
    if rows.static_shape is None or rows.static_shape[0] % size:
        missing = op.Mod(-op.dimension(rows, 0), op.ints(size))
        zeros = op.ints(*[0] * len(rest))
        pads = op.Concat(op.ints(0), zeros, missing, zeros, axis=0)
        rows = op.Pad(rows, pads, op.scalar(fill, rows))
    sizes = [int(axis) for axis in rest if isinstance(axis, int)]
    return op.reshape(rows, [-1, size, *sizes], known=(count, size, *sizes))
