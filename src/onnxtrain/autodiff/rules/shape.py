"""Operators that move whole tensors: reshaping, transposing, joining, repeating."""

from __future__ import annotations

import numpy as np

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import Size, joined, shaped, size_of
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value


@register_gradient("Reshape", "Flatten")
def reshape(node: Node, dy: Value) -> Gradients:
    """y = x in another shape: dx = dy in the shape of x."""
    return node.op.reshape_like(dy, node.x)


@register_gradient("Squeeze", since=13)
def squeeze(node: Node, dy: Value) -> Gradients:
    """y = x without axes of size 1: dx = dy with them."""
    axes = node.input(1)
    if axes is None:
        return node.op.reshape_like(dy, node.x)
    return node.op.Unsqueeze(dy, axes)


@register_gradient("Unsqueeze", since=13)
def unsqueeze(node: Node, dy: Value) -> Gradients:
    """y = x with new axes of size 1: dx = dy without them."""
    op, axes = node.op, node.input_required(1)
    # PyTorch's exporter writes a 0-d axis for grouped attention, which ONNX Runtime's Unsqueeze takes, but not Squeeze.
    constant = axes.constant()
    return op.Squeeze(dy, axes if constant is None else op.ints(*constant.reshape(-1).tolist()))


@register_gradient("Transpose")
def transpose(node: Node, dy: Value) -> Gradients:
    """y[i_p0, i_p1, ...] = x[i_0, i_1, ...]: dx = dy under the inverse permutation."""
    perm = node.attribute("perm")
    return node.op.Transpose(dy, perm=None if perm is None else np.argsort(perm).tolist())


@register_gradient("Concat")
def concat(node: Node, dy: Value) -> Gradients:
    """y = x_1, x_2, ... one after the other: dx_i = their parts of dy."""
    parts = [x for x in node.inputs if x is not None]
    if len(parts) == 1:
        return dy
    axis = node.attribute("axis")
    sizes = joined(node.op, [size_of(x, axis) for x in parts])
    return node.op.several("Split", dy, sizes, outputs=len(parts), axis=axis)


@register_gradient("Split", since=13)
def split(node: Node, *dys: Value) -> Gradients:
    """y_1, y_2, ... = consecutive parts of x: dx = dy_1, dy_2, ... one after the other."""
    return node.op.Concat(*dys, axis=node.attribute("axis", 0)) if len(dys) > 1 else dys[0]


@register_gradient("Tile")
def tile(node: Node, dy: Value) -> Gradients:
    """y = x repeated r_a times along each axis a: dx = dy [r_0, d_0, r_1, d_1, ...] summed over all r_a."""
    op, x, repeats = node.op, node.x, node.input_required(1)
    known = repeats.constant()
    if known is None or x.rank is None:
        column = op.ints(1)
        pairs = op.Concat(op.Unsqueeze(repeats, column), op.Unsqueeze(op.Shape(x), column), axis=1)
        apart = op.Reshape(dy, op.Reshape(pairs, op.ints(-1)), allowzero=1)
        zero, two = op.constant(0, np.int64), op.constant(2, np.int64)
        axes = op.Range(zero, op.Mul(op.Size(repeats), two), two)
        return op.ReduceSum(apart, axes, keepdims=0, noop_with_empty_axes=1)
    sizes: list[Size] = []
    summed = []
    for axis, count in enumerate(known.tolist()):
        if count != 1:
            summed.append(len(sizes))
            sizes.append(count)
        sizes.append(size_of(x, axis))
    if not summed:
        return dy
    return op.ReduceSum(shaped(dy, sizes), op.ints(*summed), keepdims=0)


@register_gradient("Expand", broadcasts=True)
def expand(node: Node, dy: Value) -> Gradients:
    """y = x broadcast to a shape: dx = dy summed over the repeated axes."""
    return dy


@register_gradient("DepthToSpace")
def depth_to_space(node: Node, dy: Value) -> Gradients:
    """y [n, c, h b, w b] = blocks of the channels of x [n, c b², h, w]: dx = the blocks of dy as channels."""
    op, block = node.op, node.attribute("blocksize")
    channels = op.SpaceToDepth(dy, blocksize=block)
    if node.attribute("mode", "DCR") == "DCR":
        return channels
    # SpaceToDepth gives [b b, c] as channels, CRD wants [c, b b].
    count, height, width = size_of(dy, 1), size_of(node.x, 2), size_of(node.x, 3)
    apart = shaped(channels, [size_of(node.x, 0), block * block, count, height, width])
    return op.reshape_like(op.Transpose(apart, perm=[0, 2, 1, 3, 4]), node.x)


@register_gradient("SpaceToDepth")
def space_to_depth(node: Node, dy: Value) -> Gradients:
    """y [n, b² c, h / b, w / b] = blocks of x [n, c, h, w] as channels: dx = DepthToSpace(dy)."""
    return node.op.DepthToSpace(dy, blocksize=node.attribute("blocksize"), mode="DCR")


@register_gradient("Trilu")
def trilu(node: Node, dy: Value) -> Gradients:
    """y = the upper or lower triangle of x: dx = that of dy."""
    return node.op.Trilu(dy, node.input(1), upper=node.attribute("upper"))


@register_gradient("ReverseSequence")
def reverse_sequence(node: Node, dy: Value) -> Gradients:
    """y = x with the first n_b steps of each sequence b reversed: dx = dy under the same reversal."""
    return node.op.ReverseSequence(dy, node.input_required(1), **node.attributes("batch_axis", "time_axis"))
