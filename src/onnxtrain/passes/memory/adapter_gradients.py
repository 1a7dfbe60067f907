"""Values that the backward pass reads for the gradients of adapters alone: cheap ones need not be kept for that."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.ir.value import dimensions

SHAPES_ONLY = frozenset({"Shape", "Size"})
"""Operators that read no element of their input."""

_LARGEST_RANK = 64
"""Smaller size of a matrix up to which it counts as an adapter's."""


def only_adapters_read(value: ir.Value, carrying: Collection[ir.Node]) -> bool:
    """Return whether gradients read a value, and only those of matrices as narrow as an adapter's."""
    readers = [node for node in value.consumers() if node in carrying and node.op_type not in SHAPES_ONLY]
    return bool(readers) and all(
        node.op_type == "LinearWeightGradient" and _is_narrow(node.outputs[0]) for node in readers
    )


def _is_narrow(matrix: ir.Value) -> bool:
    shape = [size for size in dimensions(matrix) or () if isinstance(size, int)]
    return len(shape) == 2 and min(shape) <= _LARGEST_RANK and 4 * min(shape) <= max(shape)
