"""Nodes that compute logits row by row: the last linear layer of a language model with what follows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.sizes import product
from onnxtrain.graph.value import Dimension, dimensions, is_float

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

    def emit(self, op: Builder, values: dict[ir.Value, Value], count: int | str) -> Value:
        """Emit the nodes for some of the rows.

        Args:
            op: The builder.
            values: Replacements of ``rows``, each [count, K].
            count: Number of rows, or its name.
        """
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
