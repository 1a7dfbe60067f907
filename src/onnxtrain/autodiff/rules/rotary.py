"""Rotary embedding of ONNX and ONNX Runtime: a rotation by the angle of each position; dx is the inverse one of dy."""

from __future__ import annotations

from onnxtrain.autodiff.fused import register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import LAST, as_value, count_to, multiply, size_of
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules.microsoft import DOMAIN, in_single_precision, refuse
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


@register_gradient("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding_of_microsoft(node: Node, dy: Value) -> Gradients:
    """y = R x: dx = Rᵀ dy, a rotation by the opposite angles; cosines and sines as in ONNX's RotaryEmbedding."""
    op, positions = node.op, node.input_required(1)
    refuse(node, bool(node.attribute("is_packed_batching", 0)), "a packed batch")
    caches = node.input_required(2), node.input_required(3)
    given = dy.with_shape(dy.shape or node.x.shape), positions, caches[0], -caches[1]
    (dx,) = op.several("RotaryEmbedding", *given, outputs=1, domain=DOMAIN, **node.attributes())
    dx.ir.dtype = dy.dtype
    dx.with_shape(node.x.shape)
    if not any(map(node.wants, caches)):
        return dx, None, None, None
    x, change = _divided(node, node.x), _divided(node, dy)
    every = op.Expand(_every_position(node), op.Concat(op.dimension(x, 0), op.ints(1), axis=0))  # [b, s]
    interleaved = bool(node.attribute("interleaved", 0))
    return dx, None, *cache_gradients(x, change, every, caches, 1 if node.rank() == 4 else 2, interleaved)


@register_fused("RotaryEmbedding", domain=DOMAIN, has_kernel=in_single_precision)
def rotary_embedding_body(node: Node) -> list[Value | None]:
    """y = pairs of x, rotated by the angles of their positions; x is [b, s, heads n] or [b, heads, s, n]."""
    op, x, divided = node.op, node.x, node.rank() == 4
    refuse(node, bool(node.attribute("is_packed_batching", 0)), "a packed batch")
    caches = node.input_required(2), node.input_required(3)
    interleaved = bool(node.attribute("interleaved", 0))
    y = rotated_at(_divided(node, x), _every_position(node), caches, 1 if divided else 2, interleaved)
    return [(y if divided else op.Reshape(y, op.Shape(x))).with_shape(x.shape)]


def _every_position(node: Node) -> Value:
    """The rows of the caches that a rotary embedding reads, [b, s], or [1, s] where only the first is given."""
    op, positions = node.op, node.input_required(1)
    if node.rank(positions) > 1:
        return positions
    counted = count_to(op, size_of(node.x, 2 if node.rank() == 4 else 1))
    return op.Unsqueeze(op.Add(positions, counted), op.ints(0))


def _divided(node: Node, value: Value) -> Value:
    """Give a value in the shape of a rotary embedding's x an axis of the heads."""
    if node.rank() == 4:
        return value
    op, heads = node.op, int(node.attribute("num_heads", 0))
    width = op.dimension(node.input_required(2), 1)
    size = op.ints(-1) if node.attribute("rotary_embedding_dim", 0) else op.Add(width, width)
    return op.Reshape(value, op.Concat(op.ints(0, 0, heads or -1), size, axis=0))


def rotated_at(x: Value, positions: Value, caches: tuple[Value, Value], heads: int, interleaved: bool) -> Value:
    """Rotate pairs of the last of four axes of x by the angles of positions [b or 1, s], as far as the caches reach.

    The heads of x lie along axis 1 or 2. The elements of a pair are neighbours (``interleaved``) or in opposite halves.
    """
    op, width = x.op, multiply(size_of(caches[0], -1), 2)
    cosines, sines = (op.Unsqueeze(op.Gather(cache, positions), op.ints(heads)) for cache in caches)
    a, b = _pairs(x, caches[0], interleaved)
    made = a * cosines - b * sines, b * cosines + a * sines
    if interleaved:
        columns = [op.Unsqueeze(part, op.ints(-1)) for part in made]
        turned = op.Reshape(op.Concat(*columns, axis=-1), op.ints(0, 0, 0, -1))
    else:
        turned = op.Concat(*made, axis=-1)
    if isinstance(width, int) and x.shape is not None and x.shape[-1] == width:
        return turned
    rest = op.Slice(x, as_value(op, width), op.ints(LAST), op.ints(-1))
    return op.Concat(turned, rest, axis=-1)


def cache_gradients(
    x: Value, dy: Value, positions: Value | None, caches: tuple[Value, Value], heads: int, interleaved: bool
) -> tuple[Value, Value]:
    """The gradients of cosines and sines from x, dy and the rows of the caches that were read [b, s], if not all."""
    op = x.op
    (a, b), (da, db) = (_pairs(part, caches[0], interleaved) for part in (x, dy))
    changes = (op.ReduceSum(change, op.ints(heads), keepdims=0) for change in (a * da + b * db, a * db - b * da))
    dcosines, dsines = (_gathered_back(change, cache, positions) for change, cache in zip(changes, caches, strict=True))
    return dcosines, dsines


def _pairs(x: Value, cosines: Value, interleaved: bool) -> tuple[Value, Value]:
    """The elements of all rotated pairs of x, which has four axes: first and second ones."""
    op, size = x.op, size_of(cosines, -1)
    half, width, last = as_value(op, size), as_value(op, multiply(size, 2)), op.ints(-1)
    if interleaved:
        return op.Slice(x, op.ints(0), width, last, op.ints(2)), op.Slice(x, op.ints(1), width, last, op.ints(2))
    return op.Slice(x, op.ints(0), half, last), op.Slice(x, half, width, last)


def _gathered_back(change: Value, cache: Value, positions: Value | None) -> Value:
    """The gradient of a cache from the gradient of the rows that positions choose."""
    op = change.op
    if positions is None:
        return change
    rows = op.Unsqueeze(positions, op.ints(2))
    return op.ScatterND(op.zeros_like(cache), rows, change, reduction="add")
