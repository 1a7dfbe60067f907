"""Open data of any accepted form for a model."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxtrain.data.array_dataset import ArrayDataset
from onnxtrain.data.base import Dataset, DataSource
from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.files import Reader, open_arrays
from onnxtrain.data.images import ImageFolder
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.map_dataset import (
    HuggingFaceExamples,
    IndexedExamples,
    MapDataset,
    is_hugging_face,
    is_map_style,
    refuse_other_kinds,
)
from onnxtrain.data.naming import Wanted, is_array_like, is_batch_list, is_frame
from onnxtrain.errors import DataError
from onnxtrain.errors._internal import classes_in

Source = Any
"""Data in any form that :func:`open_dataset` takes."""


def open_dataset(
    source: object,
    specs: Sequence[TensorSpec],
    *,
    target: str | None = None,
    need_target: bool = True,
    validate: bool = True,
    others: Sequence[str] = (),
    columns: Mapping[str | None, Sequence[str]] = MappingProxyType({}),
) -> Dataset:
    """Open data of any accepted form for a model."""
    if isinstance(source, Dataset):
        return source.in_order_of(specs)
    beside = [TensorSpec(name, np.dtype(np.float32), beside=True) for name in others]
    wanted = Wanted([*specs, *beside], target, need_target, columns)
    if others and isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        source = wanted.with_targets(source[0], source[1], "the data")
    dataset = _examples(source, wanted) or _arrays(source, wanted) or _batches(source, wanted)
    if validate:
        dataset.validate()
    return dataset


def _examples(source: object, wanted: Wanted) -> Dataset | None:
    """Return the dataset of a source of examples by index, or None for another source."""
    if is_hugging_face(source):
        refuse_other_kinds(source)
        examples = HuggingFaceExamples(source, wanted)
        return MapDataset(examples, dataclasses.replace(wanted, target=None), name="the dataset")  # a batch has targets
    if isinstance(source, DataSource):
        return source.dataset(wanted)
    if is_map_style(source) and not is_array_like(source) and not is_frame(source):
        name = f"the {type(source).__name__}"
        return MapDataset(IndexedExamples(source, name, wanted.specs), wanted, name=name)
    return None


def _arrays(source: object, wanted: Wanted) -> Dataset | None:
    """Return the dataset of a source of arrays, or None for a source of batches."""
    name, specs = "the data", wanted.specs
    path = source.path if isinstance(source, Reader) else source
    if isinstance(path, str | os.PathLike) and "\0" in str(path):
        raise DataError(f"the path {str(path)!r} has a NUL character, which no path can have.").about(str(path))
    if isinstance(source, str | os.PathLike) and (reader := reader_of(source)) is not None:
        source = reader(source)
    if isinstance(source, Reader):
        name, found = source.name, source.read(specs, target=wanted.target, need_target=wanted.need_target)
    elif isinstance(source, str | os.PathLike):
        name, arrays = f"'{Path(source)}'", open_arrays(source)
        alone = len(arrays) == len(specs) == 1 and not wanted.need_target and wanted.target is None
        if alone and Path(source).is_file():
            arrays = {specs[0].name: next(iter(arrays.values()))}  # the only array for the only input
        found = wanted.of_names(arrays, name)
    elif is_frame(source):
        name, found = "the table", wanted.of_frame(source)
    elif isinstance(source, Mapping) or is_array_like(source) or (type(source) is float and specs[0].shape == ()):
        found = wanted.of_batch(source, name)
    elif not isinstance(source, list | tuple) or not source or is_batch_list(source):
        return None
    elif _is_table_of_inputs(source, specs):
        found = wanted.without_target().of_frame(source[0])[0], source[1]
    else:
        found = wanted.of_positions(source, name)
    inputs = [spec for spec in specs if not spec.beside]
    if any(spec.time_of == "" for spec in inputs):  # nothing to cut: one ready batch
        return IterableDataset([found[0] if found[1] is None else found], wanted)
    return ArrayDataset(*wanted.joined(found, name), specs=inputs, name=name)


def _is_table_of_inputs(source: Sequence[object], specs: Sequence[TensorSpec]) -> bool:
    """Return whether a source is a table with one column per input, and targets."""
    pair = isinstance(source, tuple) and len(source) == 2 and is_frame(source[0]) and is_array_like(source[1])
    return pair and len(specs) > 1 and not any(spec.beside for spec in specs)


def _batches(source: object, wanted: Wanted) -> Dataset:
    if not isinstance(source, Iterable) and not callable(source):
        raise DataError(
            f"the data is a {type(source).__name__}; give a path, a mapping from name to array, "
            f"(inputs, targets), or an iterable of batches."
        )
    return IterableDataset(source, wanted)


def reader_of(path: str | os.PathLike[str]) -> type[Reader] | None:
    """Return the class that reads a path, or None if memory mapping suffices."""
    return next((reader for reader in readers() if reader.reads(path)), None)


@functools.cache
def readers() -> list[type[Reader]]:
    """Return the readers of paths: those in the modules ``*_file`` of this folder, and that of folders of images."""
    return [*classes_in(__name__.rpartition(".")[0], Reader, "_file").values(), ImageFolder]  # type: ignore[type-abstract]
