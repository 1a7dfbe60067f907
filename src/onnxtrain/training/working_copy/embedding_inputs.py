"""Find the inputs of a working copy that are token ids, and the size of the table that they are looked up in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.value import TABLE_ROWS, dimensions, is_float

_KEEP_ELEMENTS: Final = ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")

_KEEP_ROWS: Final = ("Cast", "Identity", "DequantizeLinear")
"""Operators between an initializer and the table that Gather reads."""


def mark_token_inputs(model: ir.Model) -> None:
    """Record the rows of the embedding table at each integer input whose values are looked up in one.

    ONNX's Gather counts negative indices from the end of the table, so that a wrong token id would train another row.
    """
    for value in model.graph.inputs:
        sizes = [] if value.dtype not in (ir.DataType.INT32, ir.DataType.INT64) else list(_tables(value))
        if sizes:
            value.meta[TABLE_ROWS] = min(sizes)


def _tables(value: ir.Value) -> Iterator[int]:
    """Yield the rows of the tables [rows, width] that the elements of a value are looked up in."""
    for node, slot in value.uses():
        if not node.domain and node.op_type in _KEEP_ELEMENTS and slot == 0:
            yield from _tables(node.outputs[0])
        elif slot == 1 and (node.domain, node.op_type) in (("", "Gather"), (MICROSOFT_DOMAIN, "GatherBlockQuantized")):
            axis = node.attributes.get("axis", node.attributes.get("gather_axis"))
            table = _initializer(node.inputs[0])
            shape = None if table is None else dimensions(table)
            if (axis is None or axis.as_int() == 0) and shape and len(shape) == 2 and isinstance(shape[0], int):
                yield shape[0]


def _initializer(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer whose values a table has; ``None`` for integers, such as the sizes of a shape."""
    floating = value is not None and is_float(value)
    while value is not None and (node := value.producer()) is not None:
        if node.domain or node.op_type not in _KEEP_ROWS:
            return None
        value = node.inputs[0]
        floating = floating or node.op_type == "DequantizeLinear" or (value is not None and is_float(value))
    return value if floating and value is not None and value.is_initializer() else None
