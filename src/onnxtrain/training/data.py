"""Training data as batches: arrays in memory or mapped from files, and any iterable of batches."""

from __future__ import annotations

import copy
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, SupportsIndex

import numpy as np

from onnxtrain.errors import DataError, OptionError
from onnxtrain.training.arrays import (
    Array,
    TensorSpec,
    check_finite,
    check_labels,
    check_shape,
    check_symbols,
    check_type,
    convert,
    is_array_like,
    to_numpy,
)
from onnxtrain.training.naming import is_batch_list, match_batch, match_names, match_positions
from onnxtrain.training.sources import is_mapped, read_arrays

__all__ = [
    "ArrayDataset",
    "Batch",
    "Dataset",
    "IterableDataset",
    "Split",
    "TensorSpec",
    "check_labels",
    "open_dataset",
    "split_validation",
]

# How much is read at a time when all data is checked.
_CHECK_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class Batch:
    """Some examples, ready for the model: right types, C-contiguous.

    Attributes:
        inputs: by input name, each [size, ...].
        targets: [size, ...], or None where none are needed.
        size: how many examples.
    """

    inputs: dict[str, Array]
    targets: Array | None
    size: int


class Dataset(ABC):
    """Examples that can be read in batches, as often as wanted.

    Attributes:
        size: how many examples; None when not known.
    """

    size: int | None = None

    @abstractmethod
    def batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read all examples once, in batches.

        Args:
            batch_size: examples in a batch; the last batch may be smaller.
            shuffle: whether to read in random order, which `seed` and `epoch` alone decide.
            seed: not negative.
            epoch: how many times the data has been read before: the order differs in every epoch.
            start: how many of the first batches to skip, to continue in the middle of an epoch.

        Raises:
            DataError: the batch size is below 1, or the data does not fit the model.
            OptionError: the seed, the epoch or the start is negative.
        """

    @abstractmethod
    def batch_count(self, batch_size: int) -> int | None:
        """How many batches one epoch has; None when not known."""

    @abstractmethod
    def validate(self, *, classes: int | None = None, ignore_index: int | None = None) -> None:
        """Check all values: NaN and infinity in inputs and targets, and the range of labels.

        Args:
            classes: when the targets are class indices, how many classes there are; None to not check labels.
            ignore_index: a label that is allowed although it is outside the range.

        Raises:
            DataError: a value that cannot be used; the message names the array and the first example.
        """


@dataclass(frozen=True)
class _Column:
    """One array of a dataset with what the model needs of it."""

    what: str
    array: Array
    spec: TensorSpec
    mapped: bool

    @classmethod
    def checked(cls, value: object, spec: TensorSpec | None, what: str) -> Self:
        array = to_numpy(value, what)
        spec = spec or TensorSpec(what, array.dtype, None)
        check_shape(array.shape, spec, what)
        check_type(array.dtype, spec, what)
        return cls(what, array, spec, is_mapped(array))

    def read(self, rows: slice | Array) -> Array:
        if isinstance(rows, slice) or not self.mapped:
            return self.array[rows]
        # In file order, so that the disk reads forward; then back to the order asked for.
        order = np.argsort(rows, kind="stable")
        values = np.empty((len(rows), *self.array.shape[1:]), self.array.dtype)
        values[order] = self.array[rows[order]]
        return values


def _check_columns(columns: Sequence[_Column], data: str) -> int:
    """Check that columns fit each other; return how many examples they have."""
    first = columns[0]
    size = len(first.array)
    for column in columns[1:]:
        if len(column.array) != size:
            raise DataError(
                f"{data} has arrays of different lengths: {first.what} has {size} examples, "
                f"{column.what} has {len(column.array)}."
            )
    if not size:
        raise DataError(
            f"{data} is empty: {first.what} has shape {first.array.shape}; at least one example is needed."
        )
    check_symbols((column.spec, column.array.shape, column.what) for column in columns)
    return size


class ArrayDataset(Dataset):
    """Examples in arrays: in memory, or mapped from files and read batch by batch.

    With ``shuffle`` the order of an epoch is ``Generator(PCG64(SeedSequence([seed, epoch]))).permutation(size)``.

    Args:
        inputs: arrays by input name, examples first.
        targets: the targets, examples first, or None.
        specs: what the model needs of the inputs; inputs without one are taken as they are.
        target_spec: what the loss needs of the targets.
        name: how error messages call the data.

    Raises:
        DataError: an array has the wrong type or shape, lengths differ, or there is no example.

    >>> data = ArrayDataset({"x": np.arange(5.0)}, np.arange(5))
    >>> [batch.targets.tolist() for batch in data.batches(2)]
    [[0, 1], [2, 3], [4]]
    >>> [batch.targets.tolist() for batch in data.batches(2, shuffle=True, seed=1, start=1)]
    [[2, 0], [1]]
    """

    size: int

    def __init__(
        self,
        inputs: Mapping[str, object],
        targets: object | None = None,
        *,
        specs: Sequence[TensorSpec] = (),
        target_spec: TensorSpec | None = None,
        name: str = "the data",
    ) -> None:
        by_name = {spec.name: spec for spec in specs}
        self._inputs = {
            key: _Column.checked(value, by_name.get(key), f"input '{key}'") for key, value in inputs.items()
        }
        self._targets = None if targets is None else _Column.checked(targets, target_spec, "the target array")
        self._indices: Array | None = None
        self.size = _check_columns(self._columns, name)

    @property
    def _columns(self) -> list[_Column]:
        return [*self._inputs.values(), *([self._targets] if self._targets else [])]

    def take(self, indices: Array) -> Self:
        """The examples with these indices, as a dataset that shares the arrays."""
        subset = copy.copy(self)
        subset._indices = indices if self._indices is None else self._indices[indices]
        subset.size = len(indices)
        return subset

    def batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read all examples once; see `Dataset.batches`. Arrays may be views of the data: do not write to them."""
        batch_size = _checked_batch_size(batch_size)
        _check_not_negative(seed=seed, epoch=epoch, start=start)
        order = None
        if shuffle:
            order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(
                self.size
            )
        return self._read_batches(batch_size, order, start)

    def batch_count(self, batch_size: int) -> int:
        """How many batches one epoch has; the last may be smaller."""
        return -(-self.size // _checked_batch_size(batch_size))

    def validate(self, *, classes: int | None = None, ignore_index: int | None = None) -> None:
        """Check all values, some megabytes at a time; see `Dataset.validate`."""
        for column in self._columns:
            row_bytes = max(1, column.array[:1].nbytes)
            for start, stop in _chunks(self.size, max(1, _CHECK_BYTES // row_bytes)):
                rows, examples = self._rows(start, stop, None)
                original = column.read(rows)
                values = convert(original, column.spec.dtype, column.what, examples)
                check_finite(values, column.what, examples, original)
                if classes is not None and column is self._targets:
                    check_labels(values, classes, ignore_index, what=column.what, examples=examples)

    def _read_batches(self, batch_size: int, order: Array | None, start: int) -> Iterator[Batch]:
        for first, last in _chunks(self.size, batch_size, start):
            rows, examples = self._rows(first, last, order)
            arrays = [
                convert(column.read(rows), column.spec.dtype, column.what, examples)
                for column in self._columns
            ]
            inputs = dict(zip(self._inputs, arrays, strict=False))
            yield Batch(inputs, arrays[-1] if self._targets else None, last - first)

    def _rows(
        self, start: int, stop: int, order: Array | None
    ) -> tuple[slice | Array, Sequence[int] | Array]:
        """The rows to read for positions in the reading order, and for each its index in the data."""
        if order is None and self._indices is None:
            return slice(start, stop), range(start, stop)
        rows = np.arange(start, stop) if order is None else order[start:stop]
        if self._indices is not None:
            rows = self._indices[rows]
        return rows, rows


class IterableDataset(Dataset):
    """Examples from any iterable of batches: a list, a PyTorch-style loader, a function that returns an iterator.

    The batches keep the size and the order that the source gives them: ``batch_size``, ``shuffle``, ``seed`` and
    ``epoch`` are the source's own matter. A source that can be read only once (a generator) serves one epoch.

    Args:
        source: the iterable, or a function without arguments that returns an iterator.
        specs: what the model needs of its inputs.
        target: the name of the target, when batches are mappings that leave several arrays.
        target_spec: what the loss needs of the targets.
        need_target: whether batches must have targets.
        validate: whether to check values for NaN and infinity as they pass.
    """

    def __init__(
        self,
        source: Iterable[object] | Callable[[], Iterable[object]],
        specs: Sequence[TensorSpec],
        *,
        target: str | None = None,
        target_spec: TensorSpec | None = None,
        need_target: bool = True,
        validate: bool = True,
    ) -> None:
        self._source = source
        self._specs = {spec.name: spec for spec in specs}
        self._target = target
        self._target_spec = target_spec
        self._need_target = need_target
        self._check_values = validate
        self._labels: tuple[int, int | None] | None = None
        self._used = False

    def batches(
        self, batch_size: int = 1, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read the source once; see `Dataset.batches`. The source decides about batch size and order."""
        _checked_batch_size(batch_size)
        _check_not_negative(seed=seed, epoch=epoch, start=start)
        return self._read_batches(self._open(), start)

    def batch_count(self, batch_size: int = 1) -> int | None:
        """How many batches the source says it has; None when it does not say."""
        return len(self._source) if isinstance(self._source, Sized) else None

    def validate(self, *, classes: int | None = None, ignore_index: int | None = None) -> None:
        """Check every batch from now on when it is read, not before: the source may be large or endless."""
        self._check_values = True
        self._labels = None if classes is None else (classes, ignore_index)

    def _open(self) -> Iterator[object]:
        source = self._source
        if isinstance(source, Iterator):
            if self._used:
                raise DataError(
                    f"the data is a one-shot iterator ({type(source).__name__}), which is used up after one epoch: "
                    f"give a list, a loader, or a function that returns a new iterator."
                )
            self._used = True
            return source
        opened = source() if callable(source) else source
        if not isinstance(opened, Iterable):
            raise DataError(
                f"the data function returned a {type(opened).__name__}; it must return an iterator."
            )
        return iter(opened)

    def _read_batches(self, items: Iterator[object], start: int) -> Iterator[Batch]:
        number, first_example = -1, 0
        for number, item in enumerate(items):
            if number >= start:
                batch = self._batch(item, f"batch {number}", first_example)
                first_example += batch.size
                yield batch
        if number < 0:
            raise DataError("the data is empty: its iterator gave no batch; at least one is needed.")

    def _batch(self, item: object, name: str, first_example: int) -> Batch:
        inputs, targets = match_batch(
            item, list(self._specs.values()), name, target=self._target, need_target=self._need_target
        )
        columns = [
            _Column.checked(value, self._specs[key], f"input '{key}' of {name}")
            for key, value in inputs.items()
        ]
        if targets is not None:
            columns.append(_Column.checked(targets, self._target_spec, f"the target array of {name}"))
        size = _check_columns(columns, name)
        arrays = [self._values(column, range(first_example, first_example + size)) for column in columns]
        if targets is not None and self._labels is not None:
            check_labels(
                arrays[-1],
                *self._labels,
                what=columns[-1].what,
                examples=range(first_example, first_example + size),
            )
        return Batch(dict(zip(inputs, arrays, strict=False)), None if targets is None else arrays[-1], size)

    def _values(self, column: _Column, examples: range) -> Array:
        values = convert(column.array, column.spec.dtype, column.what, examples)
        if self._check_values:
            check_finite(values, column.what, examples, column.array)
        return values


def open_dataset(
    source: object,
    specs: Sequence[TensorSpec],
    *,
    target: str | None = None,
    target_spec: TensorSpec | None = None,
    need_target: bool = True,
    validate: bool = True,
) -> Dataset:
    """Open data of any accepted form for a model.

    Arrays named like the model's inputs are its inputs; the one that is left is the target.

    Args:
        source: one of

            - a path to a ``.npz`` file, to a folder of ``.npy`` files, or to one ``.npy`` file where that is all
              the model needs; files are memory-mapped and may be larger than memory;
            - a mapping from name to array;
            - ``(inputs, targets)``, where inputs is an array, a sequence of arrays in the order of the model's
              inputs, or a mapping;
            - an array, for a model with one input, when no targets are needed;
            - an iterable of batches, each a mapping or ``(inputs, targets)``: a list, a PyTorch-style loader;
            - a function without arguments that returns an iterator of batches;
            - a `Dataset`, which is returned as it is.
        specs: what the model needs of its inputs, in their order.
        target: the name of the target, needed when several arrays are left.
        target_spec: type and shape that the loss needs; None takes the targets as they are.
        need_target: whether there must be targets.
        validate: whether to check all values for NaN and infinity; iterables are checked batch by batch.

    Raises:
        DataError: the data cannot be read or does not fit the model.

    >>> specs = [TensorSpec("image", np.dtype(np.float32), ("N", 2))]
    >>> data = open_dataset({"image": np.zeros((3, 2)), "label": np.array([0, 1, 1])}, specs)
    >>> data.size, next(data.batches(2)).inputs["image"].dtype
    (3, dtype('float32'))
    """
    if isinstance(source, Dataset):
        return source
    matched = _match_source(source, specs, target, need_target)
    if matched is None:
        if not isinstance(source, Iterable) and not callable(source):
            raise DataError(
                f"the data is a {type(source).__name__}; give a path, a mapping from name to array, "
                f"(inputs, targets), or an iterable of batches."
            )
        return IterableDataset(
            source, specs, target=target, target_spec=target_spec, need_target=need_target, validate=validate
        )
    inputs, targets, name = matched
    dataset = ArrayDataset(inputs, targets, specs=specs, target_spec=target_spec, name=name)
    if validate:
        dataset.validate()
    return dataset


def _match_source(
    source: object, specs: Sequence[TensorSpec], target: str | None, need_target: bool
) -> tuple[dict[str, object], object | None, str] | None:
    """Inputs, targets and what to call the data, or None if the source is one of batches, not of arrays."""
    name = "the data"
    if isinstance(source, str | os.PathLike):
        name, arrays = f"'{Path(source)}'", read_arrays(source)
        if Path(source).is_file() and len(arrays) == len(specs) == 1 and not need_target and target is None:
            arrays = {specs[0].name: next(iter(arrays.values()))}  # the only array for the only input
        return *match_names(arrays, specs, name, target=target, need_target=need_target), name
    if isinstance(source, Mapping) or is_array_like(source):
        return *match_batch(source, specs, name, target=target, need_target=need_target), name
    if isinstance(source, list | tuple) and source and not is_batch_list(source):
        return *match_positions(source, specs, name, target=target, need_target=need_target), name
    return None


class Split(NamedTuple):
    """A dataset in two parts."""

    train: ArrayDataset
    validation: ArrayDataset


def split_validation(dataset: Dataset, fraction: float, seed: int = 0) -> Split:
    """Set a random part of the examples aside for validation; nothing is copied.

    Args:
        dataset: the examples.
        fraction: how much of it becomes validation data, between 0 and 1; both parts get at least one example.
        seed: decides which examples.

    Raises:
        OptionError: the fraction is not between 0 and 1, or the dataset is not one of arrays.
        DataError: there is only one example.
    """
    if not 0 < fraction < 1:
        raise OptionError(
            f"the validation fraction is {fraction}; it must be greater than 0 and less than 1."
        )
    _check_not_negative(seed=seed)
    if not isinstance(dataset, ArrayDataset):
        raise OptionError(
            f"a fraction for validation needs data in arrays, not {type(dataset).__name__}: "
            f"give the validation data separately."
        )
    if dataset.size < 2:
        raise DataError("the data has 1 example, which cannot be split into training and validation data.")
    count = min(max(1, round(dataset.size * fraction)), dataset.size - 1)
    # A spawn key keeps this stream apart from those that shuffle the epochs.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed], spawn_key=(1,))))
    order = generator.permutation(dataset.size)
    return Split(dataset.take(np.sort(order[count:])), dataset.take(np.sort(order[:count])))


def _chunks(size: int, length: int, start: int = 0) -> Iterator[tuple[int, int]]:
    for first in range(start * length, size, length):
        yield first, min(first + length, size)


def _checked_batch_size(batch_size: SupportsIndex) -> int:
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = 0
    if size < 1:
        raise DataError(f"the batch size is {batch_size!r}; it must be a whole number of at least 1.")
    return size


def _check_not_negative(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or value < 0:
            raise OptionError(f"{name} is {value!r}; it must be a whole number of at least 0.")
