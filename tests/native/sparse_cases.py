"""Random calls of the operators with sparse weights: sound ones, and files that somebody made to do harm."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_case import EXTREMES, MOST, Case, any_shape, floating, pick, replaced, some

CONSTANTS = ("values", "deltas")


def dense_matrix(shape: tuple[int, ...], values: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """The matrix [outputs, depth] of packed weights, as the functions' bodies compute it."""
    rows, depth, block = shape
    blocks = np.zeros((rows * depth, block), np.float32)
    blocks[np.cumsum(deltas, dtype=np.int64)] = values
    return blocks.reshape(rows, depth, block).transpose(0, 2, 1).reshape(rows * block, depth)


def weights(rng: np.random.Generator, rows: int, depth: int, block: int) -> dict[str, np.ndarray]:
    """Values and deltas of a matrix of some density."""
    kept = np.flatnonzero(rng.random(rows * depth) < pick(rng, 0.0, 0.05, 0.3, 1.0))
    return {
        "values": floating(rng, (len(kept), block)),
        "deltas": np.diff(kept, prepend=0).astype(np.uint16),
    }


def spoiled(rng: np.random.Generator, given: dict[str, np.ndarray], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Damage packed weights in place, and return the attribute `shape`."""
    if rng.random() < 0.7:
        return shape
    if rng.random() < 0.4 or not len(given["deltas"]):
        return replaced(shape, int(rng.integers(len(shape))), pick(rng, *EXTREMES, 3, 5))
    at = int(rng.integers(len(given["deltas"])))
    given["deltas"][at] = pick(rng, 0, 1, 65535)
    if rng.random() < 0.3:
        given["values"] = given["values"][1:]
    return shape


def ends(
    rng: np.random.Generator, outputs: int, y_shape: tuple[int, ...]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    residual = pick(rng, floating(rng, y_shape), np.float32(pick(rng, 0, 0.5)))
    limits = pick(rng, {}, {"lower": 0.0}, {"lower": 0.0, "upper": 6.0}, {"upper": -0.5})
    return {"bias": floating(rng, (outputs,)), "residual": np.asarray(residual, np.float32)}, limits


def ended(sums: np.ndarray, bias: np.ndarray, residual: np.ndarray, limits: dict[str, float]) -> list[np.ndarray]:
    return [np.clip(sums + bias + residual, limits.get("lower", -np.inf), limits.get("upper", np.inf))]


def sparse_linear(rng: np.random.Generator) -> Case:
    rows, depth, block = (*some(rng, 1, 40, 2), pick(rng, 1, 1, 4, 16))
    batch = (0,) if rng.random() < 0.05 else some(rng, 1, 40, int(rng.integers(1, 3)))
    given = weights(rng, rows, depth, block)
    shape = spoiled(rng, given, (rows, depth, block))
    x = floating(rng, (*batch, depth))
    last, limits = ends(rng, rows * block, (*batch, rows * block))
    expected = None
    if shape == (rows, depth, block) and x.size * rows * block <= 40 * MOST:

        def expected() -> list[np.ndarray]:
            matrix = dense_matrix(shape, given["values"], given["deltas"])
            return ended(x @ matrix.T, last["bias"], last["residual"], limits)

    panels = {name: pick(rng, *EXTREMES, 16, 64) for name in ("x_panel", "y_panel") if rng.random() < 0.1}
    if panels:
        expected = None  # which rows are where depends on the instruction set
    attributes: dict[str, Any] = {"shape": shape, **limits, **panels}
    return Case("SparseLinear", {"x": x, **given, **last}, attributes, expected=expected, constants=CONSTANTS)


def transposed_rows(rng: np.random.Generator) -> Case:
    x = floating(rng, any_shape(rng) if rng.random() < 0.3 else (*some(rng, 1, 9, 1), 32, *some(rng, 1, 40, 1)))
    return Case("TransposeRows", {"x": x}, {"panel": pick(rng, *EXTREMES, 16, 64, 128)})


def sparse_convolution(rng: np.random.Generator) -> Case:
    rows, channels, block = (*some(rng, 1, 8, 2), pick(rng, 1, 4, 16))
    axes = int(rng.integers(1, 3))
    kernel, strides, dilations = (some(rng, 1, most, axes) for most in (3, 3, 2))
    pads = some(rng, 0, 2, 2 * axes)
    x = floating(rng, (*some(rng, 0 if rng.random() < 0.05 else 1, 2, 1), channels, *some(rng, 1, 12, axes)))
    depth = channels * int(np.prod(kernel))
    given = weights(rng, rows, depth, block)
    shape = spoiled(rng, given, (rows, depth, block))
    attributes: dict[str, Any] = {
        "shape": shape, "kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads,
    }  # fmt: skip
    if rng.random() < 0.15:
        name = pick(rng, "kernel_shape", "strides", "dilations", "pads")
        attributes[name] = replaced(attributes[name], 0, pick(rng, *EXTREMES))
    around = {f"{name}_pads": some(rng, 0, 2, 2 * axes) if rng.random() < 0.3 else (0,) * 2 * axes for name in BORDERED}
    windows = tuple(
        max(0, (size + pads[a] + pads[axes + a] - dilations[a] * (kernel[a] - 1) - 1) // strides[a] + 1)
        for a, size in enumerate(x.shape[2:])
    )
    last, limits = ends(rng, rows * block, (x.shape[0], rows * block, *windows))
    if last["residual"].ndim:
        last["residual"] = bordered(last["residual"], around["residual_pads"])
    zeros = tuple(map(min, around["x_pads"], pads))
    x = bordered(bordered(x, zeros, 0), tuple(np.subtract(around["x_pads"], zeros)))
    if rng.random() < 0.1:
        name = pick(rng, *around)
        around[name] = replaced(around[name], 0, pick(rng, *EXTREMES))
    return Case("SparseConv", {"x": x, **given, **last}, attributes | limits | around, constants=CONSTANTS)


def pooled_convolution(rng: np.random.Generator) -> Case:
    """A dense convolution with its MaxPool."""
    outputs, channels = pick(rng, 8, 8, 16, 7), int(rng.integers(1, 4))
    strides = (pick(rng, 1, 2, 4), pick(rng, 1, 2, 4))
    kernel = (int(rng.integers(1, 4)), int(rng.integers(1, 4 * strides[1] + 1)))
    pads, y_pads = some(rng, 0, 2, 4), some(rng, 0, 2, 4)
    x = floating(rng, (*some(rng, 0 if rng.random() < 0.05 else 1, 2, 1), channels, *some(rng, 1, 40, 2)))
    attributes: dict[str, Any] = {
        "kernel_shape": kernel, "strides": strides, "pads": pads, "y_pads": y_pads, "pool_shape": some(rng, 2, 3, 2),
        "pool_pads": some(rng, 0, 1, 4),
    }  # fmt: skip
    if rng.random() < 0.2:
        name = pick(rng, "kernel_shape", "strides", "pads", "y_pads", "pool_shape", "pool_pads")
        attributes[name] = replaced(attributes[name], 0, pick(rng, *EXTREMES))
    feeds = {"x": x, "w": floating(rng, (outputs, channels, *kernel)), "bias": floating(rng, (outputs,))}
    return Case("ConvReluMaxPool", feeds, attributes, constants=("w",))


BORDERED = ("x", "y", "residual")


def bordered(array: np.ndarray, border: tuple[int, ...], value: float = np.nan) -> np.ndarray:
    """An image with elements around it; those that are NaN are never read."""
    axes = len(border) // 2
    around = [(0, 0), (0, 0), *zip(border[:axes], border[axes:], strict=True)]
    return np.pad(array, around, constant_values=value)
