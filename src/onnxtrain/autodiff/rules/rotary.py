"""Rotary embedding: a rotation by the angle of each position; the gradient is the inverse rotation of dy."""

from __future__ import annotations

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value


@register_gradient("RotaryEmbedding", since=23)
def rotary_embedding(node: Node, dy: Value) -> Gradients:
    """y = R x with R the rotations by given cosines and sines, pair by pair of the elements of x: dx = Rᵀ dy.

    For a pair (a, b) of x and (da, db) of dy: dcos = sum a da + b db, dsin = sum a db - b da, over the heads and
    over all tokens with the same position.
    """
    op, cosines, sines, positions = node.op, node.input_required(1), node.input_required(2), node.input(3)
    dx = op.RotaryEmbedding(dy, cosines, -sines, positions, **node.attributes())
    if not node.wants(cosines) and not node.wants(sines):
        return dx, None, None, None
    divided = node.rank() == 4
    x, dy = (
        part if divided else op.Reshape(part, op.ints(0, 0, int(node.attribute("num_heads")), -1))
        for part in (node.x, dy)
    )
    interleaved = bool(node.attribute("interleaved", 0))
    dcosines, dsines = cache_gradients(x, dy, positions, (cosines, sines), 1 if divided else 2, interleaved)
    return dx, dcosines, dsines, None


def cache_gradients(
    x: Value, dy: Value, positions: Value | None, caches: tuple[Value, Value], heads: int, interleaved: bool
) -> tuple[Value, Value]:
    """The gradients of cosines and sines.

    Args:
        x: The rotated vectors, with the heads along axis 1 or 2 and the positions along the other one.
        dy: The gradient of the result, of x's shape.
        positions: The rows of the caches that were read, [b, s]; ``None`` where the caches are [b, s, n] themselves.
        caches: Cosines and sines.
        heads: The axis of the heads.
        interleaved: True if the elements of a pair are neighbours, not in opposite halves.
    """
    op = x.op
    (a, b), (da, db) = (_pairs(part, caches[0], interleaved) for part in (x, dy))
    changes = (op.ReduceSum(change, op.ints(heads), keepdims=0) for change in (a * da + b * db, a * db - b * da))
    dcosines, dsines = (_gathered_back(change, cache, positions) for change, cache in zip(changes, caches, strict=True))
    return dcosines, dsines


def _pairs(x: Value, cosines: Value, interleaved: bool) -> tuple[Value, Value]:
    """The elements of all rotated pairs of x, which has four axes: first and second ones."""
    op = x.op
    half = op.dimension(cosines, -1)
    last = op.ints(-1)
    if interleaved:
        width = op.Add(half, half)
        return op.Slice(x, op.ints(0), width, last, op.ints(2)), op.Slice(x, op.ints(1), width, last, op.ints(2))
    return op.Slice(x, op.ints(0), half, last), op.Slice(x, half, op.Add(half, half), last)


def _gathered_back(change: Value, cache: Value, positions: Value | None) -> Value:
    """The gradient of a cache from the gradient of the rows that positions choose."""
    op = change.op
    if positions is None:
        return change
    rows = op.Unsqueeze(positions, op.ints(2))
    return op.ScatterND(op.zeros_like(cache), rows, change, reduction="add")
