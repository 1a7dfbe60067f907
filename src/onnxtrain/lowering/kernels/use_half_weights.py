"""Let linear layers read weights in float16 and bfloat16 as they are stored."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import substitute_and_rename
from onnxtrain.graph.value import HALVES
from onnxtrain.lowering.fuse.linear_layers import LAYER, OPERATOR, check_layer, layer_of
from onnxtrain.lowering.fuse.patterns import Match, find, remove_unread


def use_half_weights(model: ir.Model) -> None:
    """Let linear layers widen float16 and bfloat16 weights tile by tile, in place, without a float32 copy of them.

    A 16-bit weight w reaches a matmul y = x w in float32 through a Cast. ``Linear`` of the domain ``onnxtrain`` reads w
    itself and returns the same bits. MatMul and Gemm become such a node, also in the bodies of operators, where a loss
    computes logits in chunks. Matmuls in float64, and those that the pattern of
    :func:`~onnxtrain.lowering.fuse.fuse_linear.fuse_linear` does not match, are unchanged.

    Requires: a sorted graph whose gradients are built, types, and the shapes of weights. Ensures: a sorted graph; Casts
    without readers may remain.
    """
    for graph in (model.graph, *model.graph.subgraphs()):
        assert isinstance(graph, ir.Graph)
        for node in graph:
            if node.domain == ONNXTRAIN_DOMAIN and node.op_type in (OPERATOR, "LinearGradient"):
                stored = _stored(node.inputs[1])
                if stored is not None:
                    node.replace_input_with(1, stored)
        replaced = []
        for match in find(graph, LAYER, check=_check, backwards=True):
            _read_as_stored(graph, match)
            replaced.append(match.nodes[0])
        if replaced:
            remove_unread(graph, replaced, ())
            model.graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)


def _check(match: Match) -> str | None:
    stored = _stored(layer_of(match).w)
    return "its weight is not stored in 16 bits" if stored is None else check_layer(match)


def _read_as_stored(graph: ir.Graph, match: Match) -> None:
    """Replace a linear layer by one that reads the 16-bit weight."""
    layer, y = layer_of(match), match.y
    attributes = [ir.AttrInt64("transB", int(layer.transposed))]
    inputs = [layer.x, _stored(layer.w), layer.bias]
    linear = ir.Node(ONNXTRAIN_DOMAIN, OPERATOR, inputs, attributes, num_outputs=1, name=match["matmul"].name)
    graph.insert_before(match.nodes[0], linear)
    result = linear.outputs[0]
    result.type, result.shape = y.type, y.shape
    substitute_and_rename(graph, {y: result})


def _stored(weight: ir.Value | None) -> ir.Value | None:
    """Return the 16-bit value that a weight in float32 is cast from, or ``None``."""
    cast = None if weight is None else weight.producer()
    if weight is None or weight.dtype != ir.DataType.FLOAT or cast is None:
        return None
    if (cast.domain, cast.op_type) != ("", "Cast"):
        return None
    stored = cast.inputs[0]
    return stored if stored is not None and stored.dtype in HALVES else None
