"""Matmuls of operands rounded to bfloat16 in NumPy: exact ones, and the kernels' results."""

from __future__ import annotations

import numpy as np
from rounding_reference import BFLOAT16

LEAST = np.float32(2.0**-126)
"""Magnitudes below it become zero."""


def rounded(array):
    """Numbers as bfloat16, to the nearest, ties to even, as float32."""
    array = np.asarray(array, np.float32)
    nearest = array.astype(BFLOAT16).astype(np.float32)
    return np.where(np.abs(array) < LEAST, np.copysign(np.float32(0), array), nearest)


def product(x, w):
    """Return x w of rounded operands in float64, and the sum of the absolute values of its terms."""
    x, w = (rounded(array).astype(np.float64) for array in (x, w))
    return x @ w, np.abs(x) @ np.abs(w)


def product_in_order(x, w, bias=None):
    """x w + bias in float32, added up as the kernels do, to the bit: of each pair of terms first the second."""
    x, w = rounded(x), rounded(w)
    depth = x.shape[1] + x.shape[1] % 2
    x = np.pad(x, ((0, 0), (0, depth - x.shape[1])))
    w = np.pad(w, ((0, depth - w.shape[0]), (0, 0)))
    total = np.zeros((len(x), w.shape[1]), np.float32) + (0 if bias is None else bias)
    for pair in range(0, depth, 2):
        for place in (pair + 1, pair):
            # Products of bfloat16 are exact in float64, whose sum is rounded once more than a fused one, seldom for
            # the worse: 29 more bits lie between both.
            term = x[:, place, None].astype(np.float64) * w[place]
            total = (total.astype(np.float64) + term).astype(np.float32)
    return total


def attention(feeds, scale):
    """y and log_sum of attention in float64, from rounded operands of both products."""
    q, k, v = (rounded(feeds[name]).astype(np.float64) for name in ("q", "k", "v"))
    scores = scale * np.einsum("bshd,bthd->bhst", q, k) + feeds.get("bias", np.zeros(())).astype(np.float64)
    largest = scores.max(-1, keepdims=True)
    e = np.exp(scores - largest)
    total = e.sum(-1)
    y = np.einsum("bhst,bthe->bshe", rounded(e), v) / total.transpose(0, 2, 1)[..., None]
    return {"y": y, "log_sum": largest[..., 0] + np.log(total)}


def attention_gradient(feeds, scale):
    """dq, dk, dv and the gradient of the scores in float64, from rounded operands of all products."""
    q, k, v, dy = (rounded(feeds[name]).astype(np.float64) for name in ("q", "k", "v", "dy"))
    scores = scale * np.einsum("bshd,bthd->bhst", q, k) + feeds.get("bias", np.zeros(())).astype(np.float64)
    p = np.exp(scores - feeds["log_sum"].astype(np.float64)[..., None])
    delta = np.einsum("bshe,bshe->bhs", feeds["dy"].astype(np.float64), feeds["y"])[..., None]
    slopes = p * (np.einsum("bshe,bthe->bhst", dy, v) - delta)
    of_slopes = rounded(slopes).astype(np.float64)
    return {
        "dq": scale * np.einsum("bhst,bthd->bshd", of_slopes, k),
        "dk": scale * np.einsum("bhst,bshd->bthd", of_slopes, q),
        "dv": np.einsum("bhst,bshe->bthe", rounded(p).astype(np.float64), dy),
        "slopes": slopes,
    }
