"""Datasets of arrays, and the split into training and validation data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np

from onnxtrain.data.base import (
    NO_CHECKS,
    Batch,
    Column,
    Dataset,
    Divide,
    check_columns,
    check_not_negative,
    epoch_order,
    permutation,
)
from onnxtrain.data.conversion import Array, LazyRows, TensorSpec, check_symbols, symbol_sizes, time_first
from onnxtrain.data.hashing import BLOCK_BYTES, Fingerprint, row_sums, sampled
from onnxtrain.data.naming import NamedColumns, check_beside
from onnxtrain.data.target_checks import TargetCheck, check_weights
from onnxtrain.errors import DataError, OptionError

# Bytes that are read at a time when all data is checked.
_CHECK_BYTES: Final = 16 * 2**20


class ArrayDataset(Dataset):
    """Examples in arrays, in memory or mapped from files and read batch by batch; see `permutation` for their order."""

    size: int

    def __init__(
        self,
        inputs: Mapping[str, object],
        targets: object | None = None,
        *,
        specs: Sequence[TensorSpec] = (),
        name: str = "the data",
    ) -> None:
        by_name = {spec.name: spec for spec in specs}
        self._arrays: dict[str | None, Column] = {
            key: Column.checked(
                value, by_name.get(key), f"{'input' if not by_name or key in by_name else 'target'} '{key}'"
            )
            for key, value in inputs.items()
        }
        if targets is not None:
            self._arrays[None] = Column.checked(targets, None, "the target array")
        given: list[object] = [column.array for column in self._columns]
        self.pixels = next((array.pixels for array in given if isinstance(array, LazyRows)), None)
        self._time_first = time_first(specs)
        self._indices: Array | None = None
        self._validated: tuple[object, ...] | None = None
        self.name = name
        self.size = check_columns(self._columns, name)

    @property
    def _columns(self) -> list[Column]:
        return [*self._arrays.values()]

    def values(self, name: str | None = None) -> Array | None:
        """Return an array as given; see `Dataset.values`."""
        return self._arrays[name].array if name in self._arrays else None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the inputs' symbolic dimensions."""
        return symbol_sizes((column.spec, column.array.shape) for name, column in self._arrays.items() if name)

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns of inputs that were given as tables."""
        return {key: column.names for key, column in self._arrays.items() if key and column.names is not None}

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model; see `Dataset.in_order_of`."""
        result = self
        for spec in specs:
            names = self.columns.get(spec.name)
            if names is not None and spec.columns not in (None, names):
                result = result._with_array(spec.name, NamedColumns(self._arrays[spec.name].array, names), spec)
        return result

    def expecting(self, target_spec: TensorSpec, name: str | None = None) -> Self:
        """Return the same data with other requirements of its targets; see `Dataset.expecting`."""
        if name not in self._arrays:
            return self
        result = self._with_array(name, self._arrays[name].array, target_spec)
        check_symbols((own.spec, own.array.shape, own.subject) for own in result._columns)
        return result

    def adapting(self, adapt: Callable[[Array], Array], name: str | None = None) -> Self:
        """Return the same data with other targets; see `Dataset.adapting`."""
        given = self.values(name)
        array = None if given is None else adapt(given)
        if array is given:
            return self
        result = self._with_array(name, array, None)
        result._validated = None
        return result

    def _with_array(self, name: str | None, array: object, spec: TensorSpec | None) -> Self:
        result = copy.copy(self)
        result._arrays = {**self._arrays, name: Column.checked(array, spec, self._arrays[name].subject)}
        return result

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """Return the same data with one weight per example; see `Dataset.with_weights`."""
        others, subject = self._arrays, f"'{spec.name}'"
        if isinstance(weights, str):
            check_beside([weights], filter(None, others), f"{self.name} has no array")
            subject = f"'{weights}'"
            given = check_weights(others[weights].array, subject)
            others = {key: own for key, own in others.items() if key != weights}
        else:
            given = check_weights(weights)
        found = {**others, spec.name: Column.checked(given, spec, subject)}
        result = copy.copy(self)
        result._arrays = dict(sorted(found.items(), key=lambda item: item[0] is None))  # the targets stay the last
        check_columns(result._columns, "the data")
        result._validated, result.weighted = None, True
        return result

    def take(self, indices: Array) -> Self:
        """Return the examples with these indices, as a dataset that shares the arrays."""
        self.check_cut()
        subset = copy.copy(self)
        subset._indices = indices if self._indices is None else self._indices[indices]
        subset.size = len(indices)
        return subset

    def _parts(self, batches: Iterator[Batch], divide: Divide, start: int) -> Iterator[Batch]:
        return batches

    def validate(self, checks: Mapping[str | None, TargetCheck] = NO_CHECKS) -> None:
        """Check all values, some megabytes at a time; see `Dataset.validate`. Repeating the last call does nothing."""
        done = (self._arrays[None].spec if None in self._arrays else None, dict(checks))
        if self._validated == done:
            return
        for name, column in self._arrays.items():
            row_bytes = 1 if column.is_common else max(1, column.array[:1].nbytes)
            for start, stop in _chunks(self.size, max(1, _CHECK_BYTES // row_bytes)):
                rows, examples = self._rows(start, stop, None)
                values = column.converted(rows, examples, check=True)
                if name in checks:
                    checks[name](values, column.subject, examples)
        self._validated = done

    def fingerprint(self) -> str:
        """Return a hash of names, types, shapes and converted values; large arrays are sampled."""
        result = Fingerprint()
        for name, column in self._arrays.items():
            shown = "the target" if name is None else name
            result.add_text(f"{shown} {column.spec.dtype} {(self.size, *column.array.shape[1:])}")
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

    def _read(self, batch_size: int, shuffled: tuple[int, int] | None, start: int) -> Iterator[Batch]:
        """Read all examples once; batches may be views of the data."""
        order = epoch_order(self.size, shuffled)
        common = frozenset(name for name, column in self._arrays.items() if name and column.is_common)
        for number, (first, last) in enumerate(_chunks(self.size, batch_size, start), start):
            whole = None
            if self._divide is not None:
                whole = last - first
                begin, end, _ = self._divide(number, whole).indices(whole)
                first, last = first + begin, first + max(begin, end)
            rows, examples = self._rows(first, last, order)
            inputs: dict[Any, Array] = {name: each.converted(rows, examples) for name, each in self._arrays.items()}
            targets = inputs.pop(None, None)
            yield Batch(inputs, targets, last - first, whole, common=common)

    def _rows(self, start: int, stop: int, order: Array | None) -> tuple[slice | Array, Sequence[int] | Array]:
        """Return the rows for positions in the reading order, and the index in the data of each."""
        if order is None and self._indices is None:
            return slice(start, stop), range(start, stop)
        rows = np.arange(start, stop) if order is None else order[start:stop]
        if self._indices is not None:
            rows = self._indices[rows]
        return rows, rows


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
    if dataset.size is None:
        raise OptionError(
            f"a fraction for validation needs data in arrays, not {type(dataset).__name__}; "
            f"give the validation data separately."
        ).about("validation", got=type(dataset).__name__)
    if dataset.size < 2:
        raise DataError("the data has 1 example, which cannot be split into training and validation data.")
    if (parts := dataset.split(fraction)) is not None:
        return Split(*parts)
    count = min(max(1, round(dataset.size * fraction)), dataset.size - 1)
    if shuffle:
        # A spawn key keeps this stream apart from those that shuffle the epochs.
        order = permutation(np.random.SeedSequence([seed], spawn_key=(1,)), dataset.size)
        order[:count].sort()
        order[count:].sort()
    else:
        order = np.roll(np.arange(dataset.size), count)
    return Split(dataset.take(order[count:]), dataset.take(order[:count]))


def _chunks(size: int, length: int, start: int = 0) -> Iterator[tuple[int, int]]:
    for first in range(start * length, size, length):
        yield first, min(first + length, size)
