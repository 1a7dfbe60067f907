"""Convolution and its transpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.convolution import weight_gradient
from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.kernel_limits import windows_fit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.autodiff.windows import Windows, kernel_of, spatial_sizes, split_padding, windows_of
from onnxtrain.ir import Builder, Value


@register_gradient("Conv")
def convolution(node: Node, dy: Value) -> Gradients:
    """y = x * w + b: dx = dy transposed-* w, dw = Σ over windows of dy xᵀ, db = Σ dy over all but channels.

    The forms and what they cost are in :mod:`onnxtrain.autodiff.convolution`.
    """
    op, x, weight = node.op, node.x, node.input_required(1)
    group = node.attribute("group", 1)
    windows = windows_of(node, weight)
    db = _bias_gradient(op, dy, windows.rank) if node.input(2) is not None else None
    attributes = _fused_attributes(windows, group)
    if attributes is None:
        return _input_gradient(windows, dy, weight, group), weight_gradient(windows, x, dy, weight, group), db
    (dx,) = emit(op, "ConvInputGradient", dy, weight, op.shape_of(x), like=[x], **attributes)
    (dw,) = emit(op, "ConvWeightGradient", dy, x, like=[weight], **attributes)
    return dx, dw, db


def _fused_attributes(windows: Windows, group: int) -> dict[str, Any] | None:
    """What describes a convolution to a fused operator; ``None`` where only the graph can tell."""
    if windows.kernel is None or windows.pads is None:
        return None
    return {
        "kernel_shape": windows.kernel,
        "strides": windows.strides,
        "dilations": windows.dilations,
        "pads": windows.pads,
        "group": group,
    }


def _has_kernel(node: ir.Node) -> bool:
    kernel, strides, dilations, pads = (
        node.attributes[name].as_ints() for name in ("kernel_shape", "strides", "dilations", "pads")
    )
    weight = node.inputs[1] if node.op_type == "ConvInputGradient" else node.outputs[0]
    channels = weight.shape[1] if weight is not None and weight.shape is not None else 1
    return windows_fit(kernel, strides, dilations, pads, channels if isinstance(channels, int) else 1)


@register_fused("ConvInputGradient", has_kernel=_has_kernel)
def convolution_input_gradient(node: Node) -> Sequence[Value]:
    """From dy, w and the shape of x, with Conv's attributes: dx = dy transposed-* w."""
    weight, x_shape, group = node.input_required(1), node.input_required(2), node.attribute("group", 1)
    return [_input_gradient(windows_of(node, weight, x=node.y), node.x, weight, group, x_shape)]


@register_fused("ConvWeightGradient", has_kernel=_has_kernel)
def convolution_weight_gradient(node: Node) -> Sequence[Value]:
    """From dy and x, with Conv's attributes: dw = Σ over windows of dy xᵀ."""
    dy, x = node.x, node.input_required(1)
    return [weight_gradient(windows_of(node, node.y, x=x), x, dy, node.y, node.attribute("group", 1))]


def _bias_gradient(op: Builder, dy: Value, rank: int) -> Value:
    return op.ReduceSum(dy, op.ints(0, *range(2, 2 + rank)), keepdims=0)


# Milliseconds on two cores:
#                                          ConvTranspose   Conv, kernel flipped
#   32 x 64 x 32 x 32, 3 x 3, 64 filters        25                15
#   64 x 16 x 32 x 32, 3 x 3, 16                 2.2               1.7
#   4 x 256 x 14 x 14, 3 x 3, 256                2.8               4.0
#   4 x 512 x 7 x 7, 3 x 3, 512                  7.9               9.1
#   64 x 6 x 14 x 14, 5 x 5, 16                  0.37              0.97
#   4 x 64 x 56 x 56, 1 x 1, 256                 1.7               2.8
#   4 x 96 x 28 x 28, 7 x 7, depthwise           2.5               1.2
#   4 x 144 x 56 x 56, 3 x 3, stride 2           1.7               -
LARGE_IMAGE = 784
"""Pixels from which the flipped kernel is faster."""


def _input_gradient(windows: Windows, dy: Value, weight: Value, group: int, x_shape: Value | None = None) -> Value:
    if _prefers_flipped(windows, dy, weight):
        assert windows.pads is not None
        rank = windows.rank
        pads = [e - 1 - p for e, p in zip(windows.extent * 2, windows.pads, strict=True)]
        if min(pads) >= 0:
            return windows.op.Conv(
                dy,
                _flipped(windows.op, weight, group, rank),
                group=None if group == 1 else group,
                dilations=windows.dilations if set(windows.dilations) != {1} else None,
                pads=pads if any(pads) else None,
                kernel_shape=windows.kernel,
            )
    return windows.scatter(dy, weight, group, shape=x_shape)


def _prefers_flipped(windows: Windows, dy: Value, weight: Value) -> bool:
    static = weight.static_shape
    if windows.pads is None or static is None or set(windows.strides) != {1} or math.prod(static[2:]) == 1:
        return False
    sizes = spatial_sizes(dy)
    large = sizes is None or math.prod(sizes) >= LARGE_IMAGE
    return large and (static[0] >= 16 or static[1] == 1)


def _flipped(op: Builder, weight: Value, group: int, rank: int) -> Value:
    """The kernel turned round, [outputs, inputs / group, ...] to [inputs, outputs / group, ...]."""
    first, before = op.ints(*[-1] * rank), op.ints(*[np.iinfo(np.int64).min + 1] * rank)
    turned = op.Slice(weight, first, before, op.ints(*range(2, 2 + rank)), first).with_shape(weight.shape)
    spatial = list(range(2, 2 + rank))
    if group == 1:
        return op.Transpose(turned, perm=[1, 0, *spatial])
    static = weight.static_shape
    assert static is not None
    outputs, inputs, *kernel = static
    if inputs == 1 and outputs == group:
        return turned
    grouped = op.reshape(turned, (group, outputs // group, inputs, *kernel))
    exchanged = op.Transpose(grouped, perm=[0, 2, 1, *(axis + 1 for axis in spatial)])
    return op.reshape(exchanged, (group * inputs, outputs // group, *kernel))


@register_gradient("ConvTranspose")
def convolution_transpose(node: Node, dy: Value) -> Gradients:
    """y = x transposed-* w + b: dx = dy * w, dw = Σ over windows of x dyᵀ, db = Σ dy over all but channels."""
    op, x, weight = node.op, node.x, node.input_required(1)
    group = node.attribute("group", 1)
    windows = _windows_over_output(node, dy, weight)
    rank, pads = windows.rank, windows.pads
    dx = op.Conv(
        dy if pads is not None else windows.padded(dy, windows.axes),
        weight,
        group=None if group == 1 else group,
        strides=windows.strides if set(windows.strides) != {1} else None,
        dilations=windows.dilations if set(windows.dilations) != {1} else None,
        pads=pads if pads is not None and any(pads) else None,
        kernel_shape=windows.kernel,
    )
    attributes = _fused_attributes(windows, group)
    if attributes is None:
        dw = weight_gradient(windows, dy, x, weight, group)
    else:
        (dw,) = emit(op, "ConvWeightGradient", x, dy, like=[weight], **attributes)
    return dx, dw, _bias_gradient(op, dy, rank) if node.input(2) is not None else None


def _windows_over_output(node: Node, dy: Value, weight: Value) -> Windows:
    """The windows of y (and dy) into which the elements of x were scattered.

    Rows that output_padding adds behind the last window only shorten the padding there.
    """
    kernel, rank = kernel_of(node, weight)
    strides = tuple(node.attribute("strides") or [1] * rank)
    dilations = tuple(node.attribute("dilations") or [1] * rank)
    more = tuple(node.attribute("output_padding") or [0] * rank)
    windows = Windows(node.op, dy, kernel, strides, dilations, (0,) * rank, (0,) * rank)
    mode, wanted = node.attribute("auto_pad", "NOTSET"), node.attribute("output_shape")
    if wanted is None and mode in ("NOTSET", "VALID"):
        pads = (node.attribute("pads") if mode == "NOTSET" else None) or [0] * (2 * rank)
        behind = zip(pads[rank:], more, strict=True)
        return windows._replace(begin=tuple(pads[:rank]), end=tuple(max(p - m, 0) for p, m in behind))
    return _with_total(node, windows, weight, more, None if wanted is None else wanted[-rank:])


def _with_total(
    node: Node, windows: Windows, weight: Value, more: tuple[int, ...], wanted: list[int] | None
) -> Windows:
    """Padding that follows from the output's size, given or (with auto_pad) the input's times the stride."""
    upper = node.attribute("auto_pad", "NOTSET") == "SAME_UPPER"
    sizes = spatial_sizes(node.x)
    if windows.kernel is None or (wanted is not None and sizes is None):
        return _with_total_in_graph(node, windows, weight, more, wanted)
    begin, end = [], []
    for axis, (stride, extent, extra) in enumerate(zip(windows.strides, windows.extent, more, strict=True)):
        total = extra + extent - stride
        if wanted is not None and sizes is not None:
            total = stride * (sizes[axis] - 1) + extra + extent - wanted[axis]
        first = max(total // 2 if upper else total - total // 2, 0)
        begin.append(first)
        end.append(max(total - first - extra, 0))
    return windows._replace(begin=tuple(begin), end=tuple(end))


def _with_total_in_graph(
    node: Node, windows: Windows, weight: Value, more: tuple[int, ...], wanted: list[int] | None
) -> Windows:
    op, upper = node.op, node.attribute("auto_pad", "NOTSET") == "SAME_UPPER"
    kernel, strides, one = windows.kernel, np.asarray(windows.strides), np.ones(windows.rank, np.int64)
    positions = op.Shape(weight, start=2) if kernel is None else op.ints(*kernel)
    extent = (positions - one) * np.asarray(windows.dilations) + one
    size = op.Shape(node.x, start=2)
    output = size * strides if wanted is None else op.ints(*wanted)
    natural = (size - one) * strides + extent
    begin, _ = split_padding(op, natural + np.asarray(more) - output, upper)
    end = op.Max(natural - output - begin, op.constant(0, np.int64))
    return windows._replace(begin=begin, end=end)
