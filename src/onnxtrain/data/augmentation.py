"""Augmentation: a function that changes the inputs of training batches, by random numbers that can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from onnxtrain.data import Batch
from onnxtrain.errors import DataError

Augment = Callable[[Any, np.random.Generator], Any]
"""``augment(inputs, rng)``: inputs of a batch to other inputs of the same types and shapes. One input is its array [N,
...], several are a dictionary of arrays by name."""


def augmented(
    batches: Iterator[Batch], augment: Augment, *, seed: int, epoch: int, start: int, rank: int = 0
) -> Generator[Batch]:
    """Batches with their inputs changed.

    The random numbers of a batch follow from seed, epoch and its place in the epoch alone, so that a resumed training
    has the same.

    Args:
        batches: the batches.
        augment: the function.
        seed: that of the training.
        epoch: which epoch this is, from 0.
        start: the place of the first batch in the epoch.
        rank: that of this process, of several that train together: each draws its own numbers for its part.

    Raises:
        DataError: the function returns other types or shapes; the message names the input.
    """
    for place, batch in enumerate(batches, start):
        if not batch.size:  # other processes have it all
            yield batch
            continue
        sequence = np.random.SeedSequence([seed, epoch, place, *([rank] if rank else [])], spawn_key=(2,))
        generator = np.random.Generator(np.random.PCG64(sequence))
        inputs = {name: np.array(array) for name, array in batch.inputs.items()}  # the data are the caller's
        single = next(iter(inputs)) if len(inputs) == 1 else None
        found = augment(inputs if single is None else inputs[single], generator)
        given = found if single is None else {single: found}
        yield batch._replace(inputs={name: _checked(given, name, array) for name, array in inputs.items()})


def _checked(given: Any, name: str, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not isinstance(given, dict) or name not in given or given[name] is None:
        raise DataError(f"augment returned nothing for the input '{name}'; it returns the changed inputs.")
    array = np.asarray(given[name])
    if array.shape != like.shape:
        raise DataError(f"augment made the shape {array.shape} of the input '{name}', which had {like.shape}.")
    if array.dtype.kind != like.dtype.kind and not np.can_cast(array.dtype, like.dtype, "same_kind"):
        raise DataError(f"augment made {array.dtype} of the input '{name}', which is {like.dtype}.")
    return np.ascontiguousarray(array, like.dtype)
