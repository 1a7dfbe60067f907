"""Compute only those columns of a gradient that anything reads.

Where a layer reads inputs beside computed values, such as numbers beside embeddings, its gradient is split, and only
the part of the computed values is wanted. Multiplying by that part of the weight saves the rest, and a copy. Where two
wide parts are wanted, two multiplications save the copies, too.
"""

from __future__ import annotations

import math
from itertools import accumulate

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES
from onnxtrain.autodiff.rules.fused_linear import ACTIVATION
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import dimensions

LEAST_COLUMNS = 64
"""Columns of a part from which on a multiplication of its own is as fast as its share of a larger one."""


def skip_unread_columns(graph: ir.Graph) -> None:
    """Let a linear layer before a Split compute the only part that is read, or each of two wide ones, in place.

        x, w -> Linear -> Split -> y, others        becomes        w -> Slice -> part;  x, part -> Linear -> y

    with the same bits. Left alone are results that others read, layers with a bias, a mask or an activation, and rows
    known to be fewer than those of the weight, whose copy would take longer than the Split.

    Requires: a sorted graph with shapes, in which all gradients are built. Ensures: a sorted graph.
    """
    for node in list(graph):
        layer = _layer_before(node)
        if layer is None:
            continue
        read = [index for index, output in enumerate(node.outputs) if output.uses() or output.is_graph_output()]
        sizes = [(dimensions(output) or (None,))[-1] for output in node.outputs]
        if not all(isinstance(size, int) for size in sizes) or not read:
            continue
        widths = [size for size in sizes if isinstance(size, int)]
        if len(read) > 2 or (len(read) == 2 and min(widths[index] for index in read) < LEAST_COLUMNS):
            continue
        ends = [0, *accumulate(widths)]
        op = Builder(graph, graph.opset_imports[""], before=node)
        op.scope = node.name or ""
        x, w = (op.wrap(value) for value in layer.inputs[:2] if value is not None)
        axis = 0 if _is_transposed(layer) else 1
        attributes = {name: attribute.value for name, attribute in layer.attributes.items()}
        for index in read:
            begin, end, y = ends[index], ends[index + 1], node.outputs[index]
            part = op.Slice(w, op.ints(begin), op.ints(end), op.ints(axis))
            shape = tuple(end - begin if each == axis else size for each, size in enumerate(w.shape or ()))
            part = part.with_shape(shape)
            (result,) = op.several("Linear", x, part, outputs=1, domain=ONNXTRAIN_DOMAIN, **attributes)
            take_over(graph, {y: result.ir})
        remove_nodes(graph, [node, layer])


def _layer_before(split: ir.Node) -> ir.Node | None:
    """Return the linear layer whose columns a Split cuts apart, if it can compute some of them alone."""
    if split.op_type != "Split" or split.domain or "axis" not in split.attributes:
        return None
    total = split.inputs[0]
    layer = None if total is None else total.producer()
    sizes = None if total is None else dimensions(total)
    if total is None or layer is None or sizes is None or len(total.uses()) != 1 or total.is_graph_output():
        return None
    if split.attributes["axis"].as_int() not in (-1, len(sizes) - 1):
        return None
    if layer.op_type != "Linear" or layer.domain != ONNXTRAIN_DOMAIN or ACTIVATION in layer.attributes:
        return None
    w = layer.inputs[1]
    if w is None or w.dtype not in KERNEL_TYPES or any(value is not None for value in layer.inputs[2:]):
        return None
    shape = dimensions(w)
    if shape is None or len(shape) != 2 or None in shape:
        return None
    depth, rows = shape[1 if _is_transposed(layer) else 0], sizes[:-1]
    known = [size for size in rows if isinstance(size, int)]
    few = isinstance(depth, int) and len(known) == len(rows) and math.prod(known) < depth
    return None if few else layer


def _is_transposed(layer: ir.Node) -> bool:
    return "transB" in layer.attributes and layer.attributes["transB"].as_int() == 1
