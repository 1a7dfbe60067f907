"""Run batch normalization in training mode on this project's own kernel, which is faster than ONNX Runtime's.

Only in working copies for sessions that load the native kernels: a step graph for any runtime has the standard
operator.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN


def use_normalization_kernels(model: ir.Model) -> None:
    """Replace BatchNormalization in training mode by the operator of that name of the domain ``onnxtrain``, in place.

    Both compute y and the running statistics; the kernel sums in float64, and any number of threads gives the same
    bits. Left alone are nodes with inputs of several types, inputs of one axis, and nodes that read given statistics
    (without ``training_mode``), which ONNX Runtime fuses.

    Requires: types of the inputs. Ensures: the order of the nodes.
    """
    used = False
    for node in model.graph:
        if not _is_replaced(node):
            continue
        node.domain = ONNXTRAIN_DOMAIN
        node.version = None
        node.attributes.pop("training_mode")
        used = True
    if used:
        model.graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)


def _is_replaced(node: ir.Node) -> bool:
    if node.op_identifier() != ("", "BatchNormalization", ""):
        return False
    mode = node.attributes.get("training_mode")
    types = {None if value is None else value.dtype for value in node.inputs}
    x = node.inputs[0]
    if x is not None and x.shape is not None and len(x.shape) < 2:
        return False  # one channel, of which the kernel does not know
    return mode is not None and mode.as_int() == 1 and len(types) == 1 and types <= set(KERNEL_TYPES)
