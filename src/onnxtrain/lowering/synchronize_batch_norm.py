"""Compute batch normalization from the statistics of all processes (SyncBatchNorm).

The part of a batch in one process has n elements of a channel, with mean m and variance v. The sums of n, n m and
n (v + m²) over the processes, in double precision, give the mean and the variance of the global batch, and so

    forward:   y = scale x̂ + bias, x̂ = (x - mean) r, r = 1 / sqrt(variance + ε)
    backward:  dx = scale r (dy - (Σ dy + x̂ Σ dy x̂) / Σ n)

with Σ over all processes: one sum in the forward pass of a node, and one in the backward pass. The caller ensures that
the losses of the processes add up, so that dy is the gradient of their sum.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.fused import VERSION, emit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.lowering.training_info.recipe import SYNCHRONIZED_KEY

_GRADIENT = "BatchNormalizationGradient"
_EPSILON, _MOMENTUM = 1e-5, 0.9
"""Defaults of attributes of BatchNormalization."""


class _GlobalStatistics(NamedTuple):
    """Statistics of the batch of all processes, in double precision: [C], [C] and [1]."""

    mean: Value
    variance: Value
    rows: Value


def synchronize_batch_norm(model: ir.Model, backward: Backward) -> None:
    """Let batch normalization in training mode, and its gradient, sum over all processes, in place.

    An entry of the model's metadata enables the pass; the pass removes it. ``AllReduce`` nodes block until all
    processes reach them, so all processes must run graphs with the same nodes in the same order.

    Requires: a sorted graph whose nodes have types, in which BatchNormalizationGradient nodes are not resolved.
    Ensures: a sorted graph.

    Args:
        model: A model whose gradients are built.
        backward: The nodes that the engine emitted; those emitted here for gradients are added.
    """
    graph = model.graph
    if model.metadata_props.pop(SYNCHRONIZED_KEY, "false") != "true":
        return
    graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)
    main = Builder(graph, graph.opset_imports[""])
    known: dict[ir.Value, _GlobalStatistics] = {}
    renamed: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type == "BatchNormalization" and not node.domain and _trains(node):
            x = _x(node, 0)
            known[x] = _normalize(graph, main.before(node), node)
    for node in list(graph):
        ours = node.domain == ONNXTRAIN_DOMAIN and node.op_type == _GRADIENT and len(node.inputs) < 4
        if ours and (statistics := known.get(_x(node, 1))) is not None:
            op = main.before(node)
            renamed |= _differentiate(graph, op, node, statistics)
            backward.nodes += op.emitted
    backward.arriving = {renamed.get(value, value) for value in backward.arriving}


def _trains(node: ir.Node) -> bool:
    mode = node.attributes.get("training_mode")
    return mode is not None and mode.as_int() == 1


def _x(node: ir.Node, index: int) -> ir.Value:
    x = node.inputs[index]
    assert x is not None
    return x


def _number(node: ir.Node, name: str, otherwise: float) -> float:
    return node.attributes[name].as_float() if name in node.attributes else otherwise


def _normalize(graph: ir.Graph, op: Builder, node: ir.Node) -> _GlobalStatistics:
    """Replace a node by nodes that normalize over all processes; returns the statistics."""
    op.scope = node.name or "batch_norm"
    epsilon, momentum = _number(node, "epsilon", _EPSILON), _number(node, "momentum", _MOMENTUM)
    x, scale, bias, mean, variance = (op.wrap(_x(node, index)) for index in range(5))
    zeros, ones = op.zeros_like(mean), op.ones_like(mean)
    # With a momentum of 0 the running statistics that come out are those of x.
    inputs = (x, scale, bias, zeros, ones)
    _, own_mean, own_variance = op.several(
        "BatchNormalization", *inputs, outputs=3, training_mode=1, momentum=0.0, epsilon=epsilon
    )
    for value in (own_mean, own_variance):
        value.ir.dtype = mean.dtype
        value.with_shape(mean.shape)
    m, v = (op.cast(value, ir.DataType.DOUBLE) for value in (own_mean, own_variance))
    n = op.cast(op.Size(x), ir.DataType.DOUBLE) / op.cast(op.Size(scale), ir.DataType.DOUBLE)
    sizes = op.Concat(op.ints(1), op.shape_of(scale), op.shape_of(scale), axis=0)
    count, first, second = _all_reduced(op, [op.reshape(n, [1]), n * m, n * (v + m * m)], sizes)
    global_mean = (first / count).with_shape(mean.shape)
    spread = second / count - global_mean * global_mean
    global_variance = op.Max(spread, op.scalar(0.0, spread)).with_shape(mean.shape)
    new_mean, new_variance = op.cast(global_mean, mean.dtype), op.cast(global_variance, mean.dtype)
    y = op.BatchNormalization(x, scale, bias, new_mean, new_variance, epsilon=epsilon)
    results = (y, mean * momentum + new_mean * (1 - momentum), variance * momentum + new_variance * (1 - momentum))
    take_over(graph, {old: new.ir for old, new in zip(node.outputs, results, strict=False)})
    remove_nodes(graph, [node])
    return _GlobalStatistics(global_mean, global_variance, count)


def _differentiate(
    graph: ir.Graph, op: Builder, node: ir.Node, statistics: _GlobalStatistics
) -> dict[ir.Value, ir.Value]:
    """Replace the gradient by one that uses the statistics of all processes; returns the new nodes."""
    op.scope = node.name or _GRADIENT
    epsilon = _number(node, "epsilon", _EPSILON)
    dy, x, scale = (op.wrap(_x(node, index)) for index in range(3))
    mean, variance, count = (op.wrap(value.ir) for value in (statistics.mean, statistics.variance, statistics.rows))
    single = [op.cast(value, scale.dtype).with_shape(scale.shape) for value in (mean, variance)]
    inputs = (dy, x, scale, *single)
    alone, dscale, dbias = emit(op, _GRADIENT, *inputs, like=[x, scale, scale], epsilon=epsilon)
    sums = [op.cast(value, ir.DataType.DOUBLE) for value in (dscale, dbias)]
    of_scale, of_bias = _all_reduced(op, sums, op.Concat(op.shape_of(scale), op.shape_of(scale), axis=0))
    inverse = op.Reciprocal(op.Sqrt(variance + epsilon))
    factor = op.cast(scale, ir.DataType.DOUBLE) * inverse / count
    slope, level = (op.cast(factor * value, scale.dtype).with_shape(scale.shape) for value in (of_scale, of_bias))
    through = op.BatchNormalization(x, slope, level, *single, epsilon=epsilon)  # slope x̂ + level
    dx = (alone - through).with_shape(x.shape)
    substitutes = {old: new.ir for old, new in zip(node.outputs, (dx, dscale, dbias), strict=False)}
    take_over(graph, substitutes)
    remove_nodes(graph, [node])
    return substitutes


def _all_reduced(op: Builder, terms: list[Value], sizes: Value) -> tuple[Value, ...]:
    """Return the sums of vectors over all processes, in one message."""
    joined = op.Concat(*terms, axis=0)
    joined.ir.dtype = ir.DataType.DOUBLE
    total = op.AllReduce(joined.with_shape((None,)), domain=ONNXTRAIN_DOMAIN)
    total.ir.dtype = ir.DataType.DOUBLE
    parts = op.several("Split", total.with_shape((None,)), sizes, outputs=len(terms), axis=0)
    for part in parts:
        part.ir.dtype = ir.DataType.DOUBLE
    return parts
