"""Augmentation: a function that changes the inputs of training batches, with reproducible random numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from onnxtrain.data import Batch
from onnxtrain.errors import DataError

Augment = Callable[[Any, np.random.Generator], Any]
"""``augment(inputs, rng)`` returns changed inputs of the same types and shapes. A single input is an array [N, ...],
several are a dictionary of arrays by name."""


def augmented(
    batches: Iterator[Batch], augment: Augment, *, seed: int, epoch: int, start: int, rank: int = 0
) -> Generator[Batch]:
    """Yield batches with changed inputs.

    The random numbers of a batch depend only on seed, epoch and its index in the epoch, so that a resumed training
    repeats them.
    """
    for index, batch in enumerate(batches, start):
        if not batch.size:  # other processes have all of its examples
            yield batch
            continue
        sequence = np.random.SeedSequence([seed, epoch, index, *([rank] if rank else [])], spawn_key=(2,))
        generator = np.random.Generator(np.random.PCG64(sequence))
        inputs = {name: np.array(array) for name, array in batch.inputs.items()}  # the caller's data must not change
        single = next(iter(inputs)) if len(inputs) == 1 else None
        found = augment(inputs if single is None else inputs[single], generator)
        given = found if single is None else {single: found}
        yield batch._replace(inputs={name: _checked(given, name, array) for name, array in inputs.items()})


def _checked(given: Any, name: str, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not isinstance(given, dict) or name not in given or given[name] is None:
        raise DataError(f"augment returned nothing for the input '{name}'; it must return the changed inputs.")
    array = np.asarray(given[name])
    if array.shape != like.shape:
        raise DataError(f"augment returned shape {array.shape} for the input '{name}'; it must keep {like.shape}.")
    if array.dtype.kind != like.dtype.kind and not np.can_cast(array.dtype, like.dtype, "same_kind"):
        raise DataError(f"augment returned {array.dtype} for the input '{name}'; it must keep {like.dtype}.")
    return np.ascontiguousarray(array, like.dtype)
