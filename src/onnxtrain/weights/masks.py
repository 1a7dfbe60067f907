"""Masks: which weights of a model stay zero while the others train."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.errors import OptionError

if TYPE_CHECKING:
    from onnxtrain.operators.optimizer import Optimizer

KEEP = "keep"
"""The text that stands for masks that keep the zeros of pruned tensors."""

_PRUNED = 0.1
"""Fraction of exact zeros from which a tensor counts as pruned."""

_SAMPLE = 1 << 14
"""Elements of a large tensor that tell whether to read all of it."""


def choose_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    patterns: str | Sequence[str] | None,
    argument: str,
    weights: Collection[str] | None = None,
) -> list[str]:
    """The parameters that match glob patterns; without patterns the weights: not biases, nor scales.

    Args:
        shapes: All parameters.
        patterns: Glob patterns.
        argument: What the message calls the patterns.
        weights: Those that are weights, as :func:`onnxtrain.weights.of_products.product_weights` finds them;
            by default those of rank 2 and more.

    Raises:
        OptionError: A pattern matches no parameter.

    Example:
        >>> choose_tensors({"fc.weight": (3, 4), "fc.bias": (3,)}, None, "tensors")
        ['fc.weight']
    """
    if patterns is None and weights is not None:
        return list(weights)
    if patterns is None:
        return [name for name, shape in shapes.items() if len(shape) >= 2]
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in shapes):
            raise OptionError(
                f"{argument}={pattern!r} matches no parameter that is trained; they are {', '.join(list(shapes)[:8])}."
            )
    return [name for name in shapes if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def check_masks(
    masks: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], optimizers: Iterable[Optimizer]
) -> None:
    """Refuse masks that do not fit their parameters, of these shapes, or one of the optimizers.

    Raises:
        OptionError: A mask fits no parameter, or the optimizer divides 0 by 0 where a mask is false.
    """
    for name, mask in masks.items():
        if name not in shapes:
            raise OptionError(f"There is a mask for {name!r}, which is not trained; masks are for parameters.")
        wanted = shapes[name]
        if mask.dtype != bool or mask.shape != wanted:
            raise OptionError(
                f"The mask of {name!r} is {mask.dtype} of shape {mask.shape}; it needs to be bool of shape {wanted}."
            )
    for optimizer in optimizers if masks else ():
        if optimizer.schema.name != "SSGD" and optimizer.node_attributes().get("epsilon") == 0:
            raise OptionError(
                f"{optimizer.schema.name} has epsilon 0, with which the step of a masked weight is 0 / 0; "
                "give an epsilon above 0."
            )


def zero_masks(names: Iterable[str], value_of: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Return masks that keep the zeros of pruned tensors: those of which a tenth or more is zero, but not all.

    Args:
        names: The tensors to look at.
        value_of: Returns the values of a tensor.

    Example:
        >>> values = {"pruned": np.array([0.0, 1.0, 0.0]), "dense": np.ones(3), "initial": np.zeros(3)}
        >>> {name: mask.tolist() for name, mask in zero_masks(values, values.__getitem__).items()}
        {'pruned': [False, True, False]}
    """
    found = {}
    for name in names:
        array = value_of(name)
        sample = array.reshape(-1)[:: max(1, array.size // _SAMPLE)]
        if sample.size - np.count_nonzero(sample) < _PRUNED * sample.size / 2:
            continue
        mask = array != 0
        if 0 < np.count_nonzero(mask) <= (1 - _PRUNED) * mask.size:
            found[name] = np.asarray(mask)
    return found


def set_to_zero(states: MutableMapping[str, np.ndarray], masks: Mapping[str, np.ndarray]) -> None:
    """Set weights and their optimizer states (``{parameter}/...``) to zero where a mask is false, in place."""
    for name, mask in masks.items():
        for key in states:
            if key == name or (key.startswith(f"{name}/") and states[key].shape == mask.shape):
                states[key][~mask] = 0


def non_zeros(arrays: Mapping[str, np.ndarray]) -> int:
    """Count the nonzero elements of all arrays."""
    return sum(int(np.count_nonzero(array)) for array in arrays.values())
