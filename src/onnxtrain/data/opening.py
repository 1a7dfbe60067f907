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
    """Open data of any accepted form for a model.

    Arrays with the names of the model's inputs are its inputs; the remaining one is the target.

    Args:
        source: One of

            - a path to a ``.npz`` file, to a folder of ``.npy`` files, or to one ``.npy`` file for a model with one
              input and no target; files are memory-mapped and may be larger than memory;
            - a path to a ``.csv`` or ``.tsv`` file, or a `CsvFile`;
            - a path to a ``.parquet`` or ``.arrow`` file;
            - a path to a folder with one folder of images per class, or an `ImageFolder`;
            - a path to a ``.tar`` file in the format of WebDataset, a pattern of several, or a `TarFile`;
            - a path to a ``.safetensors`` file;
            - texts and a tokenizer: a `TextFile`;
            - packed sequences of tokens: `pack`;
            - rows of texts for a language model: an `onnxtrain.text.ChatData`;
            - a dataset of Hugging Face's ``datasets``, or any map-style dataset, which returns an example per index;
            - a mapping from name to array;
            - a table of pandas or Polars with a column of targets;
            - ``(inputs, targets)``, where inputs is an array, a sequence of arrays in the order of the
              model's inputs, or a mapping;
            - an array, for a model with one input, when no targets are needed;
            - an iterable of batches, each a mapping or ``(inputs, targets)``: a list, a PyTorch-style loader;
            - a function without arguments that returns an iterator of batches;
            - a `Dataset`.

            Columns of tables are reordered by name to ``columns`` of the input's spec.
        specs: Requirements of the model's inputs, in their order.
        target: Name of the target, needed where there are several arrays besides the inputs.
        target_spec: Requirements of the loss; None takes the targets as given.
        need_target: Raise an error where there are no targets.
        validate: Check all values for NaN and infinity; iterables are checked batch by batch.
        others: Names of further arrays, such as several targets or example weights, taken as given. In
            ``(inputs, targets)`` they are in a mapping of targets, or in the mapping of inputs.

    Raises:
        DataError: The data cannot be read or does not fit the model.

    >>> import numpy as np
    >>> specs = [TensorSpec("image", np.dtype(np.float32), ("N", 2))]
    >>> data = open_dataset({"image": np.zeros((3, 2)), "label": np.array([0, 1, 1])}, specs)
    >>> data.size, next(data.batches(2)).inputs["image"].dtype
    (3, dtype('float32'))
    """
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
        raise DataError(f"the path {str(path)!r} has a NUL character, which no path can have.")
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
