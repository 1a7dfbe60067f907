"""Random calls of transforms: samples at points, Fourier transforms, gradients of determinants."""

from __future__ import annotations

import gradient_reference
import numpy as np
from kernel_case import EXTREMES, Case, any_shape, element_type, floating, pick, some


def fourier(rng: np.random.Generator) -> Case:
    dtype, length, shape = element_type(rng), int(rng.integers(1, 40)), some(rng, 1, 30, int(rng.integers(1, 4)))
    x = floating(rng, (*shape, int(rng.integers(1, 3))), dtype)
    attributes = {"axis": int(rng.integers(0, len(shape))), "length": length, "bins": int(rng.integers(1, length + 1))}
    attributes |= {name: int(rng.integers(2)) for name in ("inverse", "divided")} | {"parts": int(rng.integers(1, 3))}
    legal = length != 37
    if rng.random() < 0.3:
        attributes[pick(rng, "axis", "length", "bins", "parts")], legal = pick(rng, *EXTREMES), False
    if rng.random() < 0.2:
        x, legal = floating(rng, any_shape(rng), dtype), False
    expected = (lambda: gradient_reference.fourier(x, **attributes)) if legal else None
    return Case("Fourier", {"x": x}, attributes, expected=expected)


def samples(rng: np.random.Generator) -> Case:
    dtype, sizes = element_type(rng), some(rng, 0 if rng.random() < 0.2 else 1, 20, 6)
    x, grid = floating(rng, sizes[:4], dtype), floating(rng, (sizes[0], *sizes[4:], 2), dtype)
    attributes = {"padding_mode": pick(rng, "zeros", "border", "reflection"), "align_corners": int(rng.integers(2))}
    feeds, operator = {"x": x, "grid": grid}, "GridSample"
    if rng.random() < 0.5:
        operator, feeds = "GridSampleGradient", {"dy": floating(rng, (*sizes[:2], *sizes[4:]), dtype), **feeds}
    if rng.random() < 0.3:
        name = pick(rng, *feeds)
        feeds[name] = floating(rng, pick(rng, feeds[name].shape[1:], (*feeds[name].shape, 1), any_shape(rng)), dtype)
    if rng.random() < 0.1:
        feeds["grid"] = feeds["grid"] * dtype(pick(rng, np.inf, np.nan, 1e30))
    # Without a reference: a point between two pixels falls to one or the other.
    return Case(operator, feeds, attributes, len(feeds) - 1)


def determinant(rng: np.random.Generator) -> Case:
    dtype, size, shape = element_type(rng), int(rng.integers(0, 7)), some(rng, 0, 4, int(rng.integers(0, 3)))
    x, dy = floating(rng, (*shape, size, size), dtype), floating(rng, shape, dtype)
    if rng.random() < 0.3:
        x = floating(rng, any_shape(rng), dtype)
    return Case("DetGradient", {"dy": dy, "x": x}, {})
