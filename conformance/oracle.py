"""Derivatives by central differences in float64, with an estimate of their own error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
Objective = Callable[[Arrays], float]


class UnsureError(ArithmeticError):
    """Steps of two sizes give different derivatives: the objective has a kink there, or too little precision."""


def gradient(objective: Objective, at: Arrays, name: str, *, step: float = 1e-4, limit: float = 1e-5) -> np.ndarray:
    """The gradient of a function by one of its arguments, to fourth order.

    Args:
        objective: The function.
        at: Its arguments, in float64.
        name: The argument to differentiate by.
        step: Size of the smaller of the two steps.
        limit: Largest difference between the two steps, relative to the larger of one and the largest derivative.

    Raises:
        UnsureError: The two steps differ by more.
    """

    def slope(index: tuple[int, ...], h: float) -> float:
        return (objective(_moved(at, name, index, h)) - objective(_moved(at, name, index, -h))) / (2 * h)

    return _extrapolated(slope, at[name].shape, step, limit, name)


def second(
    objective: Objective, at: Arrays, name: str, direction: Arrays, *, step: float = 1e-3, limit: float = 1e-3
) -> np.ndarray:
    """The gradient of <direction, gradient of the function> by one argument, to fourth order.

    Args:
        objective: The function.
        at: Its arguments, in float64.
        name: The argument to differentiate by.
        direction: A direction for each argument of the first gradient.
        step: Size of the smaller of the two steps.
        limit: As in :func:`gradient`.

    Raises:
        UnsureError: The two steps differ by more.
    """

    def along(size: float) -> dict[str, np.ndarray]:
        return {key: array + size * direction[key] if key in direction else array for key, array in at.items()}

    def mixed(index: tuple[int, ...], h: float) -> float:
        after, before = along(h), along(-h)
        rise = objective(_moved(after, name, index, h)) - objective(_moved(after, name, index, -h))
        fall = objective(_moved(before, name, index, h)) - objective(_moved(before, name, index, -h))
        return (rise - fall) / (4 * h * h)

    return _extrapolated(mixed, at[name].shape, step, limit, name)


def _moved(at: Arrays, name: str, index: tuple[int, ...], by: float) -> dict[str, np.ndarray]:
    moved = np.array(at[name])
    moved[index] += by
    return {**at, name: moved}


def _extrapolated(
    slope: Callable[[tuple[int, ...], float], float], shape: tuple[int, ...], step: float, limit: float, name: str
) -> np.ndarray:
    near, far = np.zeros(shape), np.zeros(shape)
    for index in np.ndindex(shape):
        near[index], far[index] = slope(index, step), slope(index, 2 * step)
    result = (4 * near - far) / 3
    error = float(np.max(np.abs(near - far), initial=0.0)) / max(1.0, float(np.max(np.abs(result), initial=0.0)))
    if not error <= limit:
        raise UnsureError(
            f"The derivative by {name!r} differs by {error:.2g} between steps of {step:g} and {2 * step:g}, more than "
            f"{limit:g}: the inputs are near a kink, or the evaluator has too little precision."
        )
    return result
