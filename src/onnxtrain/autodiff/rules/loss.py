"""The losses of ONNX over classes: negative log-likelihood, alone and after a softmax.

With x of shape (N, C, d...) and labels of shape (N, d...), every label has a coefficient: its class's weight
(0 where it is to be ignored) times dy, divided by the sum of all weights where the mean is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import flat_scatter
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value


class _Labels(NamedTuple):
    """The labels of a node, as tensors of shape (N, 1, d...)."""

    classes: Value
    counted: Value | None
    weight: Value | None


def _read_labels(node: Node) -> _Labels:
    op, weights, ignored = node.op, node.input(2), node.attribute("ignore_index")
    index = op.Unsqueeze(node.input_required(1), op.ints(1))
    counted = None
    if ignored is not None:
        skip = op.binary("Equal", index, ignored)
        counted = op.cast(op.Not(skip), node.x.dtype)
        index = op.Where(skip, op.scalar(0, index), index)
    if weights is None:
        return _Labels(index, counted, counted)
    weight = op.Gather(weights, index, axis=0).with_shape(index.shape)
    return _Labels(index, counted, weight if counted is None else weight * counted)


def _per_label(node: Node, dy: Value, labels: _Labels) -> tuple[Value, Value | None]:
    """dL/d(weighted term) per label, and the sum of weights where the mean divides by it."""
    op, reduction = node.op, node.attribute("reduction", "mean")
    if reduction == "none":
        return op.Unsqueeze(dy, op.ints(1)), None
    if reduction == "sum":
        return dy, None
    if labels.weight is None:
        total = op.count(node.input_required(1))
        known = total.constant()
        total = op.cast(total, dy.dtype) if known is None else op.scalar(known, dy)
    else:
        total = op.ReduceSum(labels.weight, keepdims=0)
    return dy / total, total


def _coefficient(node: Node, dy: Value, labels: _Labels) -> Value:
    share, _ = _per_label(node, dy, labels)
    return share if labels.weight is None else share * labels.weight


def _weights_gradient(node: Node, dy: Value, labels: _Labels, log_probability: Value) -> Value | None:
    """dw_c = sum over labels c of share (-log p_c), less the loss where the mean divides by the weights."""
    op, weights = node.op, node.input(2)
    if weights is None:
        return None
    share, total = _per_label(node, dy, labels)
    term = -op.GatherElements(log_probability, labels.classes, axis=1)
    if total is not None:
        term = term - node.y
    term = term * share if labels.counted is None else term * share * labels.counted
    return flat_scatter(weights, labels.classes, term)


@register_gradient("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy(node: Node, dy: Value, dlog: Value | None = None) -> Gradients:
    """y = reduce of -w_t log p_t, p = softmax(x): dx = (p - onehot(t)) w_t dy / normaliser.

    The gradient of the output log p adds dlog - p sum_c dlog_c. p = exp(log p) costs less than another softmax, and the
    loss computes log p in any case: where the node lacks this output, it is added.
    """
    op, x = node.op, node.x
    labels = _read_labels(node)
    log_probability = node.output_required(1, x.dtype, x.shape)
    index = op.cast(labels.classes, ir.DataType.INT64).with_shape(labels.classes.shape)
    coefficient = _coefficient(node, dy, labels)
    (dx,) = emit(op, "SoftmaxCrossEntropyGradient", coefficient, log_probability, index, like=[x])
    if dlog is not None and node.arrives(1):
        dx = dx + dlog - op.Exp(log_probability) * op.ReduceSum(dlog, op.ints(1), keepdims=1)
    return dx, None, _weights_gradient(node, dy, labels, log_probability)


@register_fused("SoftmaxCrossEntropyGradient")
def softmax_cross_entropy_gradient(node: Node) -> Sequence[Value]:
    """From dy by each label's term, (N, 1, d...) or one number, log p, and labels (N, 1, d...): (p - onehot(t)) dy."""
    op, dy, log_probability, index = node.op, node.x, node.input_required(1), node.input_required(2)
    minus_one = op.Expand(op.scalar(-1, log_probability), op.shape_of(index))
    difference = op.ScatterElements(op.Exp(log_probability), index, minus_one, axis=1, reduction="add")
    return [difference * dy]


@register_gradient("NegativeLogLikelihoodLoss", since=12)
def negative_log_likelihood(node: Node, dy: Value) -> Gradients:
    """y = reduce of -w_t x_t: dx = -onehot(t) w_t dy / normaliser."""
    op, x = node.op, node.x
    labels = _read_labels(node)
    minus = op.Expand(-_coefficient(node, dy, labels), op.shape_of(labels.classes))
    dx = op.ScatterElements(op.zeros_like(x), labels.classes, minus, axis=1)
    return dx, None, _weights_gradient(node, dy, labels, x)
