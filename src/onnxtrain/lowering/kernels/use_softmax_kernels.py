"""Run LogSoftmax over an inner axis on this project's own kernel, which is faster than ONNX Runtime's.

Only in working copies for sessions that load the native kernels: a step graph for any runtime has the standard
operator.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.value import dimensions

LEAST_INNER = 16
"""Elements of the axes behind: as many are computed together. ONNX Runtime transposes x and its result."""


def use_softmax_kernels(model: ir.Model) -> None:
    """Replace LogSoftmax along an axis that has others behind it by the operator of the domain ``onnxtrain``, in place.

    So are the classes of every pixel, as in segmentation.

    Requires: types and shapes. Ensures: the order of the nodes.
    """
    used = False
    for node in model.graph:
        if node.op_type != "LogSoftmax" or node.domain or not _has_inner_axes(node):
            continue
        node.domain = ONNXTRAIN_DOMAIN
        node.version = None
        used = True
    if used:
        model.graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)


def _has_inner_axes(node: ir.Node) -> bool:
    x = node.inputs[0]
    shape = None if x is None or x.dtype not in KERNEL_TYPES else dimensions(x)
    if not shape:
        return False
    inner = shape[node.attributes.get_int("axis", -1) % len(shape) + 1 :]
    sizes = [size for size in inner if isinstance(size, int)]
    return len(sizes) == len(inner) and math.prod(sizes) >= LEAST_INNER
