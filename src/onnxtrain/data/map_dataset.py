"""Datasets that give one example for an index, as PyTorch's map-style datasets do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, Self

import numpy as np

from onnxtrain.data.array_dataset import epoch_order
from onnxtrain.data.base import Batch, check_not_negative, checked_batch_size
from onnxtrain.data.conversion import Array, TensorSpec, kind_of, to_numpy
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.table_columns import in_order
from onnxtrain.errors import DataError

_LOOKED_AT: Final = 32
"""So many examples tell what targets are, before the first epoch."""


class Examples(Protocol):
    """Interface of the examples that a `MapDataset` reads.

    Attributes:
        columns: The names of columns side by side, by input.
        declared_labels: The labels that the data declare.
    """

    columns: dict[str, tuple[str, ...]]
    declared_labels: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def batch(self, rows: Sequence[int]) -> object:
        """Some of them as one batch, in any form that an iterable of batches may give."""
        ...

    def all_targets(self) -> Array | None:
        """The targets of all, where they can be had without reading the examples."""
        ...

    def fingerprint(self) -> str | None:
        """Return an identifier of this data's content, or None if it is unknown."""
        ...


class MapDataset(IterableDataset):
    """Examples by index, in batches of the size and the order that a training asks for.

    The order of an epoch is that of an `ArrayDataset`. Every batch is checked when it is read.

    Args:
        examples: the examples.
        specs: what the model needs of its inputs.
        name: what messages call the data.
        target: the name of the target, when examples are mappings that leave several arrays.
        target_spec: what the loss needs of the targets.
        need_target: whether examples must have targets.
        validate: whether to check values for NaN and infinity as they pass.
        others: names of further arrays, which are taken as they are.

    Raises:
        DataError: there is no example.
    """

    size: int

    def __init__(
        self,
        examples: Examples,
        specs: Sequence[TensorSpec],
        *,
        name: str,
        target: str | None = None,
        target_spec: TensorSpec | None = None,
        need_target: bool = True,
        validate: bool = True,
        others: Sequence[str] = (),
    ) -> None:
        super().__init__(
            (),
            specs,
            target=target,
            target_spec=target_spec,
            need_target=need_target,
            validate=validate,
            others=others,
        )
        self._examples = examples
        self._indices: Array = np.arange(len(examples))
        self._seen: Array | None = None
        self.name = name
        self.size = len(self._indices)
        if not self.size:
            raise DataError(f"{name} is empty; at least one example is needed.")

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """The names of the columns of tables, as far as they are known."""
        return {**super().columns, **self._examples.columns}

    @property
    def declared_labels(self) -> Sequence[str]:
        """The labels that the data declare for their targets."""
        return self._examples.declared_labels

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model; see `Dataset.in_order_of`."""
        for spec in specs:
            names = self._examples.columns.get(spec.name)
            if names is not None and in_order(names, spec, self.name) != list(names):
                raise DataError(f"{self.name} was opened for another order of its columns; give the dataset itself.")
        return super().in_order_of(specs)

    @property
    def targets(self) -> Array | None:
        """Those of the first examples; of all where they are texts, so that every class is known."""
        if not self._need_target:
            return None
        if self._seen is None:
            self._seen = self._look()
        return None if self._seen is None else self._adapted(self._seen, "the target array")

    def _look(self) -> Array | None:
        known = self._examples.all_targets()
        if known is not None:
            return known[self._indices]
        first = self._targets_of(self._indices[:_LOOKED_AT])
        if first is None or kind_of(first.dtype) != "string":
            return first
        rest = (self._indices[start : start + _LOOKED_AT] for start in range(_LOOKED_AT, self.size, _LOOKED_AT))
        found = [first, *(targets for targets in map(self._targets_of, rest) if targets is not None)]
        return np.concatenate(found)

    def _targets_of(self, rows: Array) -> Array | None:
        targets = self._matched(self._examples.batch(rows.tolist()), f"the examples {rows[0]} to {rows[-1]}")[1]
        return None if targets is None else to_numpy(targets, "the target array")

    def batches(
        self, batch_size: int = 1, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read all examples once; see `Dataset.batches`."""
        batch_size = checked_batch_size(batch_size)
        check_not_negative(seed=seed, epoch=epoch, start=start)
        order = self._indices[epoch_order(self.size, seed, epoch)] if shuffle else self._indices
        return self._read_rows(order, batch_size, start)

    def _read_rows(self, order: Array, batch_size: int, start: int) -> Iterator[Batch]:
        for first in range(start * batch_size, self.size, batch_size):
            rows = order[first : first + batch_size]
            yield self._batch(self._examples.batch(rows.tolist()), f"the batch of the examples {_some(rows)}")

    def batch_count(self, batch_size: int = 1) -> int:
        """Return the number of batches per epoch; the last batch may be smaller."""
        return -(-self.size // checked_batch_size(batch_size))

    def take(self, indices: Array) -> Self:
        """The examples with these indices, as a dataset."""
        subset = copy.copy(self)
        subset._indices, subset.size = self._indices[indices], len(indices)
        subset._seen = None
        return subset

    def fingerprint(self) -> str | None:
        """Return an identifier of this data's content, or None if it is unknown."""
        found = self._examples.fingerprint()
        return None if found is None else f"{found} {self.size} {int(self._indices.sum())}"


class IndexedExamples:
    """Examples from an object that returns one example for an index: a mapping, ``(input, target)``, or one array.

    Args:
        source: what has a length and gives an example for an index; ``__getitems__``, where it has that, gives a list
            of examples for a list of indices.
        name: what messages call it.
    """

    def __init__(self, source: Any, name: str) -> None:
        self._source, self._name = source, name
        self.columns: dict[str, tuple[str, ...]] = {}
        self.declared_labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, rows: Sequence[int]) -> object:
        """Some examples, put together array by array.

        Raises:
            DataError: they differ in form or shape.
        """
        many: Callable[[Sequence[int]], Sequence[object]] | None = getattr(self._source, "__getitems__", None)
        found: list[Any] = list(many(rows)) if many is not None else [self._source[row] for row in rows]
        first = found[0]
        if isinstance(first, Mapping):
            return {name: self._stacked([example[name] for example in found], rows, f"'{name}'") for name in first}
        if isinstance(first, tuple | list) and not _is_plain(first):
            columns = zip(*found, strict=True)
            stacked = [self._stacked(list(column), rows, f"part {index}") for index, column in enumerate(columns)]
            return tuple(stacked)
        return self._stacked(found, rows, "the example")

    def all_targets(self) -> Array | None:
        """Not without reading the examples."""
        return None

    def fingerprint(self) -> str | None:
        """Nothing tells one object from another."""
        return None

    def _stacked(self, values: Sequence[object], rows: Sequence[int], part: str) -> Array:
        arrays = [
            to_numpy(value, f"{part} of example {row} of {self._name}") for value, row in zip(values, rows, strict=True)
        ]
        wrong = next((index for index, array in enumerate(arrays) if array.shape != arrays[0].shape), None)
        if wrong is not None:
            raise DataError(
                f"{part} of example {rows[wrong]} of {self._name} has shape {arrays[wrong].shape}, but that of example "
                f"{rows[0]} has {arrays[0].shape}; bring them to one shape."
            )
        return np.stack(arrays)


def is_map_style(value: object) -> bool:
    """Return whether a value is indexable but not iterable, so that it is no sequence of batches."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not hasattr(value, "__iter__")


def _is_plain(value: Sequence[object]) -> bool:
    return all(isinstance(item, int | float) for item in value)


def _some(rows: Array) -> str:
    return ", ".join(map(str, rows[:3])) + (" ..." if len(rows) > 3 else "")
