"""Take rows of large tables by this project's own kernel, which asks for rows before it copies them.

Rows of an embedding are read in the order of the tokens, which no processor foresees: ONNX Runtime's kernel waits for
each. Only in working copies for sessions that load the native kernels.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.ir.value import dimensions

LEAST_ELEMENTS = 1 << 17
"""Elements of a table from which on it may lie beyond a core's own caches."""


def use_gather_kernels(model: ir.Model) -> None:
    """Replace Gather of rows by the operator of that name of the domain ``onnxtrain``, in place.

    Left alone are other axes, indices that are not int64, tables that are not float or double, and small ones.

    Requires: types. Ensures: the order of the nodes, and the same values.
    """
    used = False
    for node in model.graph:
        if not _takes_rows(node):
            continue
        node.domain = ONNXTRAIN_DOMAIN
        node.version = None
        node.attributes.pop("axis", None)
        used = True
    if used:
        model.graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)


def _takes_rows(node: ir.Node) -> bool:
    if node.op_type != "Gather" or node.domain:
        return False
    axis = node.attributes.get("axis")
    data, indices = node.inputs
    if data is None or indices is None or (axis is not None and axis.as_int() != 0):
        return False
    if data.dtype not in KERNEL_TYPES or indices.dtype != ir.DataType.INT64:
        return False
    sizes = [size for size in dimensions(data) or () if isinstance(size, int)]
    return len(sizes) != len(dimensions(data) or ()) or math.prod(sizes) >= LEAST_ELEMENTS
