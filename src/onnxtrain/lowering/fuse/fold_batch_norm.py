"""Fold batch normalization with constant statistics into the convolution before it."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import constant_array, dimensions
from onnxtrain.lowering.fuse.patterns import is_needed, named_by_gradients

_EPSILON = 1e-5


def fold_batch_norm(model: ir.Model) -> None:
    """Replace y = BatchNormalization(Conv(x)) of frozen layers by one convolution with other weights, in place.

    With f = scale / sqrt(variance + ε) the weights are w f and the bias is (b - mean) f + B, computed in float64. ONNX
    Runtime does that itself, but not for weights that a session gets by address. The new weights are a copy, which each
    session holds beside the file's. Left alone are a convolution that others read, weights that are trained or given,
    and weights with more elements than the result for one example, whose copy costs more than it saves.

    Requires: a sorted graph. Ensures: the same; the convolution has the name of the normalization.
    """
    graph = model.graph
    norms = [node for node in graph if node.op_type == "BatchNormalization" and not node.domain]
    if not norms:
        return
    main, named = Builder(graph, graph.opset_imports[""]), named_by_gradients(graph)
    folded: list[ir.Node] = []
    for norm in norms:
        conv = _convolution(norm, named)
        if conv is None:
            continue
        tensors = [_frozen(value, named) for value in (*conv.inputs[1:2], *norm.inputs[1:5])]
        bias = conv.inputs[2] if len(conv.inputs) > 2 else None
        shift = None if bias is None else _frozen(bias, named)
        w, scale, offset, mean, variance = tensors
        if w is None or scale is None or offset is None or mean is None or variance is None:
            continue
        if (bias is not None and shift is None) or w.size > _elements(norm.outputs[0]):
            continue
        factor = scale / np.sqrt(variance + norm.attributes.get_float("epsilon", _EPSILON))
        weights = w * factor.reshape(-1, *[1] * (w.ndim - 1))
        added = ((0.0 if shift is None else shift) - mean) * factor + offset
        op = main.before(norm)
        dtype = norm.outputs[0].dtype
        given = [op.constant(array, dtype) for array in (weights, added)]
        attributes = {name: attribute.value for name, attribute in conv.attributes.items()}
        x = conv.inputs[0]
        assert x is not None
        result = op.Conv(op.wrap(x), *given, **attributes)
        op.emitted[-1].name = norm.name
        take_over(graph, {norm.outputs[0]: result.ir})
        folded += [norm, conv]
    remove_nodes(graph, folded)


def _elements(y: ir.Value) -> float:
    """Number of elements of one example of a result; sizes that are not known count as 1."""
    return math.prod(size for size in (dimensions(y) or ())[1:] if isinstance(size, int))


def _convolution(norm: ir.Node, named: Collection[str]) -> ir.Node | None:
    """The convolution that only this normalization with constant statistics reads."""
    if (
        norm.attributes.get_int("training_mode", 0)
        or len(norm.outputs) > 1
        or norm.outputs[0].dtype != ir.DataType.FLOAT
    ):
        return None
    source = norm.inputs[0]
    conv = None if source is None else source.producer()
    if source is None or conv is None or conv.op_type != "Conv" or conv.domain or conv.graph is not norm.graph:
        return None
    return None if is_needed(source, named) or len(source.uses()) != 1 else conv


def _frozen(value: ir.Value | None, named: Collection[str]) -> np.ndarray | None:
    """A constant in float64, if no gradient by it is asked for."""
    if value is None or value.is_graph_input() or value.name in named:
        return None
    array = constant_array(value)
    return None if array is None else array.astype(np.float64)
