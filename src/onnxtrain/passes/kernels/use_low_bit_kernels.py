"""Products with weights of a few bits on this project's own kernel, which keeps no second copy of them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES
from onnxtrain.autodiff.rules.matmul_nbits import PRODUCT, PackedWeight, multiplied
from onnxtrain.errors import GradientError
from onnxtrain.ir import Builder
from onnxtrain.ir.domains import MICROSOFT_DOMAIN

_IN_FLOAT = (0, 1)
"""Accuracy levels at which ONNX Runtime computes in float: the default, and that of float32."""


def use_low_bit_kernels(model: ir.Model) -> None:
    """Write MatMulNBits of ONNX Runtime as the operator of the same name of the domain ``onnxtrain``, in place.

    y = x wᵀ + bias. ONNX Runtime arranges the weights anew when a session is created, and so holds them twice, or makes
    a whole weight of floats for the time of a product. Left alone are nodes whose columns are in groups by index, that
    are to compute in fewer bits (``accuracy_level``), and those of half precision. Bodies of operators
    are gone through, too, where a loss computes its logits in chunks.

    Requires: a sorted graph, types. Ensures: a sorted graph.
    """
    main = Builder(model.graph, model.graph.opset_imports.get("", 1))
    for graph in (model.graph, *model.graph.subgraphs()):
        assert isinstance(graph, ir.Graph)
        _use_in(graph, main)


def _use_in(graph: ir.Graph, main: Builder) -> None:
    """The same in the main graph, or in a body."""
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
        product = multiplied(PRODUCT, x, size, packed, scales, zeros)
        y, old = (product if bias is None else product + bias).ir, node.outputs[0]
        y.type, y.shape = old.type, old.shape
        is_output, name = old.is_graph_output(), old.name
        ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        if is_output:
            y.name = name


def _size(node: ir.Node) -> PackedWeight | None:
    """How the weight of a node is packed; ``None`` where ONNX Runtime's operator stays."""
    if (node.domain, node.op_type) != (MICROSOFT_DOMAIN, "MatMulNBits"):
        return None
    level = node.attributes.get("accuracy_level")
    floating = [node.inputs[place] for place in (0, 2)]
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
