"""Check or change the nodes behind a head, so that they accept any number of classes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.edit.working import Working
from onnxtrain.errors import OptionError
from onnxtrain.ir.clone import captured_values
from onnxtrain.ir.inference import keeps_shape
from onnxtrain.ir.replace import set_inputs
from onnxtrain.ir.value import constant_tensor

_ANY_NUMBER = frozenset(
    {"Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ArgMin", "TopK", "Dropout", "LpNormalization"}
    | {"Flatten", "Squeeze", "Unsqueeze", "Transpose", "Shape", "Size", "Cast", "CastLike", "Identity"}
    | {"GlobalAveragePool", "GlobalMaxPool", "AveragePool", "MaxPool", "DepthToSpace"}
    | {"ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceLogSumExp", "ReduceL2"}
)
"""Operators that take any number of classes as they are."""

_SIZES = {"Reshape": 1, "Resize": 3, "Expand": 1}
"""Operators that say in an input which sizes their result has, and where."""


def fit_tail(working: Working, head: ir.Value, old: int, new: int) -> None:
    """Let what is computed from a head do for its new number of classes, in place.

    Sizes that a Reshape, Resize or Expand gives for the class axis are changed.

    Raises:
        OptionError: A node behind the head is made for the old number.
    """
    behind, sizes = {head}, set[ir.Value]()
    for node in working.graph:
        read = [value for value in (*node.inputs, *captured_values(node)) if value is not None]
        if not any(value in behind or value in sizes for value in read):
            continue
        if not any(value in behind for value in read):  # computes with shapes only
            sizes.update(node.outputs)
            continue
        if node.op_type in _SIZES and not node.domain:
            _resize(working, node, old, new)
        elif not _takes_any_number(node, behind, old):
            raise OptionError(
                f"Behind the head stands {node.op_type} {node.name or node.outputs[0].name!r}, which is made for its "
                f"{old} classes; name a layer further back with at=, or use cut and append."
            )
        (sizes if node.op_type in ("Shape", "Size") else behind).update(node.outputs)


def _takes_any_number(node: ir.Node, behind: set[ir.Value], old: int) -> bool:
    if node.domain:
        return False
    if node.op_type in _ANY_NUMBER:
        return True
    if not keeps_shape(node.op_type):
        return False
    others = [value for value in node.inputs if value is not None and value not in behind]
    return all(value.shape is not None and old not in _sizes(value) for value in others) or old == 1


def _sizes(value: ir.Value) -> list[int]:
    assert value.shape is not None
    return [size for size in value.shape if isinstance(size, int)]


def _resize(working: Working, node: ir.Node, old: int, new: int) -> None:
    """Change the size of the class axis in a constant that a node takes sizes from."""
    index = _SIZES[node.op_type]
    value = node.inputs[index] if len(node.inputs) > index else None
    tensor = None if value is None else constant_tensor(value)
    if value is None or tensor is None:
        return
    given = tensor.numpy()
    places = np.flatnonzero(given == old)
    if len(places) == 0:
        return
    if len(places) > 1 or old == 1:
        raise OptionError(
            f"Behind the head stands {node.op_type} {node.name or node.outputs[0].name!r} to sizes {given.tolist()}, "
            f"of which it is not clear which one counts its {old} classes; use cut and append."
        )
    changed = given.copy()
    changed[places[0]] = new
    name = working.free_name(f"{value.name}_{new}")
    made = working.initializer(name, changed, tensor.dtype)
    set_inputs(node, [*node.inputs[:index], made, *node.inputs[index + 1 :]])
