"""Compute the outputs of frozen layers once for all examples, as the data that their trained part is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from onnxtrain.data import Batch, Dataset
from onnxtrain.data.array_dataset import ArrayDataset
from onnxtrain.data.base import share
from onnxtrain.data.conversion import Array
from onnxtrain.errors import DataError, OptionError
from onnxtrain.model_file.large_data import free_memory
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training.features import divide
from onnxtrain.training.inference.evaluation import Evaluator
from onnxtrain.training.objective import Objective

_TOLERANCE = 1e-3
"""Relative difference of features that rounding explains."""


def compute_features(
    objective: Objective, states: StateBuffers, options: RuntimeOptions, dataset: Dataset, batch_size: int
) -> tuple[Dataset, str]:
    """Compute the features of all examples, batch by batch."""
    if dataset.size is None:
        raise OptionError(
            f"cache_features needs data of known length, but {dataset.name} does not say how many examples it has; "
            "give arrays or a data set with a length, or leave cache_features out."
        )
    for spec in objective.inputs:
        if spec.common and spec.shape:
            raise OptionError(
                f"cache_features keeps a row for each example, but the input {spec.name!r} has one value for all of "
                "them; leave cache_features out."
            )
    sources = divide(objective).sources
    fixed = objective.fixed_batch
    inputs = {spec.name for spec in objective.inputs}
    computed = [source for source in sources.values() if source not in inputs]
    run = Evaluator(objective, states, options).runner(computed)

    def features(batch: Batch) -> dict[str, Array]:
        given = {name: array for name, array in batch.inputs.items() if name in inputs}
        results = run(given if fixed is None else fixed.filled(given))
        return {
            name: given[source] if source in inputs else results[source][: batch.size]
            for name, source in sources.items()
        }

    size = batch_size if fixed is None else fixed.size
    kept: dict[str, Array] = {}
    targets: Array | None = None
    end = 0
    for batch in dataset.batches(size):
        found = features(batch) | {name: array for name, array in batch.inputs.items() if name not in inputs}
        if not end:
            _check_first(dataset, batch, found, features, size)
            _check_memory({sources[name]: found[name] for name in sources}, batch.size, dataset)
            kept = {name: np.empty((dataset.size, *array.shape[1:]), array.dtype) for name, array in found.items()}
            if batch.targets is not None:
                targets = np.empty((dataset.size, *batch.targets.shape[1:]), batch.targets.dtype)
        for name, array in found.items():
            if array.shape[1:] != kept[name].shape[1:]:
                raise OptionError(
                    f"cache_features keeps the features of all examples in one array, but {name!r} has the shape "
                    f"{kept[name].shape[1:]} for the first examples and {array.shape[1:]} for those from {end} on; "
                    "bring the examples to one size, or leave cache_features out."
                ).about(name, got=array.shape[1:], wanted=kept[name].shape[1:])
            kept[name][end : end + batch.size] = array
        if targets is not None and batch.targets is not None:
            targets[end : end + batch.size] = batch.targets
        end += batch.size
    if end != dataset.size:
        raise DataError(f"{dataset.name} has {dataset.size} examples by its length, but gave {end}.")
    bytes_kept = sum(kept[name].nbytes for name in sources)
    text = f"The features of {end:,} examples ({', '.join(sources.values())}) take {_shown(bytes_kept)} of memory."
    return ArrayDataset(kept, targets, name=dataset.name), text


def _check_first(
    dataset: Dataset,
    batch: Batch,
    found: Mapping[str, Array],
    features: Callable[[Batch], dict[str, Array]],
    batch_size: int,
) -> None:
    """Check that the first examples are the same when they are read again, and their features without the others."""
    again = next(iter(dataset.batches(batch_size)))
    for name, array in batch.inputs.items():
        if not np.array_equal(array, again.inputs[name]):
            raise OptionError(
                f"cache_features reads every example once, but {dataset.name} gives other values of {name!r} when it "
                "is read again, as with random transforms; leave them or cache_features out."
            ).about(name)
    if batch.size == 1:
        return
    alone = features(share(batch, slice(0, batch.size // 2)))
    for name, array in alone.items():
        expected = found[name][: len(array)]
        scale = np.abs(expected.astype(np.float64)).max(initial=0.0)
        if array.shape != expected.shape or not np.allclose(array, expected, _TOLERANCE, _TOLERANCE * scale):
            raise OptionError(
                f"cache_features needs features that depend on one example each, but {name!r} depends on the other "
                "examples of a batch, too; leave cache_features out."
            ).about(name)


def _check_memory(features: Mapping[str, Array], rows: int, dataset: Dataset) -> None:
    """Refuse features that are larger than the free memory, where the system says how much is free."""
    assert dataset.size is not None
    needed = sum(array.nbytes for array in features.values()) // rows * dataset.size
    free = free_memory()
    if free is not None and needed > free:
        raise OptionError(
            f"cache_features keeps {', '.join(features)} of {dataset.size:,} examples, which takes {_shown(needed)}, "
            f"but {_shown(free)} of memory are free; freeze more layers, or leave cache_features out."
        ).about("cache_features", got=free, wanted=needed)


def _shown(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
