"""Axes of operators whose inputs broadcast, and of operators that keep the shape of their input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node

Zero = Callable[[Sequence[Axis | None]], bool]
"""Decides whether removed entries of the result are zero, from the operands' axes (``None``: it broadcasts)."""


def all_zero(axes: Sequence[Axis | None]) -> bool:
    """Sums and selections are zero where all operands are."""
    return all(axis is not None and axis.zero for axis in axes)


def any_zero(axes: Sequence[Axis | None]) -> bool:
    """Products are zero where one factor is."""
    return any(axis is not None and axis.zero for axis in axes)


def first_zero(axes: Sequence[Axis | None]) -> bool:
    """Quotients and powers are zero where the first operand is."""
    return axes[0] is not None and axes[0].zero


def never_zero(axes: Sequence[Axis | None]) -> bool:
    """Other results may have any value."""
    return False


def broadcast(node: Node, indices: Iterable[int], zero: Zero, *, skip: int = 0) -> list[Axis]:
    """Join the axes of inputs that broadcast, aligned at the last axis."""
    inputs = [index for index in indices if node.has(index)]
    ranks = {index: node.rank(index) - skip for index in inputs}
    found: list[Axis] = []
    for position in range(-max(ranks.values()), 0):
        operands: list[Axis | None] = []
        for index in inputs:
            place = position - skip
            if ranks[index] < -position or (
                node.shape(index)[place] == 1
                and any(_wide(node, other, place, ranks[other], position) for other in inputs)
            ):
                operands.append(None)
            else:
                operands.append(node.axis(index, place))
        joined = node.join(*(axis for axis in operands if axis is not None))
        found.append(joined.with_zero(zero(operands)))
    return found


def _wide(node: Node, index: int, place: int, rank: int, position: int) -> bool:
    return rank >= -position and node.shape(index)[place] != 1


def same_shape(node: Node, *, keeps_zero: bool, mixed: Iterable[int] = (), reason: str = "mixes it") -> list[Axis]:
    """Return the axes of the first input for the output, fixed where the operator mixes the entries of an axis."""
    places = {axis % max(node.rank(), 1) for axis in mixed}
    found = []
    for position in range(node.rank()):
        axis = node.axis(0, position)
        if position in places:
            found.append(node.fix(axis, f"{node.describe()} {reason}"))
        else:
            found.append(axis.with_zero(axis.zero and keeps_zero))
    return found
