"""Cuts by magnitude or at random, and the search for the sparsest cut that keeps an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from onnxtrain.errors import OptionError

Scope = Literal["global", "layer"]
Weights = Mapping[str, np.ndarray]

_PROBES = 16
"""Largest number of sparsities that a search tries."""

_PRECISION = 1.02
"""A search ends when the densities on both sides of the bound are within this factor."""


@dataclass(frozen=True)
class Cut:
    """The weights that survive a cut.

    Attributes:
        masks: By tensor, true for the remaining weights.
        thresholds: By tensor, the smallest remaining magnitude; infinite if none remains.
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
        """The tensors without a remaining weight."""
        return [name for name, mask in self.masks.items() if mask.size and not mask.any()]


@dataclass(frozen=True)
class Probe:
    """One sparsity that a search tried, with its accuracy."""

    sparsity: float
    threshold: float
    accuracy: float
    accepted: bool


def check_sparsity(sparsity: float) -> None:
    """Raise OptionError for a sparsity outside [0, 1)."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise OptionError(f"sparsity is {sparsity!r}; it needs a fraction of zeros of at least 0 and below 1.")


def cubic(final: float, part: int, parts: int, *, first: float = 0.0) -> float:
    """Cubic schedule: the sparsity of cut ``part`` of ``parts``, steep at first, flat at the end.

    s = final + (first − final) (1 − part / parts)³

    Source: M. Zhu, S. Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression",
    ICLR Workshop 2018.

    Example:
        >>> [round(cubic(0.9, part, 3), 3) for part in (1, 2, 3)]
        [0.633, 0.867, 0.9]
    """
    return final + (first - final) * (1 - part / parts) ** 3


def magnitude_cut(weights: Weights, sparsity: float, scope: Scope = "global") -> Cut:
    """Keep the weights of largest magnitude, over all tensors together or in each separately.

    Exactly round((1 − sparsity) · size) weights remain; of equal ones, the first.

    Example:
        >>> magnitude_cut({"w": np.array([1.0, -3.0, 0.5, 2.0])}, 0.5).masks["w"]
        array([False,  True, False,  True])
    """
    return _cut(weights, {name: np.abs(array) for name, array in weights.items()}, sparsity, scope)


def random_cut(weights: Weights, sparsity: float, scope: Scope = "global", *, generator: np.random.Generator) -> Cut:
    """Keep random non-zero weights: the baseline of the other methods."""
    scores = {name: np.where(array != 0, 1 - generator.random(array.shape), 0.0) for name, array in weights.items()}
    return _cut(weights, scores, sparsity, scope)


def _cut(weights: Weights, scores: Weights, sparsity: float, scope: Scope) -> Cut:
    """Keep the weights with the largest scores."""
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
    """Return a mask of the round((1 − sparsity) · size) largest scores."""
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
    """Find a sparse cut whose accuracy is at least ``bound``, by bisection over the logarithm of the density.

    If accuracy does not fall monotonically with sparsity, a sparser cut may keep the bound, too.

    Args:
        cut_at: Computes the cut at a sparsity.
        accuracy_of: Measures the accuracy of a cut.
        bound: The accuracy to keep.
        size: Number of weights.
        least: The sparsity of the current weights; its cut is accepted without a measurement.

    Returns:
        The cut, and the sparsities tried, in order.
    """
    best = cut_at(least)
    dense, sparse = 1 - least, 1 / size  # densities: an accepted one, and the lowest possible one
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
