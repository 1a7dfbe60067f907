"""Losses of counts, amounts, quantiles, margins, ordered classes and survival times in NumPy, without onnxtrain."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def poisson(y: Array, t: Array) -> float:
    """Mean of y - t log y, y kept from 0."""
    return float(np.mean(y - t * np.log(y + 1e-7)))


def poisson_of_logarithms(z: Array, t: Array) -> float:
    """Mean of exp(z) - t z."""
    return float(np.mean(np.exp(z) - t * z))


def gamma(y: Array, t: Array) -> float:
    """Deviance of the gamma distribution: mean of 2 (log(y / t) + t / y - 1)."""
    return float(np.mean(2 * (np.log(y / t) + t / y - 1)))


def quantile(y: Array, t: Array, q: Array | float) -> float:
    """Mean of q d where d = t - y is above 0, else (q - 1) d; several quantiles are along the last axis of y."""
    d = t.reshape(*t.shape, *[1] * (y.ndim - t.ndim)) - y
    return float(np.mean(np.where(d > 0, q * d, (q - np.float64(1)) * d)))


def log_cosh(y: Array, t: Array) -> float:
    """Mean of log cosh(y - t)."""
    return float(np.mean(np.log(np.cosh(y - t))))


def percentage(y: Array, t: Array) -> float:
    """Mean of |y - t| / |t| in percent."""
    return float(100 * np.mean(np.abs(y - t) / np.abs(t)))


def squared_logarithmic(y: Array, t: Array) -> float:
    """Mean of (log(1 + y) - log(1 + t))^2."""
    return float(np.mean((np.log1p(y) - np.log1p(t)) ** 2))


def cosine(y: Array, t: Array) -> float:
    """Mean over rows of -cos(y, t)."""
    return float(np.mean([-(a @ b) / np.sqrt((a @ a) * (b @ b)) for a, b in zip(y, t, strict=True)]))


def divergence(z: Array, t: Array) -> float:
    """Mean over rows of sum t log(t / softmax(z)), over classes with t above 0."""
    total = 0.0
    for scores, shares in zip(z, t, strict=True):
        there = shares > 0
        log_p = scores - np.log(np.exp(scores).sum())
        total += float(shares[there] @ (np.log(shares[there]) - log_p[there]))
    return total / len(z)


def hinge(y: Array, t: Array, power: int) -> float:
    """Mean of max(0, 1 - s y)^power, s = 1 where t is 1, else -1."""
    return float(np.mean(np.maximum(0, 1 - np.where(t == 1, y, -y)) ** power))


def categorical_hinge(y: Array, t: Array) -> float:
    """Mean over rows of max(0, the best score of the other classes, or 0, - that of the label + 1)."""
    terms = []
    for scores, label in zip(y, t, strict=True):
        others = max(0.0, *(score for kind, score in enumerate(scores) if kind != label))
        terms.append(max(0.0, others - scores[label] + 1))
    return float(np.mean(terms))


def ordinal(z: Array, t: Array) -> float:
    """Mean over rows of the cross-entropies of the questions whether the label is above 0, 1, ..., summed."""
    terms = [
        sum(np.log1p(np.exp(-score if label > level else score)) for level, score in enumerate(scores))
        for scores, label in zip(z, t, strict=True)
    ]
    return float(np.mean(terms))


def tversky(z: Array, t: Array, alpha: float, beta: float, smooth: float) -> float:
    """1 - (I + s) / (I + alpha FP + beta FN + s), mean over examples and classes; z is [N, C, H, W], t labels."""
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    terms = []
    for chances, row in zip(p, t, strict=True):
        for kind, chance in enumerate(chances):
            both = chance[row == kind].sum()
            extra, missed = chance[row != kind].sum(), (1 - chance[row == kind]).sum()
            terms.append(1 - (both + smooth) / (both + alpha * extra + beta * missed + smooth))
    return float(np.mean(terms))


def circle(z: Array, t: Array, scale: float, margin: float) -> float:
    """Mean of log(1 + sum_p exp(scale (d + m)(d - m)) sum_n exp(scale max(0, 1 + m - d) (1 - m - d)))."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    terms = []
    for i in range(len(z)):
        near = far = 0.0
        for j in range(len(z)):
            d = max(0.0, 1 - float(z[i] @ z[j]))
            if j != i and t[j] == t[i]:
                near += np.exp(scale * (d + margin) * (d - margin))
            elif t[j] != t[i]:
                far += np.exp(scale * max(0.0, 1 + margin - d) * (1 - margin - d))
        if near and far:
            terms.append(np.log1p(near * far))
    return float(np.mean(terms))


def cox(y: Array, t: Array) -> float:
    """Mean over events of the log of the summed hazards of those at risk, less the own log hazard."""
    terms = [
        np.log(sum(np.exp(other) for other, (later, _) in zip(y, t, strict=True) if later >= time)) - hazard
        for hazard, (time, event) in zip(y, t, strict=True)
        if event
    ]
    return float(np.mean(terms))
