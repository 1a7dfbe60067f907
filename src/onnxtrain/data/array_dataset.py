"""Datasets of arrays, their division among processes, and the split into training and validation data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, Self, cast

import numpy as np

from onnxtrain.data.base import (
    Batch,
    Column,
    Dataset,
    Divide,
    check_columns,
    check_not_negative,
    checked_batch_size,
    chosen_check,
    share,
)
from onnxtrain.data.conversion import Array, Rescaled, TensorSpec, check_symbols, symbol_sizes
from onnxtrain.data.hashing import BLOCK_BYTES, Fingerprint, checksum, row_sums, sampled
from onnxtrain.data.image_form import Pixels
from onnxtrain.data.naming import NamedColumns, check_beside
from onnxtrain.data.target_checks import TargetCheck, check_weights
from onnxtrain.errors import DataError, OptionError

# Bytes that are read at a time when all data is checked.
_CHECK_BYTES: Final = 16 * 2**20


class ArrayDataset(Dataset):
    """Examples in arrays, in memory or mapped from files and read batch by batch.

    With ``shuffle`` the order of an epoch depends on seed and epoch only: it is
    ``Generator(PCG64(SeedSequence([seed, epoch]))).permutation(size)``.
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
            key: Column.checked(
                value, by_name.get(key), f"{'input' if not by_name or key in by_name else 'target'} '{key}'"
            )
            for key, value in inputs.items()
        }
        self._targets = None if targets is None else Column.checked(targets, target_spec, "the target array")
        self._indices: Array | None = None
        self._divide: Divide | None = None
        self._validated: tuple[object, ...] | None = None
        self.name = name
        self.size = check_columns(self._columns, name)

    @property
    def _columns(self) -> list[Column]:
        return [*self._inputs.values(), *([self._targets] if self._targets else [])]

    @property
    def targets(self) -> Array | None:
        """The target array as given, or None."""
        return None if self._targets is None else self._targets.array

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the inputs' symbolic dimensions."""
        return symbol_sizes((column.spec, column.array.shape) for column in self._inputs.values())

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns of inputs that were given as tables."""
        return {key: column.names for key, column in self._inputs.items() if column.names is not None}

    @property
    def pixels(self) -> Pixels | None:
        """Normalization of images that a trained model has to record; None without one."""
        arrays: list[object] = [column.array for column in self._columns]
        return next((array.pixels for array in arrays if isinstance(array, Rescaled)), None)

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model; see `Dataset.in_order_of`."""
        result = self
        for spec in specs:
            names = self.columns.get(spec.name)
            if names is not None and spec.columns not in (None, names):
                column = self._inputs[spec.name]
                result = result._with_column(
                    spec.name, Column.checked(NamedColumns(column.array, names), spec, column.subject)
                )
        return result

    def values(self, name: str) -> Array | None:
        """Return an array as given; see `Dataset.values`."""
        return self._inputs[name].array if name in self._inputs else None

    def expecting(self, target_spec: TensorSpec | None, name: str | None = None) -> Self:
        """Return the same data with other requirements of its targets; see `Dataset.expecting`."""
        column = self._targets if name is None else self._inputs.get(name)
        if column is None or target_spec is None:
            return self
        result = self._with_column(name, Column.checked(column.array, target_spec, column.subject))
        check_symbols((own.spec, own.array.shape, own.subject) for own in result._columns)
        return result

    def adapting(self, adapt: Callable[[Array], Array], name: str | None = None) -> Self:
        """Return the same data with other targets; see `Dataset.adapting`."""
        column = self._targets if name is None else self._inputs.get(name)
        if column is None:
            return self
        array = adapt(column.array)
        if array is column.array:
            return self
        result = self._with_column(name, Column.checked(array, None, column.subject))
        result._validated = None
        return result

    def _with_column(self, name: str | None, column: Column) -> Self:
        result = copy.copy(self)
        if name is None:
            result._targets = column
        else:
            result._inputs = {**self._inputs, name: column}
        return result

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """Return the same data with one weight per example; see `Dataset.with_weights`."""
        others, subject = self._inputs, f"'{spec.name}'"
        if isinstance(weights, str):
            check_beside([weights], others, f"{self.name} has no array")
            subject = f"'{weights}'"
            weights, others = others[weights].array, {key: own for key, own in others.items() if key != weights}
        result = copy.copy(self)
        result._inputs = {**others, spec.name: Column.checked(check_weights(weights, subject), spec, subject)}
        check_columns(result._columns, "the data")
        result._validated, result.weighted = None, True
        return result

    def take(self, indices: Array) -> Self:
        """Return the examples with these indices, as a dataset that shares the arrays."""
        subset = copy.copy(self)
        subset._indices = indices if self._indices is None else self._indices[indices]
        subset.size = len(indices)
        return subset

    def shared(self, divide: Divide) -> Self:
        """Return a dataset that reads a part of every batch."""
        result = copy.copy(self)
        result._divide = divide
        return result

    def batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read all examples once; see `Dataset.batches`. Batches may be views of the data."""
        batch_size = checked_batch_size(batch_size)
        check_not_negative(seed=seed, epoch=epoch, start=start)
        order = None
        if shuffle:
            order = epoch_order(self.size, seed, epoch)
        return self._read_batches(batch_size, order, start)

    def batch_count(self, batch_size: int) -> int:
        """Return the number of batches per epoch; the last batch may be smaller."""
        return -(-self.size // checked_batch_size(batch_size))

    def validate(
        self,
        *,
        classes: int | None = None,
        ignore_index: int | None = None,
        check: TargetCheck | None = None,
        checks: Mapping[str, TargetCheck] | None = None,
    ) -> None:
        """Check all values, some megabytes at a time; see `Dataset.validate`. Repeating the last call does nothing."""
        check = chosen_check(classes, ignore_index, check)
        by_name = dict(checks or {})
        done = (None if self._targets is None else self._targets.spec, check, by_name)
        if self._validated == done:
            return
        for column in self._columns:
            own = check if column is self._targets else by_name.get(self._name_of(column))
            row_bytes = 1 if column.is_common else max(1, column.array[:1].nbytes)
            for start, stop in _chunks(self.size, max(1, _CHECK_BYTES // row_bytes)):
                rows, examples = self._rows(start, stop, None)
                values = column.converted(rows, examples, check=True)
                if own is not None:
                    own(values, column.subject, examples)
        self._validated = done

    def _name_of(self, column: Column) -> str:
        return next((name for name, own in self._inputs.items() if own is column), "")

    def fingerprint(self) -> str:
        """Return a hash of names, types, shapes and converted values; large arrays are sampled."""
        result = Fingerprint()
        names = [*self._inputs, *(["the target"] if self._targets else [])]
        for name, column in zip(names, self._columns, strict=True):
            result.add_text(f"{name} {column.spec.dtype} {(self.size, *column.array.shape[1:])}")
            rows = max(1, BLOCK_BYTES // max(1, column.array[:1].nbytes))
            for start, stop in sampled(list(_chunks(self.size, rows))):
                result.add_array(column.converted(*self._rows(start, stop, None)))
        return result.digest()

    def contents(self, most: int) -> dict[str, tuple[str, Array]]:
        """Return type and shape of every array in words, and sums of its first rows; see `Dataset.contents`."""
        found = {}
        for column in self._columns:
            kind = f"{column.spec.dtype} {[self.size, *column.array.shape[1:]]}"
            found[column.subject] = kind, row_sums(column.converted(*self._rows(0, min(most, self.size), None)))
        return found

    def _read_batches(self, batch_size: int, order: Array | None, start: int) -> Iterator[Batch]:
        common = frozenset(name for name, column in self._inputs.items() if column.is_common)
        for number, (first, last) in enumerate(_chunks(self.size, batch_size, start), start):
            whole = None
            if self._divide is not None:
                whole = last - first
                begin, end, _ = self._divide(number, whole).indices(whole)
                first, last = first + begin, first + max(begin, end)
            rows, examples = self._rows(first, last, order)
            arrays = [column.converted(rows, examples) for column in self._columns]
            inputs = dict(zip(self._inputs, arrays, strict=False))
            yield Batch(inputs, arrays[-1] if self._targets else None, last - first, whole, common=common)

    def _rows(self, start: int, stop: int, order: Array | None) -> tuple[slice | Array, Sequence[int] | Array]:
        """Return the rows for positions in the reading order, and the index in the data of each."""
        if order is None and self._indices is None:
            return slice(start, stop), range(start, stop)
        rows = np.arange(start, stop) if order is None else order[start:stop]
        if self._indices is not None:
            rows = self._indices[rows]
        return rows, rows


def epoch_order(size: int, seed: int, epoch: int) -> Array:
    """Return the order of the examples in an epoch, which depends on seed and epoch only."""
    return _permutation(np.random.SeedSequence([seed, epoch]), size)


def _permutation(seed: np.random.SeedSequence, size: int) -> Array:
    """Return ``Generator.permutation(size)``, as uint32 where the size allows it to halve the memory."""
    rows = np.arange(size, dtype=np.uint32 if size <= 2**32 else np.int64)
    np.random.Generator(np.random.PCG64(seed)).shuffle(rows)
    return rows


class Divisible(Protocol):
    """A dataset with random access."""

    size: int

    def take(self, indices: Array) -> Dataset:
        """Return the examples with these indices."""
        ...


class Split(NamedTuple):
    """Training and validation data."""

    train: Dataset
    validation: Dataset


def split_validation(dataset: Dataset, fraction: float, seed: int = 0, *, shuffle: bool = True) -> Split:
    """Hold out a part of the examples for validation; nothing is copied."""
    if not 0 < fraction < 1:
        raise OptionError(f"the validation fraction is {fraction}; it must be greater than 0 and less than 1.").about(
            "validation", got=fraction
        )
    check_not_negative(seed=seed)
    if dataset.size is None or not hasattr(dataset, "take"):
        raise OptionError(
            f"a fraction for validation needs data in arrays, not {type(dataset).__name__}; "
            f"give the validation data separately."
        ).about("validation", got=type(dataset).__name__)
    if dataset.size < 2:
        raise DataError("the data has 1 example, which cannot be split into training and validation data.")
    count = min(max(1, round(dataset.size * fraction)), dataset.size - 1)
    if shuffle:
        # A spawn key keeps this stream apart from those that shuffle the epochs.
        order = _permutation(np.random.SeedSequence([seed], spawn_key=(1,)), dataset.size)
        order[:count].sort()
        order[count:].sort()
    else:
        order = np.roll(np.arange(dataset.size), count)
    whole = cast("Divisible", dataset)
    return Split(whole.take(order[count:]), whole.take(order[:count]))


def _chunks(size: int, length: int, start: int = 0) -> Iterator[tuple[int, int]]:
    for first in range(start * length, size, length):
        yield first, min(first + length, size)


def shared(dataset: Dataset, divide: Divide) -> Dataset:
    """Return a dataset of one process's part of every batch; of data in arrays only that part is read."""
    return dataset.shared(divide) if isinstance(dataset, ArrayDataset) else Shares(dataset, divide)


def undivided(dataset: Dataset) -> Dataset:
    """Return the dataset behind a division among processes."""
    return dataset.dataset if isinstance(dataset, Shares) else dataset


class Shares(Dataset):
    """One process's part of every batch of a dataset that can only be read as a whole."""

    def __init__(self, dataset: Dataset, divide: Divide) -> None:
        self.dataset = dataset
        self._divide = divide
        self.size, self.weighted = dataset.size, dataset.weighted

    @property
    def targets(self) -> Array | None:
        """Targets of the whole data."""
        return self.dataset.targets

    def fingerprint(self) -> str | None:
        """Return the hash of the whole data."""
        return self.dataset.fingerprint()

    def batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read a part of every batch; see `Dataset.batches`. A part may be empty."""
        batches = self.dataset.batches(batch_size, shuffle=shuffle, seed=seed, epoch=epoch, start=start)
        for number, batch in enumerate(batches, start):
            arrays = [*batch.inputs.values(), *([] if batch.targets is None else [batch.targets])]
            own = share(batch, self._divide(number, batch.size), batch.size)
            yield own._replace(content=checksum(arrays))

    def batch_count(self, batch_size: int) -> int | None:
        """Return the number of batches per epoch."""
        return self.dataset.batch_count(batch_size)

    def validate(
        self,
        *,
        classes: int | None = None,
        ignore_index: int | None = None,
        check: TargetCheck | None = None,
        checks: Mapping[str, TargetCheck] | None = None,
    ) -> None:
        """Check the whole data."""
        self.dataset.validate(classes=classes, ignore_index=ignore_index, check=check, checks=checks)
