"""Regions of COCO files as pixels: polygons and run lengths, as pycocotools draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array

_SCALE: Final = 5.0
"""Points per pixel along an edge."""

_FARTHEST: Final = 1000
"""Pixels outside of the image that a point of a polygon may be."""


def region(segmentation: Any, height: int, width: int) -> Array:
    """Return the pixels [H, W] in a region: a list of polygons (x, y, x, y, ...), or run lengths.

    Run lengths are ``{"size": [height, width], "counts": ...}``, the lengths in a list or in COCO's compressed text.

    Raises:
        ValueError: It is none of these, or of another size.
    """
    if isinstance(segmentation, dict):
        if segmentation.get("size") != [height, width]:
            raise ValueError(f"its size is {segmentation.get('size')}")
        return _of_runs(_run_lengths(segmentation.get("counts")), height, width)
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError("it is neither a list of polygons nor run lengths")
    found = np.zeros((height, width), bool)
    for polygon in segmentation:
        points = np.asarray(polygon, np.float64)
        if points.ndim != 1 or len(points) < 6 or len(points) % 2 or not np.isfinite(points).all():
            raise ValueError("a polygon needs three points or more, as x, y, x, y, ...")
        if np.abs(points).max() > _FARTHEST + height + width:
            raise ValueError(f"a point of a polygon is at {np.abs(points).max():.6g}")
        found |= _of_polygon(points.reshape(-1, 2), height, width)
    return found


def _run_lengths(counts: Any) -> Sequence[int]:
    """Return run lengths, of which compressed ones are differences to the one before the last, 5 bits a character."""
    if isinstance(counts, list):
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError("its counts are not integers of at least 0")
        return counts
    if not isinstance(counts, str):
        raise ValueError("it has no counts")
    found: list[int] = []
    value = shift = 0
    for character in counts:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("its counts are no run lengths")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        found.append(value + found[-2] if len(found) > 2 else value)
        value = shift = 0
    if shift or any(count < 0 for count in found):
        raise ValueError("its counts are no run lengths")
    return found


def _of_runs(counts: Sequence[int], height: int, width: int) -> Array:
    """Return pixels whose columns are runs of 0 and 1 in turn."""
    if sum(counts) != height * width:
        raise ValueError(f"its counts are {sum(counts)} pixels, not {height * width}")
    runs = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return runs.reshape(width, height).T


def _of_polygon(points: Array, height: int, width: int) -> Array:
    """Return the pixels in a polygon: columns change where its outline, drawn five times as large, crosses them.

    As ``rleFrPoly`` of pycocotools, bit for bit.
    """
    corners = np.trunc(_SCALE * points + 0.5).astype(np.int64)
    changes = np.zeros(height * width + 1, np.int64)
    for start, end in zip(corners, np.roll(corners, -1, 0), strict=True):
        u, v = _edge(start, end).T
        moved = np.flatnonzero(u[1:] != u[:-1])
        column = (np.maximum(u[1:], u[:-1])[moved] - 0.5) / _SCALE - 0.5
        row = np.ceil(np.clip((np.minimum(v[1:], v[:-1])[moved] + 0.5) / _SCALE - 0.5, 0, height))
        inside = (np.floor(column) == column) & (column >= 0) & (column <= width - 1)
        np.add.at(changes, (column[inside] * height + row[inside]).astype(np.int64), 1)
    found: Array = (np.cumsum(changes[:-1]) % 2 == 1).reshape(width, height).T
    return found


def _edge(start: Array, end: Array) -> Array:
    """Return the points of an edge, all along its longer side."""
    (xs, ys), (xe, ye) = start, end
    dx, dy = abs(xe - xs), abs(ye - ys)
    if not dx and not dy:
        return start[None]
    flipped = (dx >= dy and xs > xe) or (dx < dy and ys > ye)
    if flipped:
        xs, ys, xe, ye = xe, ye, xs, ys
    steps = np.arange(max(dx, dy) + 1)
    steps = steps[::-1] if flipped else steps
    if dx >= dy:
        return np.stack([steps + xs, np.trunc(ys + (ye - ys) / dx * steps + 0.5).astype(np.int64)], 1)
    return np.stack([np.trunc(xs + (xe - xs) / dy * steps + 0.5).astype(np.int64), steps + ys], 1)
