"""Choose the structures to remove: the least important ones, until a target is reached."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.plugins.pruning.options import Structure
from onnxtrain.plugins.structures.axes import Structures

STRUCTURES: tuple[Structure, ...] = ("channels", "heads", "hidden")

_LEAST = 0.1
"""Fraction of every layer that stays."""

_VECTOR, _NARROW = 16, 4
"""Convolutions keep multiples of these numbers of channels, the second below twice the first.

ONNX Runtime pads channels to 16 where they are a multiple of 4, and has slower kernels where they are not. Measured on
an Intel Xeon with AVX-512 by ``python benchmarks/structures.py --channels``.
"""

Cost = Callable[[np.ndarray], float]
"""The cost of a model, from whether each label stays."""


def removal_order(
    structures: Structures,
    kinds: Collection[Structure],
    *,
    spreads: Mapping[str, np.ndarray] | None = None,
    by_layer: bool = False,
    seed: int | None = None,
) -> list[int]:
    """Return the structures that may go, the least important first; a tenth of every layer stays.

    The importance of a structure is the spread that it adds to the results of the layers that read it, or without
    examples the norm of its weights. Both are divided by the mean of the layer, tensor by tensor, since layers differ
    in scale.
    """
    candidates = structures.tagged(kinds)
    if not candidates.size:
        return []
    parts = structures.parts()
    layers = _layers(candidates, parts, len(structures.roots))
    scores = _squares(structures, spreads)[candidates] ** 0.5
    if seed is not None:
        scores = np.random.default_rng(seed).random(len(candidates))
    for layer in np.unique(layers):
        own = layers == layer
        if by_layer:
            scores[own] = np.argsort(np.argsort(scores[own])) / own.sum()
        else:
            scores[own] /= max(float(scores[own].mean()), 1e-12)
    ordered = candidates[np.argsort(scores, kind="stable")]
    return _leaving_some(ordered, parts)


def in_vectors(structures: Structures, removed: list[int]) -> list[int]:
    """Return the removed structures without the channels that would be padded anyway, so that they can stay."""
    rank = np.full(len(structures.roots), -1)
    rank[removed] = np.arange(len(removed))
    axes = [axis for axis in structures.made("channels") if (rank[axis] >= 0).any()]
    changed = True
    while changed:
        changed = False
        for axis in axes:
            ranks = rank[axis]
            left, multiple = int((ranks < 0).sum()), _VECTOR if len(axis) >= 2 * _VECTOR else _NARROW
            if left % multiple == 0:
                continue
            back, entries = np.unique(ranks[ranks >= 0], return_counts=True)
            fitting = np.flatnonzero((left + np.cumsum(entries[::-1])) % multiple == 0)
            if fitting.size:
                rank[np.array(removed)[back[::-1][: fitting[0] + 1]]] = -1
                changed = True
    return [root for root in removed if rank[root] >= 0]


def beginnings(order: list[int], structures: Structures) -> tuple[Callable[[int], list[int]], ...]:
    """Return functions of a number of structures at the beginning of an order: those that save vectors, and all."""
    return (lambda count: in_vectors(structures, order[:count])), (lambda count: order[:count])


def first_reaching(order: list[int], structures: Structures, cost: Cost, most: float) -> list[int]:
    """Return the beginning of an order whose removal brings the cost to a value or below."""
    for chosen in beginnings(order, structures):

        def left(count: int, chosen: Callable[[int], list[int]] = chosen) -> float:
            return cost(structures.kept(chosen(count)))

        if left(len(order)) <= most:
            return chosen(bisect_left(range(len(order)), True, key=lambda count: left(count) <= most))
    raise OptionError(
        f"The target cannot be reached: with all structures removed that may go (a tenth of each layer stays), "
        f"{left(len(order)) / max(left(0), 1e-12):.0%} of the cost remains; choose a lower target, or more kinds of "
        "structures."
    )


def _squares(structures: Structures, spreads: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Return the importance of each structure, squared: the mean over the tensors that have a part of it."""
    total, count = np.zeros(len(structures.roots)), np.zeros(len(structures.roots))

    def add(parts: Iterator[tuple[np.ndarray, np.ndarray]], free: np.ndarray) -> None:
        for roots, squares in parts:
            here = np.unique(roots)
            if free[here].all():
                own = np.bincount(roots, squares, len(total))
                total[here] += own[here] / max(float(own[here].mean()), 1e-12)
                count[here] += 1

    if spreads is not None:
        add(_added(structures, spreads), count == 0)
    add(_norms(structures), count == 0)
    return np.asarray(total / np.maximum(count, 1))


def _added(structures: Structures, spreads: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the structures along the inputs of layers, and the variance that each entry adds to the results."""
    for name, weight, axis, roots in structures.read():
        spread = spreads.get(name)
        if spread is not None and len(spread) == len(roots):
            squares = np.square(weight.astype(np.float64))
            norms = squares.sum(axis=tuple(other for other in range(weight.ndim) if other != axis))
            yield roots, np.square(spread) * norms


def _norms(structures: Structures) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the structures along the axes of the weights, and the square of each entry's norm; vectors are left out."""
    for value, axes in structures.parameters():
        tensor = value.const_value
        if not structures.is_weight(value) or tensor is None or sum(size != 1 for size in tensor.shape) < 2:
            continue
        squares = np.square(np.asarray(tensor.numpy()).astype(np.float64))
        for place, axis in enumerate(axes):
            if axis.labels is not None:
                yield (
                    structures.of(axis),
                    squares.sum(axis=tuple(other for other in range(squares.ndim) if other != place)),
                )


def _layers(candidates: np.ndarray, parts: list[np.ndarray], size: int) -> np.ndarray:
    """Return a number for each structure that those have in common which lie on the same axes."""
    number = np.arange(size)
    for part in parts:
        number[np.isin(number, number[part])] = number[part].min()
    return np.asarray(number[candidates])


def _leaving_some(ordered: np.ndarray, parts: list[np.ndarray]) -> list[int]:
    """Leave structures out of an order without which too little of an axis would remain."""
    allowance = [len(part) - max(1, math.ceil(_LEAST * len(part))) for part in parts]
    of: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        for root in part.tolist():
            of.setdefault(root, []).append(number)
    found = []
    for root in ordered.tolist():
        numbers = of.get(root, [])
        if all(allowance[number] > 0 for number in numbers):
            found.append(root)
            for number in numbers:
                allowance[number] -= 1
    return found
