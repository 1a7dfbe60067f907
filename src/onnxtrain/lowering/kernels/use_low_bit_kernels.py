"""Run matmuls with low-bit weights on this project's own kernel, which keeps no second copy of them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES
from onnxtrain.autodiff.rules.matmul_nbits import PRODUCT, PackedWeight, multiplied
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import MICROSOFT_DOMAIN

_IN_FLOAT = (0, 1)
"""Accuracy levels at which ONNX Runtime computes in float: the default, and float32."""


def use_low_bit_kernels(model: ir.Model) -> None:
    """Replace MatMulNBits of ONNX Runtime by the operator of the same name of the domain ``onnxtrain``, in place.

    y = x wᵀ + bias. ONNX Runtime repacks the weights when a session is created, and so holds them twice, or dequantizes
    a whole weight for the time of a matmul. Left alone are nodes with columns grouped by index (``g_idx``), with an
    ``accuracy_level`` of fewer bits, and those in half precision. Bodies of operators are included, where a loss
    computes its logits in chunks.

    Requires: a sorted graph, types. Ensures: a sorted graph.
    """
    main = Builder(model.graph, model.graph.opset_imports.get("", 1))
    for graph in (model.graph, *model.graph.subgraphs()):
        assert isinstance(graph, ir.Graph)
        _use_in(graph, main)


def _use_in(graph: ir.Graph, main: Builder) -> None:
    """Replace the nodes of the main graph, or of a body."""
    for node in list(graph):
        size = _size(node)
        if size is None:
            continue
        op = main.before(node) if graph is main.graph else Builder(graph, main.opset, before=node, outer=main)
        given = [None if value is None else op.wrap(value) for value in (*node.inputs, *(None,) * 6)[:6]]
        x, packed, scales, zeros, _, bias = given
        assert x is not None
        assert packed is not None
        assert scales is not None
        matmul = multiplied(PRODUCT, x, size, packed, scales, zeros)
        y, old = (matmul if bias is None else matmul + bias).ir, node.outputs[0]
        y.type, y.shape = old.type, old.shape
        is_output, name = old.is_graph_output(), old.name
        ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        if is_output:
            y.name = name


def _size(node: ir.Node) -> PackedWeight | None:
    """Return how the weight of a node is packed; ``None`` where ONNX Runtime's operator stays."""
    if (node.domain, node.op_type) != (MICROSOFT_DOMAIN, "MatMulNBits"):
        return None
    level = node.attributes.get("accuracy_level")
    floating = [node.inputs[slot] for slot in (0, 2)]
    if level is not None and level.as_int() not in _IN_FLOAT:
        return None
    if len(node.inputs) > 4 and node.inputs[4] is not None:
        return None
    if any(value is None or value.dtype not in KERNEL_TYPES for value in floating):
        return None
    try:
        size = PackedWeight.of(node)
    except GradientError:
        return None
    return size if size.block & (size.block - 1) == 0 else None
