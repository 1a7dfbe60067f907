"""Replace the optimizer nodes that native kernels lack by their bodies in standard operators."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.clone import all_nodes
from onnxtrain.lowering.portable.lower_optimizers import lower_optimizers
from onnxtrain.operators.nodes import has_kernel
from onnxtrain.operators.registry import find


def lower_without_kernel(model: ir.Model) -> ir.Model:
    """Replace the optimizer nodes without a native kernel, such as SSGD with a registered measure, in place.

    Requires: a graph without Gradient nodes. Ensures: a sorted graph; without such nodes nothing changes.

    Args:
        model: A working copy.

    Raises:
        OperatorError: A node has inputs, outputs or attributes that its operator does not accept.
    """
    optimizers = [
        node
        for node in all_nodes(model.graph)
        if node.op_identifier() not in model.functions and find(node.domain, node.op_type) is not None
    ]
    kept = frozenset(node for node in optimizers if has_kernel(node))
    return model if len(kept) == len(optimizers) else lower_optimizers(model, kept)
