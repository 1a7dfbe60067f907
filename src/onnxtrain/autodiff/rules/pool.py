"""Pooling: maximum, average and Lp norm over windows and over whole images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import flat_scatter, joined, known_sizes, sizes_of
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.windows import Windows, attributes_fit, spatial_sizes, windows_of
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import check_table


@register_gradient("MaxPool")
def max_pool(node: Node, dy: Value, _indices: None = None) -> Gradients:
    """y = max over windows: dx = dy where the first maximum of its window is, summed over windows."""
    if node.has_output(1) and not node.attribute("storage_order", 0):
        return _put_at_maxima(node.op, windows_of(node), dy, node.outputs[1])
    attributes = node.attributes() | {"storage_order": None}
    return emit(node.op, "MaxPoolGradient", dy, node.x, like=[node.x], **attributes)


# Milliseconds on two cores, for the maximum with indices and then the gradient from them (PyTorch's gradient):
#                                  MaxPool again   ScatterElements   MaxUnpool   PyTorch
#   64 x 6 x 28 x 28, 2 x 2              0.66            0.21           0.05       0.09
#   4 x 64 x 112 x 112, 3 x 3 stride 2  15.7             3.0             -         4.2
# Comparing every position of the windows with the maximum instead takes 1.1 and 22.
@register_fused("MaxPoolGradient", has_kernel=attributes_fit)
def max_pool_gradient(node: Node) -> Sequence[Value]:
    """From dy and x, with MaxPool's attributes: dx = dy where the first maximum of its window is."""
    op, dy, x = node.op, node.x, node.input_required(1)
    return [_put_at_maxima(op, windows_of(node, x=x), dy, _indices(node, dy))]


def _indices(node: Node, dy: Value) -> Value:
    """Compute the flat index of the maximum of each window from x, the second input, with MaxPool's attributes."""
    x = node.input_required(1)
    attributes = node.attributes() | {"strides": windows_of(node, x=x).strides}
    return node.op.several("MaxPool", x, outputs=2, **attributes)[1].with_shape(dy.shape)


def scattered_max_pool_gradient(node: Node) -> Sequence[Value]:
    """Compute :func:`max_pool_gradient` without MaxUnpool, for providers that lack it."""
    dy, x = node.x, node.input_required(1)
    return [flat_scatter(x, _indices(node, dy), dy)]


def _put_at_maxima(op: Builder, windows: Windows, dy: Value, indices: Value) -> Value:
    if _undone_by_unpooling(windows, windows.x, dy):
        return op.MaxUnpool(dy, indices, kernel_shape=windows.kernel, strides=windows.strides, pads=windows.pads)
    return flat_scatter(windows.x, indices, dy)


def _undone_by_unpooling(windows: Windows, x: Value, dy: Value) -> bool:
    """Return whether no two windows overlap and MaxUnpool computes the size of x."""
    sizes, counts, pads = spatial_sizes(x), spatial_sizes(dy), windows.pads
    if sizes is None or counts is None or pads is None:
        return False
    if any(s < e for s, e in zip(windows.strides, windows.extent, strict=True)):
        return False
    begin, end = pads[: windows.rank], pads[windows.rank :]
    full = zip(windows.strides, counts, windows.extent, begin, end, strict=True)
    return [s * (n - 1) + e - b - a for s, n, e, b, a in full] == list(sizes)


@register_gradient("MaxUnpool")
def max_unpool(node: Node, dy: Value) -> Gradients:
    """y[i[p]] = x[p]: dx[p] = dy[i[p]].

    Indices refer to the output itself, as in ONNX Runtime and PyTorch. (In ONNX's text they refer to the size that
    kernel and strides imply, even where output_shape gives another one.)
    """
    op, indices = node.op, node.input_required(1)
    flat = op.ints(-1)
    return op.reshape_like(op.GatherElements(op.Reshape(dy, flat), op.Reshape(indices, flat), axis=0), node.x)


@register_gradient("AveragePool")
def average_pool(node: Node, dy: Value) -> Gradients:
    """y = Σ over window x / n: dx = Σ over the windows around an element dy / n.

    n counts the elements of a window that lie in x, or in x and its padding with count_include_pad; never
    those beyond that only ceil_mode reaches.
    """
    windows = windows_of(node)
    include = bool(node.attribute("count_include_pad", 0))
    assert windows.kernel is not None
    positions = math.prod(windows.kernel)
    if windows.exact_end and (include or (windows.pads is not None and not any(windows.pads))):
        return _spread(windows, dy, 1 / positions)
    return _spread(windows, dy / _counts(windows, dy, include), 1)


def _spread(windows: Windows, dy: Value, weight: float) -> Value:
    """Every element of dy times a weight, added to all elements of its window."""
    op = windows.op
    assert windows.kernel is not None
    check_table(*windows.kernel)
    kernel = op.constant(np.full((1, 1, *windows.kernel), weight), dy.dtype)
    single = op.Reshape(dy, joined(op, [-1, 1, *sizes_of(dy, windows.axes)]))
    return op.reshape_like(windows.scatter(single, kernel), windows.x)


def _counts(windows: Windows, dy: Value, include_padding: bool) -> Value:
    """The number of elements of each window that count, [1, 1, windows...]."""
    op, rank, axes = windows.op, windows.rank, windows.axes
    assert windows.kernel is not None
    check_table(*windows.kernel)
    kernel = op.constant(np.ones((1, 1, *windows.kernel)), dy.dtype)
    sizes = [1, 1, *sizes_of(windows.x, axes)]
    ones = op.Expand(op.scalar(1, dy), joined(op, sizes)).with_shape(known_sizes(sizes))
    if windows.pads is None or any(windows.pads):
        fill = op.scalar(1 if include_padding else 0, dy)
        ones = op.Pad(ones, joined(op, [*windows.begin, *windows.end]), fill, op.ints(*axes))
    beyond = [0] * rank if windows.exact_end else [s - 1 for s in windows.strides]
    counts = op.Conv(
        ones,
        kernel,
        strides=windows.strides,
        dilations=windows.dilations,
        pads=[0] * rank + beyond,
        kernel_shape=windows.kernel,
    )
    if not windows.exact_end:  # rounding up can give one window more than the pooling has
        counts = op.Slice(counts, op.ints(*[0] * rank), op.Shape(dy, start=2), op.ints(*axes))
    counts = op.Max(counts, op.scalar(1, counts))  # padding alone counts nothing
    return counts.with_shape(known_sizes([1, 1, *sizes_of(dy, axes)]))


@register_gradient("LpPool", "GlobalLpPool")
def lp_pool(node: Node, dy: Value) -> Gradients:
    """y = (Σ |x|ᵖ)^(1/p): dx = x |x|ᵖ⁻² Σ over windows dy y¹⁻ᵖ, and 0 where y = 0."""
    op, x, y, p = node.op, node.x, node.y, node.attribute("p", 2)
    if p == 1:
        direction = op.Sign(x).with_shape(x.shape)
    elif p % 2 == 0:
        direction = x if p == 2 else x ** (p - 1)
    else:
        direction = x * (op.Abs(x) if p == 3 else op.Abs(x) ** (p - 2))
    if p > 1:
        zero = op.scalar(0, y)
        dy = op.Where(op.Equal(y, zero), zero, dy / (y if p == 2 else y ** (p - 1))).with_shape(y.shape)
    return direction * (dy if node.operator == "GlobalLpPool" else _spread(windows_of(node), dy, 1))


@register_gradient("GlobalAveragePool")
def global_average_pool(node: Node, dy: Value) -> Gradients:
    """y = Σ x / n: dx = dy / n, repeated."""
    op, x = node.op, node.x
    sizes = spatial_sizes(x)
    if sizes is not None:
        share = dy * (1 / max(math.prod(sizes), 1))
    else:
        share = dy * (op.cast(op.Size(dy), dy.dtype) / op.cast(op.Size(x), dy.dtype))
    return op.Expand(share, op.shape_of(x))


@register_gradient("GlobalMaxPool")
def global_max_pool(node: Node, dy: Value) -> Gradients:
    """y = max over an image: dx = dy where the first maximum is."""
    op, x = node.op, node.x
    flat = op.Reshape(x, op.ints(0, 0, -1))
    first = op.ArgMax(flat, axis=2, keepdims=1)
    rows = op.Reshape(dy, op.ints(0, 0, 1))
    return op.reshape_like(op.ScatterElements(op.zeros_like(flat), first, rows, axis=2), x)
