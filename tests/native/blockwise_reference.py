"""8-bit states in NumPy: search in a table of the values of a code, without bit operations."""

from __future__ import annotations

import numpy as np
from rounding_reference import drawn

BLOCK = 256


def numbers(signed):
    """Decode unsigned codes, times the scale, in float64."""
    top = 15 if signed else 31
    exponents, fractions = np.divmod(np.arange(8 * (top + 1)), 8)
    normal = 2.0 ** (exponents - top) * (1 + fractions / 8)
    return np.where(exponents > 0, normal, 2.0 ** (1 - top) * fractions / 8)


def _blocks(flat):
    return np.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)


def scales_of(x):
    """The scale of each block of x [float32]."""
    largest = np.abs(_blocks(np.asarray(x, np.float64).reshape(-1))).max(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.ceil(np.log2(largest / 1.875))
        for e in (exponent - 1, exponent):  # the logarithm may be off by a last place
            exponent = np.where(largest <= 1.875 * 2.0**e, np.minimum(exponent, e), exponent)
    found = 2.0 ** np.clip(np.nan_to_num(exponent, neginf=-126), -126, 127)
    return np.where(np.isfinite(largest), found, np.nan).astype(np.float32)


def decode(codes, scales, signed):
    """The numbers [float32] of codes."""
    flat = codes.reshape(-1).astype(int)
    values = numbers(signed)[flat & 127] * np.where(flat & 128, -1.0, 1.0) if signed else numbers(False)[flat]
    found = values * np.repeat(scales.astype(np.float64), BLOCK)[: len(flat)]
    return found.astype(np.float32).reshape(codes.shape)


def encode(x, count, seed, signed):
    """Codes and scales of x [float32]."""
    flat = np.asarray(x, np.float32).reshape(-1)
    scales = scales_of(flat)
    table = numbers(signed)
    with np.errstate(invalid="ignore"):
        size = np.abs(flat.astype(np.float64)) / np.repeat(scales.astype(np.float64), BLOCK)[: len(flat)]
    size = np.nan_to_num(np.minimum(size, table[-1]))  # of a block without a scale codes mean nothing
    below = np.searchsorted(table, size, side="right") - 1
    above = np.minimum(below + 1, len(table) - 1)
    distance = np.where(above > below, table[above] - table[below], 1.0)
    part = np.rint((size - table[below]) / distance * 2**20)  # an integer but where the exponent is the least
    code = np.where(part + (drawn(seed, int(count), len(flat)) >> np.uint64(12)) >= 2**20, above, below)
    negative, lost = np.signbit(flat), (code == 0) & (flat != 0)
    code = code | np.where(negative, 128, 0) if signed else np.where(lost, 1, code)
    return code.astype(np.uint8).reshape(np.shape(x)), scales
