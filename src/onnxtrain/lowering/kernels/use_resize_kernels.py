"""Resize planes by this project's own kernel, which is faster than ONNX Runtime's.

Only in working copies for sessions that load the native kernels: a step graph for any runtime has the standard
operator.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.rules.resize import RESIZE, resize_matrices
from onnxtrain.graph import Builder
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import dimensions

SINCE = 18
"""The opset from which on Resize has a gradient."""

MODES = ("linear", "cubic")
"""Modes that mix neighbours; ONNX Runtime copies elements (``nearest``) as fast."""


def use_resize_kernels(model: ir.Model) -> None:
    """Replace bilinear and bicubic Resize of the last two axes by the operator that also is its gradient, in place.

    It multiplies by a matrix per axis, of which it reads what is not zero: ONNX Runtime computes both when it loads the
    graph, by its own Resize. Left alone are sizes that are not static, and values from outside of x
    (``tf_crop_and_resize``).

    Requires: a sorted graph with types and shapes. Ensures: the same.
    """
    graph = model.graph
    if graph.opset_imports.get("", 0) < SINCE:
        return
    for node in list(graph):
        if not _mixes_neighbours(node):
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        op.scope = node.name or "resize"
        view = Node(node, op)
        matrices = resize_matrices(view)
        if matrices is None:
            continue
        (y,) = emit(op, RESIZE, view.x, *matrices, like=[view.y])
        take_over(graph, {node.outputs[0]: y.ir})
        remove_nodes(graph, [node])


def _mixes_neighbours(node: ir.Node) -> bool:
    if node.op_type != "Resize" or node.domain:
        return False
    attributes, x = node.attributes, node.inputs[0]
    if x is None or x.dtype not in KERNEL_TYPES or attributes.get_string("mode", "nearest") not in MODES:
        return False
    if attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        return False
    return _are_static(x) and _are_static(node.outputs[0])


def _are_static(value: ir.Value) -> bool:
    """Return whether a tensor of three axes or more has static last two axes."""
    sizes = dimensions(value)
    return sizes is not None and len(sizes) > 2 and all(isinstance(size, int) and size > 0 for size in sizes[-2:])
