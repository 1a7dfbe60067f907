"""Labels of the indices along axes: which of them stand for the same structure, and which must stay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onnxtrain.graph.value import Dimension


@dataclass(frozen=True, eq=False)
class Axis:
    """An axis of a tensor: a label per index, or the reason why its indices cannot be removed."""

    labels: np.ndarray | None
    reason: str = ""
    zero: bool = False
    repeats: bool = False

    def with_zero(self, zero: bool) -> Axis:
        """Return the axis with other knowledge about removed entries."""
        return self if zero == self.zero else replace(self, zero=zero)

    def taken(self, labels: np.ndarray) -> Axis:
        """Return an axis with labels that were selected or rearranged from this one's."""
        return replace(self, labels=labels)


def length(axis: Axis, size: Dimension) -> Axis | Dimension:
    """Return what counts the entries of an axis: its labels, or its size where all of them stay."""
    return size if axis.labels is None else axis


def fixed(reason: str) -> Axis:
    """Return an axis whose indices stay."""
    return Axis(None, reason)


class Labels:
    """All labels of a model, what joins them, and what locks them."""

    def __init__(self) -> None:
        self.count = 0
        self._joined: list[tuple[np.ndarray, np.ndarray]] = []
        self._locked: list[tuple[np.ndarray, str]] = []

    def new(self, size: int) -> np.ndarray:
        """Return new labels for an axis of this size."""
        self.count += size
        return np.arange(self.count - size, self.count)

    def join(self, one: np.ndarray, other: np.ndarray) -> None:
        """Join labels pair by pair: these indices are removed together."""
        if one is not other:
            self._joined.append((one, np.broadcast_to(other, one.shape)))

    def lock(self, labels: np.ndarray, reason: str) -> None:
        """Lock labels: no structure with one of them can be removed."""
        self._locked.append((labels, reason))

    def resolve(self) -> tuple[np.ndarray, dict[int, str]]:
        """Return the smallest joined label of every label, and the reason of each of these that is locked."""
        root = np.arange(self.count)
        if self._joined:
            one = np.concatenate([pair[0].reshape(-1) for pair in self._joined])
            other = np.concatenate([pair[1].reshape(-1) for pair in self._joined])
            while True:
                a, b = root[one], root[other]
                if np.array_equal(a, b):
                    break
                np.minimum.at(root, np.maximum(a, b), np.minimum(a, b))
                while not np.array_equal(jumped := root[root], root):
                    root = jumped
        reasons: dict[int, str] = {}
        for labels, reason in self._locked:
            for label in np.unique(root[labels]).tolist():
                reasons.setdefault(label, reason)
        return root, reasons
