"""Bodies of operators for providers of ONNX Runtime that lack what the ordinary bodies read or use.

(workarounds: indices on WebGPU)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Body
from onnxtrain.autodiff.rules.pool import max_pool_gradient, scattered_max_pool_gradient
from onnxtrain.autodiff.windows import spatial_sizes, windows_of
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import fits

Portable = Literal["cuda", "openvino", "webgpu"]
"""Providers and runtimes that step graphs can be made for, beside ONNX Runtime's CPU provider."""

_LOWEST = float(np.finfo(np.float32).min)


def max_pool_gradient_without_indices(node: Node) -> Sequence[Value | None]:
    """Compute dx from dy, x and MaxPool's attributes: dx = dy at the first maximum of its window.

    A convolution with one filter for each position of a window lays the windows side by side, p[k]. With m their
    maximum, the first maximum of a window is where relu((p[k] = m) - Σ over j < k (p[j] = m)) is 1, and the transposed
    convolution with the same filters puts dy there. All of it is float arithmetic, and exact for finite x.
    """
    op, dy, x = node.op, node.x, node.input_required(1)
    windows = windows_of(node, x=x)
    sizes, counts, pads, kernel = spatial_sizes(x), spatial_sizes(dy), windows.pads, windows.kernel
    if sizes is None or counts is None or pads is None or kernel is None or x.dtype != ir.DataType.FLOAT:
        return max_pool_gradient(node)
    positions = math.prod(kernel)
    if not fits(positions, positions):
        return max_pool_gradient(node)
    begin = pads[: windows.rank]
    reach = [s * (n - 1) + e for s, n, e in zip(windows.strides, counts, windows.extent, strict=True)]
    ends = [min(start + size, full) for start, size, full in zip(begin, sizes, reach, strict=True)]  # where x ends

    filters = op.constant(np.eye(positions).reshape(positions, 1, *kernel), x.dtype)
    over = {"strides": windows.strides, "dilations": windows.dilations, "kernel_shape": kernel}
    inside = [end - start for end, start in zip(ends, begin, strict=True)]
    behind = [full - end for full, end in zip(reach, ends, strict=True)]
    padded = _padded(op, _cut(op, x, [0] * len(sizes), inside, sizes), begin, behind, _LOWEST)
    beside = op.Conv(_planes(op, padded, reach), filters, **over)

    maximal = op.cast(op.Equal(beside, op.ReduceMax(beside, op.ints(1), keepdims=1)), x.dtype)
    before = np.tril(np.ones((positions, positions)), -1).reshape(positions, positions, *[1] * windows.rank)
    first = op.Relu(maximal - op.Conv(maximal, op.constant(before, x.dtype)))

    spread = op.ConvTranspose(first * _planes(op, dy, counts), filters, **over)
    missing = [size - part for size, part in zip(sizes, inside, strict=True)]
    dx = _padded(op, _cut(op, spread, begin, ends, reach), [0] * len(sizes), missing, 0.0)
    return [op.reshape_like(dx, x)]


def _planes(op: Builder, value: Value, sizes: Sequence[int]) -> Value:
    """Reshape [batch, channels, sizes...] to [batch * channels, 1, sizes...]."""
    return op.Reshape(value, op.ints(-1, 1, *sizes))


def _cut(op: Builder, value: Value, starts: Sequence[int], ends: Sequence[int], sizes: Sequence[int]) -> Value:
    """Return a part of an image of the given sizes."""
    if not any(starts) and list(ends) == list(sizes):
        return value
    return op.Slice(value, op.ints(*starts), op.ints(*ends), op.ints(*range(2, 2 + len(sizes))))


def _padded(op: Builder, value: Value, begin: Sequence[int], end: Sequence[int], fill: float) -> Value:
    """Return an image with a number around it."""
    if not any(begin) and not any(end):
        return value
    return op.Pad(value, op.ints(0, 0, *begin, 0, 0, *end), op.constant(fill, value.dtype))


def body_for(portable: Portable | None, operator: str) -> Body | None:
    """Return the body of a fused operator that a provider needs instead of the operator's own, or ``None``."""
    return None if portable is None else _BODIES[portable].get(operator)


_BODIES: dict[Portable, dict[str, Body]] = {
    "cuda": {"MaxPoolGradient": scattered_max_pool_gradient},
    "openvino": {"MaxPoolGradient": scattered_max_pool_gradient},  # it has no MaxUnpool
    "webgpu": {"MaxPoolGradient": max_pool_gradient_without_indices},
}
