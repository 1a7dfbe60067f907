"""Run batch normalization in training mode on this project's own kernel, which is faster than ONNX Runtime's.

Only in working copies for sessions that load the native kernels: a step graph for any runtime has the standard
operator.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.autodiff.rules.fused_batch_norm import normalizes_batches
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN


def use_normalization_kernels(model: ir.Model) -> None:
    """Replace BatchNormalization in training mode by the operator of that name of the domain ``onnxtrain``, in place.

    Both compute y and the running statistics; the kernel sums in float64, and any number of threads gives the same
    bits. Left alone are nodes with inputs of several types, inputs of one axis, and nodes that read given statistics
    (without ``training_mode``), which ONNX Runtime fuses.

    Requires: types of the inputs. Ensures: the order of the nodes.
    """
    used = False
    for node in model.graph:
        if not normalizes_batches(node):
            continue
        node.domain = ONNXTRAIN_DOMAIN
        node.version = None
        node.attributes.pop("training_mode")
        used = True
    if used:
        model.graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)
