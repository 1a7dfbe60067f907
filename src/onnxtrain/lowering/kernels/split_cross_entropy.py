"""Expand cross-entropy into fewer nodes than ONNX Runtime would.

ONNX Runtime has no kernel for SoftmaxCrossEntropyLoss. It inlines the operator's body when a session is created,
optimizes the whole graph again, and removes two transpositions: a quarter of the creation time for a step graph of
5,000 nodes. The body also holds two arrays of the logits' size while it runs: 206 MB each for a language model with
50,257 tokens and a batch of 8 x 128. The nodes emitted here have bit-identical results for logits [rows, classes].
Only in graphs for native kernels, like other passes that save time and memory.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import Value

LEAST_CLASSES = 4096
"""With fewer classes, logits are small compared to the layers' activations, and a weighted loss is not expanded."""

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def split_cross_entropy(graph: ir.Graph) -> None:
    """Write SoftmaxCrossEntropyLoss as LogSoftmax and a selection of the labels' terms, in place.

    This is the standard's definition. With class weights or a label to ignore, NegativeLogLikelihoodLoss selects, where
    there are many classes or many rows (pixels). Left alone are weighted losses over few classes of [rows, classes].

    Requires: a sorted graph with types. Ensures: the same.
    """
    for node in list(graph):
        x = _logits(node)
        plain = len(node.inputs) == 2 and "ignore_index" not in node.attributes
        if x is None or not (plain or _is_large(x)):
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        op.scope = node.name or "loss"
        labels, *weights = [op.wrap(value) for value in node.inputs[1:] if value is not None]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        log_probability = op.LogSoftmax(op.wrap(x), axis=1)
        if plain:
            loss = _picked(op, log_probability, labels, attributes.get("reduction", "mean"))
        else:
            loss = op.NegativeLogLikelihoodLoss(log_probability, labels, *weights, **attributes)
        news = [loss.ir, log_probability.ir][: len(node.outputs)]
        for old, new in zip(node.outputs, news, strict=True):
            new.type, new.shape = x.type, old.shape
        log_probability.ir.shape = x.shape
        take_over(graph, dict(zip(node.outputs, news, strict=True)))
        remove_nodes(graph, [node])


def _picked(op: Builder, log_probability: Value, labels: Value, reduction: str) -> Value:
    """Return the loss [rows, ...], or its mean or sum: minus the log probability of each row's label."""
    terms = op.Neg(op.GatherElements(log_probability, op.Unsqueeze(labels, [1]), axis=1))
    terms = op.Squeeze(terms, [1])
    if reduction == "none":
        return terms
    return op.ReduceMean(terms, keepdims=0) if reduction == "mean" else op.ReduceSum(terms, keepdims=0)


def _logits(node: ir.Node) -> ir.Value | None:
    """Return the logits [rows, classes, ...] of a loss."""
    if node.domain or node.op_type != "SoftmaxCrossEntropyLoss":
        return None
    x = node.inputs[0]
    if x is None or x.dtype not in _TYPES or x.shape is None or len(x.shape) < 2:
        return None
    return x


def _is_large(x: ir.Value) -> bool:
    assert x.shape is not None
    classes = x.shape[1]
    return len(x.shape) > 2 or (isinstance(classes, int) and classes >= LEAST_CLASSES)
