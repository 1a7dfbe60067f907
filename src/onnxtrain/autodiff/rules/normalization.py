"""Normalization by statistics of a batch, an image, a group of channels or the last axes.

All share: x̂ = (x - mean) r with r = 1 / sqrt(var + ε), and for a gradient g of x̂
dx = r (g - mean(g) - x̂ mean(g x̂)).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.rules.activation import FUSED_ACTIVATIONS
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import HALVES, dimensions


@register_gradient("BatchNormalization")
def batch_normalization(node: Node, dy: Value, *_running: Value | None) -> Gradients:
    """y = scale x̂ + b: dscale = Σ dy x̂, db = Σ dy per channel; dx = scale r dy with given statistics.

    With training_mode the statistics are the batch's own and dx is the formula above; the running statistics, then
    outputs, carry no gradient.
    """
    op, x, scale = node.op, node.x, node.input_required(1)
    epsilon = node.attribute("epsilon", 1e-5)
    like = [x, scale, scale]
    if node.attribute("training_mode", 0):
        return *emit(op, "BatchNormalizationGradient", dy, x, scale, like=like, epsilon=epsilon), None, None
    mean, variance = node.input_required(3), node.input_required(4)
    inputs = (dy, x, scale, mean, variance)
    dx, dscale, db = emit(op, "BatchNormalizationGradient", *inputs, like=like, epsilon=epsilon)
    factor = op.cast(scale, variance.dtype) * _inverse_root(variance + epsilon)
    dmean = -(factor * op.cast(db, factor.dtype))
    wide = op.cast(dscale, factor.dtype) * op.cast(scale, factor.dtype)
    dvariance = wide * -0.5 / (variance + epsilon)
    return dx, dscale, db, dmean, dvariance


def _one_type(node: ir.Node) -> bool:
    """Return whether all inputs have one type, which kernels need."""
    return len({value.dtype for value in node.inputs if value is not None}) == 1


@register_fused("BatchNormalizationGradient", has_kernel=_one_type)
def batch_normalization_gradient(node: Node) -> Sequence[Value]:
    """From dy, x, scale, and optionally mean and variance (else the batch's own): dx, dscale, db.

    With ``training_mode`` the statistics are the batch's own and [2, channels]. With ``activation`` dy is the gradient
    of the activation's result, which bias is read for, and which follows the other outputs. The seventh input, another
    term of the gradient by x, is added to dx; it may have more channels, behind those of x.
    """
    op, scale, mean, variance = node.op, node.input_required(2), node.input(3), node.input(4)
    dy, given = node.x, node.input_required(1)
    x = given
    if x.rank is None:
        x, dy = flat_images(x), flat_images(dy)
    rank = x.rank or 3
    axes = [0, *range(2, rank)]
    epsilon = node.attribute("epsilon", 1e-5)
    if mean is None or variance is None or node.attribute("training_mode", 0):
        again: list[Value] = []
        if (bias := node.input(5)) is not None:
            centred, inverse = standardize(x, op.ints(*axes), epsilon)
            n = centred * inverse * column(op, scale, rank) + column(op, bias, rank)
            y = n
            if (name := node.attribute("activation", "")) in FUSED_ACTIVATIONS:
                result, slope = FUSED_ACTIVATIONS[name]
                y, dy = result(node, n), slope(node, dy, n)
            again = [image_like(y, given)]
        dx, dscale, db = _per_channel(op, x, dy, scale, axes, epsilon)
        channels = op.ints(-1)
        dscale = op.Reshape(dscale, channels).with_shape(scale.shape)
        dx = _with_first_channels(node, image_like(dx, given))
        return dx, dscale, op.Reshape(db, channels).with_shape(scale.shape), *again
    factor = op.cast(scale, variance.dtype) * _inverse_root(variance + epsilon)
    dx = dy * op.cast(column(op, factor, rank), dy.dtype)
    ones, zeros = op.ones_like(scale), op.zeros_like(scale)
    normalized = op.BatchNormalization(x, ones, zeros, mean, variance, epsilon=epsilon)
    dscale = op.cast(op.ReduceSum(dy * normalized, op.ints(*axes), keepdims=0), scale.dtype)
    db = op.cast(op.ReduceSum(dy, op.ints(*axes), keepdims=0), scale.dtype)
    return _with_first_channels(node, image_like(dx, given)), dscale, db


def _with_first_channels(node: Node, dx: Value) -> Value:
    """The gradient, and the first channels of the other term in an optional input."""
    op, other = node.op, node.input(6)
    if other is None:
        return dx
    count = op.Slice(op.Shape(dx), op.ints(1), op.ints(2))
    return op.Slice(other, op.ints(0), count, op.ints(1)).with_shape(dx.shape) + dx


def flat_images(x: Value) -> Value:
    """Reshape to [batch, channels, pixels], from any rank."""
    return x.op.Reshape(x, x.op.ints(0, 0, -1)).with_shape((None, None, None))


def image_like(dx: Value, x: Value) -> Value:
    """Undo :func:`flat_images` where x has an unknown rank."""
    return dx.op.reshape_like(dx, x) if x.rank is None else dx


def column(op: Builder, per_channel: Value, rank: int) -> Value:
    """Reshape [channels] to [channels, 1, ...], which broadcasts over an image."""
    return op.Unsqueeze(per_channel, op.ints(*range(1, rank - 1))) if rank > 2 else per_channel


def _inverse_root(value: Value) -> Value:
    return value.op.Reciprocal(value.op.Sqrt(value))


def standardize(x: Value, over: Value, epsilon: float) -> tuple[Value, Value]:
    """Return x minus its mean, and 1 / sqrt(var + ε)."""
    op = x.op
    centred = x - op.ReduceMean(x, over, keepdims=1)
    return centred, _inverse_root(op.ReduceMean(centred * centred, over, keepdims=1) + epsilon)


def _per_channel(
    op: Builder, x: Value, dy: Value, scale: Value, axes: Sequence[int], epsilon: float
) -> tuple[Value, Value, Value]:
    """dx, Σ dy x̂ and Σ dy over the axes of the statistics, along which scale is constant."""
    assert x.rank is not None
    over, count = op.ints(*axes), op.count(x, axes)
    centred, inverse = standardize(x, over, epsilon)
    db = op.ReduceSum(dy, over, keepdims=1)
    products = op.ReduceSum(dy * centred, over, keepdims=1)
    slope = products * inverse * inverse / count
    factor = op.cast(column(op, scale, x.rank), x.dtype) * inverse
    dx = (dy - db / count - centred * slope) * factor
    return dx, op.cast(products * inverse, scale.dtype), op.cast(db, scale.dtype)


@register_gradient("InstanceNormalization")
def instance_normalization(node: Node, dy: Value) -> Gradients:
    """y = scale x̂ + b, statistics per image and channel: dscale = Σ dy x̂, db = Σ dy, dx as above."""
    op, x, scale = node.op, node.x, node.input_required(1)
    images, dy = (flat_images(x), flat_images(dy)) if x.rank is None else (x, dy)
    axes = range(2, x.rank or 3)
    dx, dscale, db = _per_channel(op, images, dy, scale, axes, node.attribute("epsilon", 1e-5))
    over = op.ints(0, *axes)
    return (
        image_like(dx, x),
        op.ReduceSum(dscale, over, keepdims=0),
        op.ReduceSum(db, over, keepdims=0),
    )


@register_gradient("LayerNormalization")
def layer_normalization(node: Node, dy: Value, dmean: Value | None = None, dinverse: Value | None = None) -> Gradients:
    """y = scale x̂ + b: dscale = Σ dy x̂, db = Σ dy, dx = r (g - mean(g) - x̂ mean(g x̂)) with g = scale dy.

    A gradient of the output Mean adds dmean / n to dx, one of InvStdDev (which is r) -dr r³ (x - mean) / n.
    """
    op, scale, bias = node.op, node.input_required(1), node.input(2)
    axes, epsilon = _normalized_axes(node), node.attribute("epsilon", 1e-5)
    like, settings = [node.x, scale, scale], {"axis": axes.start, "epsilon": epsilon}
    dx, dscale, db = emit(op, "LayerNormalizationGradient", dy, node.x, scale, like=like, **settings)
    x, over = _wide(node.x), op.ints(*axes)
    if dmean is not None and node.arrives(1):
        dx = dx + op.cast(op.cast(dmean, x.dtype) / op.count(x, axes), dx.dtype)
    if dinverse is not None and node.arrives(2):
        centred, inverse = standardize(x, over, epsilon)
        share = op.cast(dinverse, x.dtype) * inverse * inverse * inverse / op.count(x, axes)
        dx = dx - op.cast(centred * share, dx.dtype)
    if bias is None:
        return dx, dscale, None
    alike = bias.static_shape is not None and bias.static_shape == scale.static_shape
    return dx, dscale, db if alike else _sum_to(_wide(dy), bias)


def _sum_to(value: Value, like: Value) -> Value:
    """Sum over the axes along which ``like`` was broadcast, and cast to its type."""
    return value.op.cast(value.op.reduce_to(value, like), like.dtype)


def _scales_each_element(node: ir.Node) -> bool:
    """Return whether the scale has exactly the normalized shape, and all have one type, as kernels need."""
    x, scale = node.inputs[1], node.inputs[2]
    if not _one_type(node) or x is None or scale is None or x.shape is None or scale.shape is None:
        return False
    sizes, axis = dimensions(x), node.attributes["axis"].as_int()
    return sizes is not None and None not in sizes[axis:] and sizes[axis:] == dimensions(scale)


@register_fused("LayerNormalizationGradient", has_kernel=_scales_each_element)
def layer_normalization_gradient(node: Node) -> Sequence[Value]:
    """From dy, x, scale, over the axes from ``axis``, counted from the end: dx, dscale, and db of scale's shape."""
    op, scale, axis = node.op, node.input_required(2), node.attribute("axis")
    dy, x = _wide(node.x), _wide(node.input_required(1))
    over = op.ints(*range(axis, 0))
    normalized, inverse = _standardized(x, scale, over, axis, node.attribute("epsilon"))
    dx = _through_statistics(dy * _wide(scale), normalized, inverse, over)
    return op.cast(dx, node.input_required(1).dtype), _sum_to(dy * normalized, scale), _sum_to(dy, scale)


def _wide(value: Value) -> Value:
    """Cast half precision to float32, in which the operators themselves compute."""
    return value.op.cast(value, ir.DataType.FLOAT) if value.dtype in HALVES else value


def _normalized_axes(node: Node) -> range:
    """The axes from ``axis`` to the last, counted from the end."""
    axis = node.attribute("axis", -1)
    return range(axis if axis < 0 else axis - node.rank(), 0)


def _through_statistics(g: Value, normalized: Value, inverse: Value, over: Value) -> Value:
    """r (g - mean(g) - x̂ mean(g x̂))."""
    op, slope = g.op, g.op.ReduceMean(g * normalized, over, keepdims=1)
    return (g - op.ReduceMean(g, over, keepdims=1) - normalized * slope) * inverse


def _standardized(x: Value, scale: Value, over: Value, axis: int, epsilon: float) -> tuple[Value, Value]:
    """x̂ and r: from one node, or (in double precision) step by step."""
    op = x.op
    if x.dtype == ir.DataType.FLOAT:
        ones = op.ones_like(_wide(scale))
        made = op.several("LayerNormalization", x, ones, outputs=3, axis=axis, epsilon=epsilon)
        made[2].ir.dtype = x.dtype
        statistics = None if x.shape is None else (*x.shape[:axis], *[1] * -axis)
        return made[0].with_shape(x.shape), made[2].with_shape(statistics)
    centred, inverse = standardize(x, over, epsilon)
    return centred * inverse, inverse


@register_gradient("RMSNormalization")
def rms_normalization(node: Node, dy: Value) -> Gradients:
    """y = scale x r, r = 1 / sqrt(mean(x²) + ε): dx = r (g - x r mean(g x r)) with g = scale dy, dscale = Σ dy x r."""
    scale, settings = node.input_required(1), {"axis": _normalized_axes(node).start}
    settings["epsilon"] = node.attribute("epsilon", 1e-5)
    return emit(node.op, "RMSNormalizationGradient", dy, node.x, scale, like=[node.x, scale], **settings)


@register_fused("RMSNormalizationGradient", has_kernel=_scales_each_element)
def rms_normalization_gradient(node: Node) -> Sequence[Value]:
    """From dy, x, scale, over the axes from ``axis``, counted from the end: dx and dscale."""
    op, scale = node.op, node.input_required(2)
    dy, x = _wide(node.x), _wide(node.input_required(1))
    over = op.ints(*range(node.attribute("axis"), 0))
    inverse = _inverse_root(op.ReduceMean(x * x, over, keepdims=1) + node.attribute("epsilon"))
    normalized = x * inverse
    g = dy * _wide(scale)
    dx = (g - normalized * op.ReduceMean(g * normalized, over, keepdims=1)) * inverse
    return op.cast(dx, node.input_required(1).dtype), _sum_to(dy * normalized, scale)


@register_gradient("GroupNormalization")
def group_normalization(node: Node, dy: Value) -> Gradients:
    """y = scale x̂ + b, statistics per group of channels: dscale = Σ dy x̂, db = Σ dy, dx as above.

    scale and b are per group up to opset 20, per channel since.
    """
    op, scale, groups = node.op, node.input_required(1), node.attribute("num_groups")
    by_group, by_channel, last = op.ints(0, groups, -1), op.ints(0, 0, -1), op.ints(2)
    x, dy = op.Reshape(_wide(node.x), by_group), _wide(dy)
    # Elements that share one scale: [batch, groups or channels, elements].
    dy = op.Reshape(dy, by_group if op.opset < 21 else by_channel)
    centred, inverse = standardize(x, last, node.attribute("epsilon", 1e-5))
    normalized = centred * inverse
    g = op.Reshape(dy * op.Unsqueeze(_wide(scale), op.ints(1)), by_group)
    dx = _through_statistics(g, normalized, inverse, last)
    alike = normalized if op.opset < 21 else op.Reshape(normalized, op.Shape(dy))
    over = op.ints(0, 2)
    dscale = op.cast(op.ReduceSum(dy * alike, over, keepdims=0), scale.dtype)
    db = op.cast(op.ReduceSum(dy, over, keepdims=0), scale.dtype)
    return op.cast(op.reshape_like(dx, node.x), node.x.dtype), dscale, db


@register_gradient("MeanVarianceNormalization")
def mean_variance_normalization(node: Node, dy: Value) -> Gradients:
    """y = (x - mean) / t, t = std + 1e-9: dx = (dy - mean(dy) - (x - mean) mean(dy y) / std) / t."""
    op, over = node.op, node.op.ints(*node.attribute("axes", [0, 2, 3]))
    centred = node.x - op.ReduceMean(node.x, over, keepdims=1)
    deviation = op.Sqrt(op.ReduceMean(centred * centred, over, keepdims=1))
    # Where the deviation is zero so is x - mean; the smallest divisor keeps the quotient zero.
    slope = op.ReduceMean(dy * node.y, over, keepdims=1) / op.Max(deviation, op.scalar(1e-30, dy))
    return (dy - op.ReduceMean(dy, over, keepdims=1) - centred * slope) / (deviation + 1e-9)


@register_gradient("LpNormalization")
def lp_normalization(node: Node, dy: Value) -> Gradients:
    """y = x / n, n = ‖x‖ₚ: dx = (dy - s Σ dy y) / n with s = y for p = 2, sign(x) for p = 1; 0 where n = 0."""
    op, x, axis = node.op, node.x, node.op.ints(node.attribute("axis", -1))
    p = node.attribute("p", 2)
    norm = op.ReduceL2(x, axis, keepdims=1) if p == 2 else op.ReduceL1(x, axis, keepdims=1)
    direction = node.y if p == 2 else op.Sign(x)
    inverse = op.Where(op.Equal(norm, op.scalar(0, x)), op.scalar(0, x), op.Reciprocal(norm))
    return (dy - direction * op.ReduceSum(dy * node.y, axis, keepdims=1)) * inverse


@register_gradient("LRN")
def local_response_normalization(node: Node, dy: Value) -> Gradients:
    """y = x s^-β, s = bias + α mean of x² over near channels: dx = dy s^-β - 2 α β x mean(dy y / s).

    The second mean is over the channels whose windows contain x.
    """
    x = node.x
    base, power = local_response(node)
    scale: float = 2 * node.attribute("alpha", 1e-4) * node.attribute("beta", 0.75)
    return dy / power - x * _channel_means(node, dy * node.y / base, turned=True) * scale


def local_response(node: Node) -> tuple[Value, Value]:
    """LRN's s and s^β; a power takes ten times as long as roots."""
    op, x, beta = node.op, node.x, node.attribute("beta", 0.75)
    base = _channel_means(node, x * x) * node.attribute("alpha", 1e-4) + node.attribute("bias", 1.0)
    root = op.Sqrt(base).with_shape(x.shape)
    return base, root * op.Sqrt(root).with_shape(x.shape) if beta == 0.75 else op.Pow(base, op.scalar(beta, x))


def _channel_means(node: Node, value: Value, *, turned: bool = False) -> Value:
    """Means over windows of channels, with zeros beyond the first and the last."""
    op, size = node.op, node.attribute("size")
    pads = [(size - 1) // 2, 0, size // 2, 0]
    pads = pads[2:] + pads[:2] if turned else pads
    flat = op.Unsqueeze(op.Reshape(value, op.ints(0, 0, -1)), op.ints(1))
    shares = op.constant(np.full((1, 1, size, 1), 1 / size), value.dtype)
    return op.reshape_like(op.Conv(flat, shares, kernel_shape=[size, 1], pads=pads), value)
