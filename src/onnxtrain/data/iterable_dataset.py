"""Datasets of batches from any iterable."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Self

import numpy as np

from onnxtrain.data.base import (
    Batch,
    Column,
    Dataset,
    check_columns,
    check_not_negative,
    checked_batch_size,
    chosen_check,
)
from onnxtrain.data.conversion import Array, TensorSpec, to_numpy
from onnxtrain.data.naming import match_batch
from onnxtrain.data.target_checks import TargetCheck, check_weights
from onnxtrain.errors import DataError


class IterableDataset(Dataset):
    """Examples from any iterable of batches: a list, a PyTorch-style loader, a function that returns one.

    The source decides the size and order of batches: ``batch_size``, ``shuffle``, ``seed`` and ``epoch`` have no
    effect. A generator can be read for one epoch only.

    Args:
        source: The iterable, or a function without arguments that returns an iterator.
        specs: Requirements of the model's inputs.
        target: Name of the target, where batches are mappings with several arrays besides the inputs.
        target_spec: Requirements of the loss.
        need_target: Raise an error where batches have no targets.
        validate: Check values for NaN and infinity when they are read.
        others: Names of further arrays of every batch, taken as given.
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
        others: Sequence[str] = (),
    ) -> None:
        self._source = source
        self._others = {name: TensorSpec(name, np.dtype(np.float32), beside=True) for name in others}
        self.name = getattr(source, "__name__", "") if callable(source) else f"the {type(source).__name__}"
        self._specs = {spec.name: spec for spec in specs}
        self._target = target
        self._target_specs: dict[str | None, TensorSpec | None] = {None: target_spec}
        self._need_target = need_target
        self._check_values = validate
        self._target_checks: dict[str | None, TargetCheck] = {}
        self._adapt: dict[str | None, Callable[[Array], Array]] = {}
        self._weights: tuple[str, TensorSpec] | None = None
        self._epochs_read = [0]  # shared by all copies, as a one-shot iterator is
        self._columns: dict[str, tuple[str, ...]] = {}  # of the first batch; shared by all copies

    @property
    def targets(self) -> Array | None:
        """Targets of the first batch of a list; other sources are not read in advance."""
        if not isinstance(self._source, list | tuple) or not self._source:
            return None
        targets = self._matched(self._source[0], "batch 0")[1]
        return None if targets is None else self._adapted(targets, "the target array of batch 0")

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns of tables in the batches that have been read."""
        return dict(self._columns)

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model; see `Dataset.in_order_of`."""
        known = {spec.name: spec for spec in specs if spec.columns is not None}
        result = copy.copy(self)
        result._specs = {name: known.get(name, spec) for name, spec in self._specs.items()}
        return result

    def values(self, name: str) -> Array | None:
        """Return an array of the first batch of a list; see `targets`."""
        if not isinstance(self._source, list | tuple) or not self._source:
            return None
        given = self._matched(self._source[0], "batch 0")[0].get(name)
        return None if given is None else self._adapted(given, f"'{name}' of batch 0", name)

    def _adapted(self, targets: object, subject: str, name: str | None = None) -> Array:
        array = to_numpy(targets, subject)
        return self._adapt[name](array) if name in self._adapt else array

    def adapting(self, adapt: Callable[[Array], Array], name: str | None = None) -> Self:
        """Return the same source with other targets; see `Dataset.adapting`."""
        result = copy.copy(self)
        result._adapt = {**self._adapt, name: adapt}
        return result

    def expecting(self, target_spec: TensorSpec | None, name: str | None = None) -> Self:
        """Return the same source with other requirements of its targets, checked when batches are read."""
        result = copy.copy(self)
        result._target_specs = {**self._target_specs, name: target_spec}
        return result

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """Return the same source with one weight per example; see `Dataset.with_weights`."""
        if not isinstance(weights, str) or weights not in self._others:
            return super().with_weights(weights, spec)
        result = copy.copy(self)
        result._weights, result.weighted = (weights, spec), True
        return result

    def batches(
        self, batch_size: int = 1, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read the source once; see `Dataset.batches`. The source decides batch size and order."""
        checked_batch_size(batch_size)
        check_not_negative(seed=seed, epoch=epoch, start=start)
        return self._read_batches(self._open(), start)

    def batch_count(self, batch_size: int = 1) -> int | None:
        """Return the number of batches that the source reports; None if it reports none."""
        try:
            return len(self._source) if isinstance(self._source, Sized) else None
        except TypeError:  # a PyTorch loader over a stream has no length
            return None

    def validate(
        self,
        *,
        classes: int | None = None,
        ignore_index: int | None = None,
        check: TargetCheck | None = None,
        checks: Mapping[str, TargetCheck] | None = None,
    ) -> None:
        """Check every batch when it is read, since the source may be large or endless."""
        self._check_values = True
        chosen = chosen_check(classes, ignore_index, check)
        self._target_checks = {} if chosen is None else {None: chosen}
        self._target_checks.update(checks or {})

    def _open(self) -> Iterator[object]:
        source = self._source
        if isinstance(source, Iterator):
            if self._epochs_read[0]:
                raise DataError(
                    f"the data is a one-shot iterator ({type(source).__name__}), exhausted after one epoch: "
                    f"give a list, a loader, or a function that returns a new iterator."
                )
            self._epochs_read[0] += 1
            return source
        opened = source() if callable(source) else source
        if not isinstance(opened, Iterable):
            raise DataError(f"the data function returned a {type(opened).__name__}; it must return an iterator.")
        return iter(opened)

    def _read_batches(self, items: Iterator[object], start: int) -> Iterator[Batch]:
        number = -1
        for number, item in enumerate(items):
            if number >= start:
                yield self._batch(item, f"batch {number}")
        if number < 0:
            raise DataError("the data is empty: its iterator returned no batch; at least one is needed.")

    def _batch(self, item: object, name: str) -> Batch:
        inputs, targets = self._matched(item, name)
        columns = [self._column(key, value, name) for key, value in inputs.items()]
        if targets is not None:
            subject = f"the target array of {name}"
            columns.append(Column.checked(self._adapted(targets, subject), self._target_specs[None], subject))
        size = check_columns(columns, name)
        arrays = [column.converted(slice(None), range(size), check=self._check_values) for column in columns]
        for key, column, array in zip([*inputs, None], columns, arrays, strict=False):
            if key in self._target_checks:
                self._target_checks[key](array, column.subject, range(size))
        found = dict(zip(inputs, arrays, strict=False))
        if self._weights is not None:
            weights, spec = self._weights
            found[spec.name] = found.pop(weights)
        common = frozenset(key for key, column in zip(inputs, columns, strict=False) if column.is_common)
        return Batch(found, None if targets is None else arrays[-1], size, common=common)

    def _column(self, key: str, value: object, name: str) -> Column:
        if self._weights is not None and key == self._weights[0]:
            subject = f"'{key}' of {name}"
            return Column.checked(check_weights(to_numpy(value, subject), subject), self._weights[1], subject)
        if key in self._others:
            subject = f"target '{key}' of {name}"
            return Column.checked(self._adapted(value, subject, key), self._target_specs.get(key), subject)
        spec = self._specs[key]
        if spec.columns is None and key in self._columns:
            spec = dataclasses.replace(spec, columns=self._columns[key])
        column = Column.checked(value, spec, f"input '{key}' of {name}")
        if column.names is not None:
            self._columns.setdefault(key, column.names)
        return column

    def _matched(self, item: object, name: str) -> tuple[dict[str, object], object | None]:
        specs = [*self._specs.values(), *self._others.values()]
        if self._weights is not None and isinstance(item, list | tuple) and not isinstance(item[0], Mapping):
            raise DataError(
                f"{name} is a {type(item).__name__} of arrays without names, but sample_weight is the name of an "
                f"array; give a mapping with '{self._weights[0]}'."
            )
        return match_batch(item, specs, name, target=self._target, need_target=self._need_target)
