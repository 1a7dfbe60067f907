"""ONNX's Attention: heads of queries, keys and values belong together."""

from __future__ import annotations

import numpy as np

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule


@axes_of("Attention")
def attention(node: Node) -> list[list[Axis]]:
    """Y = softmax(Q K^T) V per head, with heads as an axis or inside the last one."""
    reason = f"{node.describe()} keeps it"
    apart = node.rank(0) == 4
    if len([value for value in node.ir.outputs if value.name]) > 1 or node.has(4) or node.has(5):
        return [[fixed(f"{node.describe()} has a cache") for _ in value.shape or ()] for value in node.ir.outputs]
    if apart:
        heads = [node.positions(index, 1) for index in range(3)]
        counts = [size if isinstance(size, int) else 0 for size in (node.shape(index)[1] for index in range(3))]
    else:
        counts = [node.attribute("q_num_heads"), *[node.attribute("kv_num_heads")] * 2]
        heads = []
        for index, count in enumerate(counts):
            packed = node.positions(index, 2)
            heads.append(
                packed if packed.labels is None else packed.taken(node.unite(packed.labels.reshape(count, -1)))
            )
    if node.has(3) and node.rank(3) == 4 and node.shape(3)[1] != 1:
        for axis in heads:
            node.fix(axis, f"{node.describe()} has a mask per head")
    query = heads[0]
    if any(axis.labels is None for axis in heads):
        joined = node.join(*heads) if counts[0] == counts[1] else query
        for axis in heads:
            node.fix(axis, joined.reason or reason)
        query = fixed(joined.reason or reason)
    else:
        repeats = counts[0] // counts[1]
        own, values = heads[1].labels, heads[2].labels
        assert own is not None
        assert values is not None
        node.join(query, Axis(np.repeat(own, repeats)), Axis(np.repeat(values, repeats)))
        node.tag(query, "heads")
        if not apart:
            node.on_cut(lambda cut: cut.set_attribute(node.ir, "q_num_heads", cut.count(heads[0])))
            node.on_cut(lambda cut: cut.set_attribute(node.ir, "kv_num_heads", cut.count(heads[1])))
    batch = node.axis(0, 0)
    if apart:
        return [[batch, query.with_zero(heads[2].zero), fixed(reason), fixed(reason)]]
    width = node.output_shape()[2]
    if query.labels is None or not isinstance(width, int):
        return [[batch, fixed(reason), fixed(query.reason or reason)]]
    labels = np.repeat(query.labels, width // counts[0])
    return [[batch, fixed(reason), Axis(labels, zero=node.axis(2, 2).zero)]]


no_rule(
    "Attention",
    "PackedAttention",
    "Linear",
    domain=ONNXTRAIN_DOMAIN,
    reason="it is a part of training graphs, not of model files",
)
