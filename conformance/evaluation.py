"""Operators that ONNX's reference evaluator lacks, or computes in float32 only, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class AffineGrid(OpRun):
    """Coordinates of a grid after an affine transformation; ONNX's own has constants in float32."""

    def _run(self, theta: np.ndarray, size: np.ndarray, align_corners: int = 0) -> tuple[Any, ...]:
        axes = []
        for length in (int(n) for n in size[2:]):
            if align_corners:
                axes.append(np.linspace(-1.0, 1.0, length))
            else:
                axes.append((2 * np.arange(length) + 1) / length - 1)
        places = np.meshgrid(*axes, indexing="ij")
        points = np.stack([*reversed(places), np.ones_like(places[0])], axis=-1)  # x first
        return (np.einsum("...j,nij->n...i", points, theta).astype(theta.dtype),)


class MeanVarianceNormalization(OpRun):
    """(x - mean) / (standard deviation + 1e-9); ONNX's own is a function with constants in float32."""

    def _run(self, x: np.ndarray, axes: list[int] | None = None) -> tuple[Any, ...]:
        over = tuple(axes or (0, 2, 3))
        mean = x.mean(over, keepdims=True)
        return ((x - mean) / (np.sqrt((x * x).mean(over, keepdims=True) - mean * mean) + 1e-9),)


class GlobalLpPool(OpRun):
    """The p-norm over all axes but the first two, which ONNX's evaluator lacks."""

    def _run(self, x: np.ndarray, p: int = 2) -> tuple[Any, ...]:
        axes = tuple(range(2, x.ndim))
        return ((np.abs(x) ** (p or 2)).sum(axes, keepdims=True) ** (1 / (p or 2)),)


class MaxRoiPool(OpRun):
    """Maxima of the bins of regions, which ONNX's evaluator lacks: regions and bins as in the paper on Fast R-CNN."""

    def _run(
        self, x: np.ndarray, rois: np.ndarray, pooled_shape: list[int], spatial_scale: float = 1.0
    ) -> tuple[Any, ...]:
        height, width = pooled_shape
        y = np.zeros((len(rois), x.shape[1], height, width), x.dtype)
        for number, (image, *corners) in enumerate(rois):
            left, top, right, bottom = (int(np.floor(c * (spatial_scale or 1.0) + 0.5)) for c in corners)
            tall, wide = max(bottom - top + 1, 1), max(right - left + 1, 1)
            for row, column in np.ndindex(height, width):
                rows = np.clip([row * tall // height + top, -(-(row + 1) * tall // height) + top], 0, x.shape[2])
                columns = np.clip(
                    [column * wide // width + left, -(-(column + 1) * wide // width) + left], 0, x.shape[3]
                )
                part = x[int(image), :, rows[0] : rows[1], columns[0] : columns[1]]
                if part.size:
                    y[number, :, row, column] = part.max((1, 2))
        return (y,)


OPERATORS: list[type[OpRun]] = [AffineGrid, GlobalLpPool, MaxRoiPool, MeanVarianceNormalization]
