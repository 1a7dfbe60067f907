"""Thresholds: which weights survive a cut, and how many may go for an accuracy that must stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from onnxtrain.errors import OptionError

Scope = Literal["global", "layer"]
Weights = Mapping[str, np.ndarray]

_PROBES = 16
"""The most sparsities that a search tries."""

_PRECISION = 1.02
"""A search ends when the densities on both sides of the bound are within this factor."""


@dataclass(frozen=True)
class Cut:
    """The weights that survive a cut.

    Attributes:
        masks: By tensor, true where a weight stays.
        thresholds: By tensor the magnitude of its smallest survivor; infinite where none is left.
    """

    masks: dict[str, np.ndarray]
    thresholds: dict[str, float]

    @property
    def sparsity(self) -> float:
        """The fraction of weights that the masks remove."""
        size = sum(mask.size for mask in self.masks.values())
        return 1 - sum(int(np.count_nonzero(mask)) for mask in self.masks.values()) / size

    @property
    def emptied(self) -> list[str]:
        """The tensors of which nothing is left."""
        return [name for name, mask in self.masks.items() if mask.size and not mask.any()]


@dataclass(frozen=True)
class Probe:
    """One sparsity that a search tried, and what it measured there."""

    sparsity: float
    threshold: float
    accuracy: float
    accepted: bool


def check_sparsity(sparsity: float) -> None:
    """Raise OptionError for a sparsity outside [0, 1)."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise OptionError(f"sparsity is {sparsity!r}; it needs a fraction of zeros of at least 0 and below 1.")


def cubic(final: float, part: int, parts: int, *, first: float = 0.0) -> float:
    """The sparsity of cut ``part`` of ``parts``: steep at first, flat at the end.

    s = final + (first − final) (1 − part / parts)³

    Source: M. Zhu, S. Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression",
    ICLR Workshop 2018.

    Example:
        >>> [round(cubic(0.9, part, 3), 3) for part in (1, 2, 3)]
        [0.633, 0.867, 0.9]
    """
    return final + (first - final) * (1 - part / parts) ** 3


def magnitude_cut(weights: Weights, sparsity: float, scope: Scope = "global") -> Cut:
    """Keep the weights of largest magnitude, over all tensors together or in each by itself.

    Exactly round((1 − sparsity) · size) weights stay; among equal ones those that come first.

    Example:
        >>> magnitude_cut({"w": np.array([1.0, -3.0, 0.5, 2.0])}, 0.5).masks["w"]
        array([False,  True, False,  True])
    """
    return _cut(weights, {name: np.abs(array) for name, array in weights.items()}, sparsity, scope)


def random_cut(weights: Weights, sparsity: float, scope: Scope = "global", *, generator: np.random.Generator) -> Cut:
    """Keep weights at random, of those that are not zero: the baseline that a method has to beat."""
    scores = {name: np.where(array != 0, 1 - generator.random(array.shape), 0.0) for name, array in weights.items()}
    return _cut(weights, scores, sparsity, scope)


def _cut(weights: Weights, scores: Weights, sparsity: float, scope: Scope) -> Cut:
    """Keep what has the largest scores."""
    if scope == "layer":
        masks = {name: _largest(score.ravel(), sparsity).reshape(score.shape) for name, score in scores.items()}
    else:
        together = _largest(np.concatenate([score.ravel() for score in scores.values()]), sparsity)
        masks, start = {}, 0
        for name, score in scores.items():
            masks[name] = together[start : start + score.size].reshape(score.shape)
            start += score.size
    thresholds = {
        name: float(np.min(np.abs(weights[name]), where=mask, initial=np.inf)) for name, mask in masks.items()
    }
    return Cut(masks, thresholds)


def _largest(scores: np.ndarray[Any, Any], sparsity: float) -> np.ndarray[Any, Any]:
    """True at the round((1 − sparsity) · size) largest scores."""
    kept = round(scores.size * (1 - sparsity))
    mask = np.zeros(scores.size, dtype=bool)
    if kept == 0:
        return mask
    if kept == scores.size:
        return ~mask
    limit = np.partition(scores, scores.size - kept)[scores.size - kept]
    mask[scores > limit] = True
    ties = np.flatnonzero(scores == limit)
    mask[ties[: kept - int(np.count_nonzero(mask))]] = True
    return mask


def search(
    cut_at: Callable[[float], Cut],
    accuracy_of: Callable[[Cut], float],
    *,
    bound: float,
    size: int,
    least: float = 0.0,
) -> tuple[Cut, list[Probe]]:
    """The sparsest cut whose accuracy is at least ``bound``, by bisection over the logarithm of the density.

    Accuracy need not fall everywhere as sparsity grows; what is found is a sparsity that keeps the bound next to one
    that does not.

    Args:
        cut_at: The cut at a sparsity.
        accuracy_of: What accuracy a cut leaves.
        bound: The accuracy to keep.
        size: How many weights there are.
        least: A sparsity that is there already, and is kept.

    Returns:
        The cut, and every sparsity that was tried, in order.
    """
    best = cut_at(least)
    dense, sparse = 1 - least, 1 / size  # densities: one that is known to do, one beyond which there is nothing
    probes: list[Probe] = []
    while dense / sparse > _PRECISION and len(probes) < _PROBES:
        density = float(np.sqrt(dense * sparse))
        cut = cut_at(1 - density)
        accuracy = accuracy_of(cut)
        accepted = accuracy >= bound
        probes.append(Probe(cut.sparsity, min(cut.thresholds.values()), accuracy, accepted))
        if accepted:
            best, dense = cut, density
        else:
            sparse = density
    return best, probes
