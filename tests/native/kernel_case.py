"""A call of a native kernel, and samplers of random calls: ordinary sizes, edge cases, absurd values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

EXTREMES = (0, 1, -1, 2**31 - 1, 2**31, 2**31 + 1, 2**60, 2**62, 2**63 - 1, -(2**63))
"""Values at which products and sums of sizes overflow."""

MOST = 100_000
"""Elements of an array up to which results are compared with a reference."""


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        operator: Its name.
        feeds: Its inputs by name, in order; ``None`` for one that is left out.
        attributes: Its attributes.
        outputs: How many it has.
        expected: The required result, if known; an extreme attribute may still be refused.
        domain: Its domain.
        types: The element types of its outputs, if they differ from the last floating-point input's.
        constants: The inputs that are initializers of the model.
    """

    operator: str
    feeds: dict[str, np.ndarray | None]
    attributes: dict[str, Any]
    outputs: int = 1
    expected: Callable[[], list[np.ndarray]] | None = None
    domain: str = "onnxtrain"
    types: tuple[Any, ...] | None = None
    constants: tuple[str, ...] = ()


def pick(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def some(rng: np.random.Generator, low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(low, high + 1, count))


def floating(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype) if 0 in shape else np.asarray(rng.standard_normal(shape), dtype)


def element_type(rng: np.random.Generator) -> Any:
    return pick(rng, np.float32, np.float64)


def replaced(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])


def any_shape(rng: np.random.Generator) -> tuple[int, ...]:
    """Of a few elements, or of none but with huge axes."""
    if rng.random() < 0.2:
        sizes = [0, pick(rng, 2**31, 2**40, 2**58), 1, 2][: int(rng.integers(2, 5))]
        return tuple(int(n) for n in rng.permutation(sizes))
    return some(rng, 0 if rng.random() < 0.2 else 1, 40, int(rng.integers(1, 4)))
