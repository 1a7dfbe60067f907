"""Compute the logits of a language model only where a label is compared.

A training on the answers of chats, or on padded batches, ignores the labels of many rows. The last layer has as many
columns as there are tokens, so that these rows take a large part of a step and of its memory.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.replace import take_over
from onnxtrain.graph.value import dimensions
from onnxtrain.lowering.fuse.patterns import is_needed, named_by_gradients, remove_unread
from onnxtrain.lowering.logit_head import LogitHead, as_rows, find_head

LEAST_CLASSES = 256
"""With fewer classes, selecting rows may take longer than computing their logits."""


def skip_ignored_rows(graph: ir.Graph) -> None:
    """Select the rows whose labels count in front of the layer that computes their logits, in place.

    For SoftmaxCrossEntropyLoss with a label to ignore: L(x W, t) = L(x[k] W, t[k]) with k the rows whose label counts;
    a loss by row is 0 elsewhere. Left alone are logits that anything else reads, and those of few classes. The values
    are the same to rounding.

    Requires: a sorted graph with shapes, whose gradients are not built. Ensures: a sorted graph; the new nodes are
    where the loss was, and its node keeps its name.
    """
    named = named_by_gradients(graph)
    for node in list(graph):
        head = _head(node, named)
        if head is None:
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        op.scope = node.name or "loss"
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        labels, *weights = [op.wrap(value) for value in node.inputs[1:] if value is not None]
        count = f"{op.scope} rows"
        kept = _kept(op, labels, attributes["ignore_index"]).with_shape((count,))
        taken = {}
        for value in head.rows:
            rows = as_rows(op, op.wrap(value))
            taken[value] = op.Gather(rows, kept, axis=0).with_shape((count, *(rows.shape or ())[1:]))
        logits = head.emit(op, taken, count)
        of_kept = op.Gather(labels, kept, axis=0).with_shape((count,))
        loss = op.several(node.op_type, logits, of_kept, *weights, outputs=1, **attributes)[0]
        op.emitted[-1].name = node.name
        if attributes.get("reduction") == "none":
            loss = loss.with_shape((count,))
            (loss,) = emit(
                op, "GatherGradient", loss, kept, op.shape_of(labels), like=[op.wrap(node.outputs[0])], axis=0
            )
        take_over(graph, {node.outputs[0]: loss.ir})
        remove_unread(graph, [node], named)


def _kept(op: Builder, labels: Value, ignored: int) -> Value:
    """Emit the indices of the rows that count, and of the first, since ONNX Runtime has no loss of no rows."""
    compared = op.Not(op.Equal(labels, op.scalar(ignored, labels)))
    others = op.Slice(compared, op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(0))
    return op.reshape(op.NonZero(op.Concat(op.constant([True], np.bool_), others, axis=0)), [-1], known=(None,))


def _head(node: ir.Node, named: set[str]) -> LogitHead | None:
    """Return the nodes that compute many logits by row for this loss alone, if its labels may be ignored."""
    if node.domain or node.op_type != "SoftmaxCrossEntropyLoss" or "ignore_index" not in node.attributes:
        return None
    logits, labels = node.inputs[:2]
    if logits is None or labels is None or labels.shape is None or len(labels.shape) != 1:
        return None
    if any(output.uses() or is_needed(output, named) for output in node.outputs[1:]):
        return None
    classes = (dimensions(logits) or (None,))[-1]
    if not isinstance(classes, int) or classes < LEAST_CLASSES or logits.dtype not in KERNEL_TYPES:
        return None
    head = find_head(logits)
    if head is None or not head.rows:
        return None
    own = {node, *head.nodes}
    outputs = [output for inner in head.nodes for output in inner.outputs]
    alone = all(reader in own for output in outputs for reader, _ in output.uses())
    return head if alone and not any(is_needed(output, named) for output in outputs) else None
