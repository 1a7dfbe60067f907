"""Cross-entropy over many classes in two steps, with fewer copies of the logits.

ONNX Runtime's SoftmaxCrossEntropyLoss holds, beside the logits and their log-probabilities, two arrays of that size
while it runs: of a language model with 50,257 words and a batch of 8 x 128 tokens, 206 MB each. LogSoftmax holds
neither, and takes less time. In graphs for native kernels only, as other passes that look at memory.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.replace import remove_nodes, take_over

LEAST_CLASSES = 4096
"""Of fewer classes, logits are small beside what the layers below keep."""

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def split_cross_entropy(graph: ir.Graph) -> None:
    """Write SoftmaxCrossEntropyLoss over many classes as LogSoftmax and NegativeLogLikelihoodLoss, in place.

    So the standard defines it. Left alone are logits that are not [rows, classes], and those of few classes.

    Requires: a sorted graph with types. Ensures: the same.
    """
    for node in list(graph):
        x = _large_logits(node)
        if x is None:
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        op.scope = node.name or "loss"
        others = [op.wrap(value) for value in node.inputs[1:] if value is not None]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        log_probability = op.LogSoftmax(op.wrap(x), axis=1)
        loss = op.NegativeLogLikelihoodLoss(log_probability, *others, **attributes)
        news = [loss.ir, log_probability.ir][: len(node.outputs)]
        for old, new in zip(node.outputs, news, strict=True):
            new.type, new.shape = x.type, old.shape
        log_probability.ir.shape = x.shape
        take_over(graph, dict(zip(node.outputs, news, strict=True)))
        remove_nodes(graph, [node])


def _large_logits(node: ir.Node) -> ir.Value | None:
    """The logits [rows, classes] of a loss over many classes."""
    if node.domain or node.op_type != "SoftmaxCrossEntropyLoss":
        return None
    x = node.inputs[0]
    if x is None or x.dtype not in _TYPES or x.shape is None or len(x.shape) != 2:
        return None
    classes = x.shape[1]
    return x if isinstance(classes, int) and classes >= LEAST_CLASSES else None
