"""Cuts by magnitude or at random, and the search for the sparsest cut that keeps an accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.parameters.layouts import Layout
from onnxtrain.plugins.pruning.options import Allocation

Weights = Mapping[str, np.ndarray]


class Steps(NamedTuple):
    """Steps of a search."""

    probes: int
    precision: float
    most: float
    fine_tuned: bool


AT_ONCE = Steps(probes=16, precision=1.02, most=math.inf, fine_tuned=False)
FINE_TUNED = Steps(probes=16, precision=1.1, most=2.0, fine_tuned=True)


@dataclass(frozen=True)
class Cut:
    """The weights that survive a cut."""

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
    fine_tuned: bool = False


def check_sparsity(sparsity: float) -> None:
    """Raise OptionError for a sparsity outside [0, 1)."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise OptionError(f"sparsity is {sparsity!r}; it needs a fraction of zeros of at least 0 and below 1.")


def cubic(final: float, part: int, parts: int, *, first: float = 0.0) -> float:
    """Cubic schedule: the sparsity of cut ``part`` of ``parts``, steep at first, flat at the end.

    Source: M. Zhu, S. Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression",
    ICLR Workshop 2018.

    Example:
        >>> [round(cubic(0.9, part, 3), 3) for part in (1, 2, 3)]
        [0.633, 0.867, 0.9]
    """
    return final + (first - final) * (1 - part / parts) ** 3


@dataclass(frozen=True)
class Form:
    """The weights that a cut keeps or removes together, and how sparse each tensor becomes."""

    block: tuple[int, int] = (1, 1)
    n_m: tuple[int, int] | None = None
    allocation: Allocation = "global"
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    held: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def needs_layouts(self) -> bool:
        """True where the cut depends on which axes of a tensor are outputs and inputs."""
        return self.block != (1, 1) or self.n_m is not None or self.allocation == "flops"


SINGLE = Form()
"""Single weights, ranked over all tensors."""


def magnitude_cut(weights: Weights, sparsity: float, form: Form = SINGLE) -> Cut:
    """Keep the weights of largest magnitude, or the blocks of largest norm.

    Example:
        >>> magnitude_cut({"w": np.array([1.0, -3.0, 0.5, 2.0])}, 0.5).masks["w"]
        array([False,  True, False,  True])
    """
    return _cut(weights, {name: np.abs(array) for name, array in weights.items()}, sparsity, form)


def random_cut(weights: Weights, sparsity: float, form: Form = SINGLE, *, generator: np.random.Generator) -> Cut:
    """Keep random non-zero weights: the baseline of the other methods."""
    scores = {name: np.where(array != 0, 1 - generator.random(array.shape), 0.0) for name, array in weights.items()}
    return _cut(weights, scores, sparsity, form)


def _cut(weights: Weights, scores: Weights, sparsity: float, form: Form) -> Cut:
    """Keep the weights with the largest scores."""
    if form.n_m is not None:
        masks = {name: _n_of_m(score, form.layouts[name], form.n_m, sparsity) for name, score in scores.items()}
    elif form.block != (1, 1):
        masks = _block_masks(scores, sparsity, form)
    else:
        masks = _single_masks(scores, sparsity, form)
    masks = {name: mask & form.held[name] if name in form.held else mask for name, mask in masks.items()}
    thresholds = {
        name: float(np.min(np.abs(weights[name]), where=mask, initial=np.inf)) for name, mask in masks.items()
    }
    return Cut(masks, thresholds)


def _single_masks(scores: Weights, sparsity: float, form: Form) -> dict[str, np.ndarray]:
    if form.allocation == "uniform":
        return {name: _largest(score.ravel(), sparsity).reshape(score.shape) for name, score in scores.items()}
    ranked = {name: score / _cost(name, form) for name, score in scores.items()}
    together = _largest(np.concatenate([score.ravel() for score in ranked.values()]), sparsity)
    masks, start = {}, 0
    for name, score in scores.items():
        masks[name] = together[start : start + score.size].reshape(score.shape)
        start += score.size
    return masks


def _block_masks(scores: Weights, sparsity: float, form: Form) -> dict[str, np.ndarray]:
    """Keep the blocks with the largest root mean square of scores."""
    blocks = {name: form.layouts[name].block(*form.block) for name in scores}
    means, sizes = {}, {}
    for name, score in scores.items():
        free = np.asarray(form.held.get(name, np.ones(score.shape)), float)
        sums, counts = (_block_sums(array, blocks[name]) for array in (np.square(score) * free, free))
        means[name], sizes[name] = np.sqrt(sums / np.maximum(counts, 1)) / _cost(name, form), counts
    kept = {}
    groups = [[name] for name in scores] if form.allocation == "uniform" else [list(scores)]
    for names in groups:
        flat = np.concatenate([means[name].ravel() for name in names])
        size = np.concatenate([sizes[name].ravel() for name in names])
        order = np.argsort(-flat, kind="stable")
        # At most round((1 − sparsity) · size) weights: whole blocks only.
        whole = sum(scores[name].size for name in names)
        fits = np.cumsum(size[order]) <= round(whole * (1 - sparsity))
        mask = np.zeros(flat.size, dtype=bool)
        mask[order[fits]] = True
        start = 0
        for name in names:
            kept[name] = mask[start : start + means[name].size].reshape(means[name].shape)
            start += means[name].size
    return {name: _spread(kept[name], blocks[name], score.shape) for name, score in scores.items()}


def _block_sums(array: np.ndarray, block: Sequence[int]) -> np.ndarray:
    """Return the sum of each block: one value per block along each axis."""
    for axis, length in enumerate(block):
        if array.shape[axis]:
            array = np.add.reduceat(array, np.arange(0, array.shape[axis], length), axis=axis)
    return array


def _spread(mask: np.ndarray, block: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Return the mask of the weights from that of their blocks."""
    for axis, length in enumerate(block):
        if length > 1:
            mask = np.repeat(mask, length, axis=axis)
    return np.ascontiguousarray(mask[tuple(map(slice, shape))])


def _n_of_m(score: np.ndarray, layout: Layout, n_m: tuple[int, int], sparsity: float) -> np.ndarray:
    """Keep n of each m successive inputs of an output; more where the sparsity does not yet ask for so few."""
    n, m = n_m
    kept = min(m, max(n, round(m * (1 - sparsity))))
    rows = layout.rows(score)
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % m)), constant_values=-1.0)  # chosen last
    parts = padded.reshape(len(rows), padded.shape[1] // m, m)
    order = np.argsort(-parts, axis=-1, kind="stable")
    mask = np.zeros(parts.shape, dtype=bool)
    np.put_along_axis(mask, order[..., :kept], values=True, axis=-1)
    return np.ascontiguousarray(layout.stored(mask.reshape(padded.shape)[:, : rows.shape[1]]))


def _cost(name: str, form: Form) -> float:
    """Return the divisor of the scores of a tensor."""
    return max(form.layouts[name].uses, 1) ** 0.25 if form.allocation == "flops" else 1.0


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
    steps: Steps = AT_ONCE,
    accept: Callable[[Cut], None] = lambda cut: None,
) -> tuple[Cut, list[Probe]]:
    """Find a sparse cut whose accuracy is at least ``bound``, by bisection over the logarithm of the density.

    If accuracy does not fall monotonically with sparsity, a sparser cut may keep the bound, too.
    """
    best = cut_at(least)
    dense, sparse = 1 - least, 1 / size  # densities: an accepted one, and the lowest possible one
    probes: list[Probe] = []
    while dense / sparse > steps.precision and len(probes) < steps.probes:
        density = max(float(np.sqrt(dense * sparse)), dense / steps.most)
        cut = cut_at(1 - density)
        accuracy = accuracy_of(cut)
        accepted = accuracy >= bound
        probes.append(Probe(cut.sparsity, min(cut.thresholds.values()), accuracy, accepted, steps.fine_tuned))
        if accepted:
            best, dense = cut, density
            accept(cut)
        else:
            sparse = density
    return best, probes
