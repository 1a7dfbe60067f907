"""What native kernels of windows (convolution, pooling) take; everything else is left to ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LARGEST = 2**30
"""Of pads, dilated kernels: kernels reach 2**31 - 1 elements along an axis, padding included."""

_MOST_COVERED = 2**26
"""Elements that a window may cover, with what lies between them: a kernel copies them side by side."""

MOST_AXES = 3
"""Spatial axes."""


def windows_fit(
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    channels: int = 1,
) -> bool:
    """Whether kernels take windows with these attributes, each written out.

    Args:
        kernel: Elements of a window along each spatial axis.
        strides: From window to window.
        dilations: From element to element.
        pads: At all beginnings, then at all ends.
        channels: That are read together.
    """
    rank = len(kernel)
    if not 1 <= rank <= MOST_AXES or (len(strides), len(dilations), len(pads)) != (rank, rank, 2 * rank):
        return False
    if min(*kernel, *strides, *dilations) < 1 or min(pads) < 0 or max(pads) > _LARGEST:
        return False
    extents = [dilation * (size - 1) + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    return max(extents) <= _LARGEST and math.prod(extents) * max(channels, 1) <= _MOST_COVERED
