"""Open data of any accepted form for a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.data.array_dataset import ArrayDataset
from onnxtrain.data.base import Dataset
from onnxtrain.data.conversion import TensorSpec, is_array_like
from onnxtrain.data.files import Reader, open_arrays
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.map_dataset import (
    Examples,
    ExampleSource,
    HuggingFaceExamples,
    IndexedExamples,
    MapDataset,
    is_hugging_face,
    is_map_style,
    refuse_other_kinds,
)
from onnxtrain.data.naming import (
    is_batch_list,
    is_frame,
    joined,
    match_batch,
    match_frame,
    match_names,
    match_positions,
)
from onnxtrain.errors import DataError
from onnxtrain.errors._internal import classes_in

Source = Any
"""Data in any form that :func:`open_dataset` takes."""


def open_dataset(
    source: object,
    specs: Sequence[TensorSpec],
    *,
    target: str | None = None,
    target_spec: TensorSpec | None = None,
    need_target: bool = True,
    validate: bool = True,
    others: Sequence[str] = (),
) -> Dataset:
    """Open data of any accepted form for a model."""
    if isinstance(source, Dataset):
        return source.in_order_of(specs)
    wanted = [*specs, *(TensorSpec(name, np.dtype(np.float32), beside=True) for name in others)]
    if others and isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        source = joined(source[0], source[1], wanted, "the data")
    indexed = _examples(source, wanted, target, need_target)
    if indexed is not None:
        examples, name = indexed
        by_name = None if isinstance(examples, HuggingFaceExamples) else target
        return MapDataset(
            examples,
            specs,
            name=name,
            target=by_name,
            target_spec=target_spec,
            need_target=need_target,
            validate=validate,
            others=others,
        )
    matched = _match_source(source, wanted, target, need_target)
    if matched is None:
        if not isinstance(source, Iterable) and not callable(source):
            raise DataError(
                f"the data is a {type(source).__name__}; give a path, a mapping from name to array, "
                f"(inputs, targets), or an iterable of batches."
            )
        return IterableDataset(
            source,
            specs,
            target=target,
            target_spec=target_spec,
            need_target=need_target,
            validate=validate,
            others=others,
        )
    inputs, targets, name = matched
    dataset = ArrayDataset(inputs, targets, specs=specs, target_spec=target_spec, name=name)
    if validate:
        dataset.validate()
    return dataset


def _match_source(
    source: object, specs: Sequence[TensorSpec], target: str | None, need_target: bool
) -> tuple[dict[str, object], object | None, str] | None:
    """Return inputs, targets and the name of the data, or None for a source of batches."""
    name = "the data"
    path = source.path if isinstance(source, Reader) else source
    if isinstance(path, str | os.PathLike) and "\0" in str(path):
        raise DataError(f"the path {str(path)!r} has a NUL character, which no path can have.").about(str(path))
    reader = _reader(source)
    if reader is not None:
        return *reader.read(specs, target=target, need_target=need_target), reader.name
    if isinstance(source, str | os.PathLike):
        name, arrays = f"'{Path(source)}'", open_arrays(source)
        if Path(source).is_file() and len(arrays) == len(specs) == 1 and not need_target and target is None:
            arrays = {specs[0].name: next(iter(arrays.values()))}  # the only array for the only input
        return *match_names(arrays, specs, name, target=target, need_target=need_target), name
    if is_frame(source):
        return *match_frame(source, specs, target=target, need_target=need_target), "the table"
    if isinstance(source, Mapping) or is_array_like(source):
        return *match_batch(source, specs, name, target=target, need_target=need_target), name
    if isinstance(source, tuple) and len(source) == 2 and is_frame(source[0]) and is_array_like(source[1]):
        inputs = [spec for spec in specs if not spec.beside]
        if len(inputs) == len(specs) > 1:  # one column per input
            return match_frame(source[0], specs, target=None, need_target=False)[0], source[1], name
    if isinstance(source, list | tuple) and source and not is_batch_list(source):
        return *match_positions(source, specs, name, target=target, need_target=need_target), name
    return None


def _examples(
    source: object, specs: Sequence[TensorSpec], target: str | None, need_target: bool
) -> tuple[Examples, str] | None:
    """Return examples by index and their name, or None for another source."""
    if is_hugging_face(source):
        refuse_other_kinds(source)
        return HuggingFaceExamples(source, specs, target=target, need_target=need_target), "the dataset"
    if isinstance(source, ExampleSource):
        return source.examples(specs, need_target=need_target), source.name
    if is_map_style(source) and not is_array_like(source) and not is_frame(source):
        name = f"the {type(source).__name__}"
        return IndexedExamples(source, name, specs), name
    return None


def _reader(source: object) -> Reader | None:
    """Return the reader of a source, or None if memory mapping suffices."""
    if isinstance(source, Reader):
        return source
    if not isinstance(source, str | os.PathLike):
        return None
    # imported for files only
    from onnxtrain.data.images import ImageFolder, is_image_folder
    from onnxtrain.data.tar_file import TarFile, is_tar

    if is_tar(source):
        return TarFile(source)
    reader = readers_by_suffix().get(Path(source).suffix.lower())
    if reader is not None:
        return reader(source)
    return ImageFolder(source) if is_image_folder(Path(source)) else None


@functools.cache
def readers_by_suffix() -> dict[str, type[Reader]]:
    """Return the readers that a path's suffix chooses: those in the modules ``*_file`` of this folder."""
    found = classes_in(__name__.rpartition(".")[0], Reader, "_file")  # type: ignore[type-abstract]
    return {suffix: reader for reader in found.values() for suffix in reader.suffixes}
