"""Chunked losses on logits of many classes: logits are computed a chunk of rows at a time, never all at once.

Logits z = x W of S rows (tokens) and V classes (vocabulary), their log-probabilities and their gradient take 4 S V
bytes each: 131 MB for 1,024 tokens and a vocabulary of 32,000. The matmul that computes the logits moves into the body
of a Scan over chunks of rows, which sums the loss. The gradient is another Scan, which recomputes the logits of a chunk
and accumulates dW over the chunks (:mod:`onnxtrain.autodiff.rules.control_flow`). A step graph merges the two Scans
(:mod:`onnxtrain.lowering.rules.scans`), so that nothing is computed twice. A loss that compares sums of
log-probabilities, such as DPO, needs all of them before its gradient, which computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import dimensions
from onnxtrain.lowering.logits import LogitHead, as_rows, find_head


def head_in_chunks(logits: ir.Value, loss: str, chunk: int) -> LogitHead | None:
    """Find the nodes that compute logits; ``None`` for logits that no node computes."""
    producer = logits.producer()
    found = None if producer is None else find_head(logits)
    if producer is not None and found is None:
        raise OptionError(
            f"{loss}: chunk={chunk} computes the logits {logits.name!r} chunk by chunk, for which they must come from "
            "a linear layer (MatMul, Gemm, MatMulNBits) with one matrix for all rows, perhaps with biases, scales and "
            f"caps, of known types and shapes; they come from {producer.op_type} of {_operands(producer)}. Leave "
            "chunk out."
        ).about(logits.name, got=producer.op_type)
    return found


def _operands(node: ir.Node) -> str:
    values = [value for value in node.inputs if value is not None]
    return ", ".join(
        f"{value.name!r} {'of unknown shape' if value.shape is None else list(dimensions(value) or ())}"
        for value in values
    )


def check_chunk(chunk: int | None) -> None:
    """Refuse chunks without a row."""
    if chunk is not None and chunk < 1:
        raise OptionError(f"chunk is {chunk}; it is a number of rows, 1 or more.").about("chunk", got=chunk)


def sum_in_chunks(
    op: Builder, head: LogitHead, size: int, by_row: Sequence[tuple[Value, float]], term: Callable[..., Value]
) -> Value:
    """Emit the sum over chunks of rows of a function of their logits, 0-d."""
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
    """Emit a number for each row [S], from a chunk of logits at a time, of which ``term`` emits the numbers [size]."""
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
