"""Quantized values: the scale has a gradient, the integers have none."""

from __future__ import annotations

import numpy as np

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import count_to, size_of
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value
from onnxtrain.graph.limits import fits


@register_gradient("DequantizeLinear", since=13)
def dequantize(node: Node, dy: Value) -> Gradients:
    """y = (x - zero_point) s: ds = sum dy (x - zero_point) over the elements that share the scale."""
    op, scale = node.op, node.input_required(1)
    attributes = {
        name: node.attribute(name) for name in ("axis", "block_size", "output_dtype") if name in node.ir.attributes
    }
    # With a scale of one the operator itself gives x - zero_point, for every layout of the scale.
    steps = op.DequantizeLinear(node.x, op.ones_like(scale), node.input(2), **attributes)
    steps.ir.dtype = dy.dtype
    products = op.cast(dy * steps.with_shape(node.y.shape), scale.dtype)
    return None, sum_like_scale(node, products), None


def along_input(node: Node, value: Value) -> Value:
    """A scale or zero point laid out so that it broadcasts along the node's first input."""
    op, block = node.op, int(node.attribute("block_size", 0))
    if not block and (value.rank == 0 or value.shape == (1,)):
        return value
    rank = node.rank()
    axis = int(node.attribute("axis", 1)) % rank
    if block:
        return op.Gather(value, _block_of_each(node, axis, block), axis=axis).with_shape(node.x.shape)
    return op.reshape(value, [*[1] * axis, -1, *[1] * (rank - 1 - axis)])


def _block_of_each(node: Node, axis: int, block: int) -> Value:
    """The block of every index along the axis."""
    op, shape = node.op, node.x.shape
    size = None if shape is None else shape[axis]
    if isinstance(size, int) and fits(size):
        return op.constant(np.arange(size) // block, np.int64)
    return count_to(op, size_of(node.x, axis)) / op.constant(block, np.int64)


def sum_like_scale(node: Node, products: Value) -> Value:
    """Sum over the elements that share a scale, into the shape of the scale (the node's second input)."""
    op, scale = node.op, node.input_required(1)
    if node.attribute("block_size", 0):
        return _sum_blocks(node, products)
    if scale.rank == 0 or scale.shape == (1,):
        return op.reshape_like(op.ReduceSum(products, keepdims=0), scale)
    rank = node.rank()
    axis = int(node.attribute("axis", 1)) % rank
    if scale.shape is not None and isinstance(scale.shape[0], int):
        others = op.ints(*(a for a in range(rank) if a != axis))
        return op.ReduceSum(products, others, keepdims=0, noop_with_empty_axes=1)
    # One scale or one per index of the axis: that is, as many as fit when it is broadcast along the axis.
    sizes = op.Concat(
        *(op.ints(1) for _ in range(axis)),
        op.Shape(op.reshape(scale, [-1])),
        *(op.ints(1) for _ in range(axis + 1, rank)),
        axis=0,
    )
    return op.reshape_like(op.reduce_to(products, op.reshape(scale, sizes)), scale)


def _sum_blocks(node: Node, products: Value) -> Value:
    """Sum runs of ``block_size`` elements along the axis; the last may be shorter."""
    op, scale, block = node.op, node.input_required(1), int(node.attribute("block_size"))
    rank = node.rank()
    axis = int(node.attribute("axis", 1)) % rank
    blocks = op.dimension(scale, axis)
    rest = blocks * block - op.dimension(node.x, axis)
    padded = op.Pad(products, op.Concat(op.ints(0), rest, axis=0), None, op.ints(axis))
    before = [op.dimension(node.x, a) for a in range(axis)]
    after = [op.dimension(node.x, a) for a in range(axis + 1, rank)]
    split = op.reshape(padded, op.Concat(*before, blocks, op.ints(block), *after, axis=0))
    return op.ReduceSum(split, op.ints(axis + 1), keepdims=0)
