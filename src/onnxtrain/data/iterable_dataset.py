"""Datasets of batches from any iterable."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Self

import numpy as np

from onnxtrain.data.base import (
    Batch,
    Column,
    Dataset,
    check_columns,
    check_not_negative,
    checked_batch_size,
    chosen_check,
    converted,
)
from onnxtrain.data.conversion import Array, TensorSpec, to_numpy
from onnxtrain.data.naming import match_batch
from onnxtrain.data.target_checks import TargetCheck, check_weights
from onnxtrain.errors import DataError


class _Form(NamedTuple):
    """Facts about batches of one form, so that the next one needs no checks of types and shapes."""

    arrays: list[tuple[str | None, np.dtype[Any], tuple[int, ...]]]
    specs: dict[str | None, TensorSpec]
    size: int
    common: frozenset[str]


class IterableDataset(Dataset):
    """Examples from any iterable of batches: a list, a PyTorch-style loader, a function that returns one.

    The source decides the size and order of batches: ``batch_size``, ``shuffle``, ``seed`` and ``epoch`` have no
    effect. A generator can be read for one epoch only.
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
        whole: bool = False,
    ) -> None:
        self._source = source
        self._whole = whole
        self._form: _Form | None = None  # of the last batch
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
        result = self._copy()
        result._specs = {name: known.get(name, spec) for name, spec in self._specs.items()}
        return result

    def values(self, name: str) -> Array | None:
        """Return an array of the first batch of a list; see `targets`."""
        if not isinstance(self._source, list | tuple) or not self._source:
            return None
        given = self._matched(self._source[0], "batch 0")[0].get(name)
        return None if given is None else self._adapted(given, f"'{name}' of batch 0", name)

    def _copy(self) -> Self:
        result = copy.copy(self)
        result._form = None
        return result

    def _adapted(self, targets: object, subject: str, name: str | None = None) -> Array:
        array = to_numpy(targets, subject)
        return self._adapt[name](array) if name in self._adapt else array

    def adapting(self, adapt: Callable[[Array], Array], name: str | None = None) -> Self:
        """Return the same source with other targets; see `Dataset.adapting`."""
        result = self._copy()
        result._adapt = {**self._adapt, name: adapt}
        return result

    def expecting(self, target_spec: TensorSpec | None, name: str | None = None) -> Self:
        """Return the same source with other requirements of its targets, checked when batches are read."""
        result = self._copy()
        result._target_specs = {**self._target_specs, name: target_spec}
        return result

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """Return the same source with one weight per example; see `Dataset.with_weights`."""
        if not isinstance(weights, str) or weights not in self._others:
            return super().with_weights(weights, spec)
        result = self._copy()
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
                ).about("data", got=type(source).__name__)
            self._epochs_read[0] += 1
            return source
        opened = source() if callable(source) else source
        if not isinstance(opened, Iterable):
            raise DataError(f"the data function returned a {type(opened).__name__}; it must return an iterator.").about(
                "data", got=type(opened).__name__
            )
        return iter(opened)

    def _read_batches(self, items: Iterator[object], start: int) -> Iterator[Batch]:
        number = -1
        for number, item in enumerate(items):
            if number >= start:
                yield self._batch(item, f"batch {number}")
        if number < 0:
            raise DataError("the data is empty: its iterator returned no batch; at least one is needed.")

    def _batch(self, item: object, name: str) -> Batch:
        return self.convert(*self._matched(item, name), name)

    def convert(self, inputs: Mapping[str, object], targets: object | None, name: str, *, known: bool = False) -> Batch:
        """Convert the arrays of one batch to those that the model reads.

        Types and shapes are checked again only where they differ from those of the batch before.
        """
        given: dict[str | None, Any] = dict(inputs.items())
        if targets is not None:
            given[None] = targets
        for key in given:
            if key is None or key in self._others:
                given[key] = self._beside(given[key], key, name)
        form = self._form
        found: dict[Any, Array] = {}
        if form is None or not known:
            arrays = [(key, value.dtype, value.shape) for key, value in given.items() if type(value) is np.ndarray]
            known = form is not None and form.arrays == arrays and len(arrays) == len(given)
        if form is not None and known:
            rows = range(form.size)
            for key, value in given.items():
                found[key] = converted(value, form.specs[key], self._subject(key, name), rows, check=self._check_values)
        else:
            columns = {key: self._column(key, value, name) for key, value in given.items()}
            form = _Form(
                arrays,
                {key: column.spec for key, column in columns.items()},
                check_columns([*columns.values()], name, whole=self._whole),
                frozenset(key for key, column in columns.items() if key is not None and column.is_common),
            )
            rows = range(form.size)
            for key, column in columns.items():
                found[key] = column.converted(slice(None), rows, check=self._check_values)
            self._form = None if any(column.is_common for column in columns.values()) else form
        for key, check in self._target_checks.items():
            if key in found:
                check(found[key], self._subject(key, name), rows)
        if self._weights is not None:
            weights, spec = self._weights
            found[spec.name] = found.pop(weights)
        only = found.pop(None, None)
        return Batch(found, only, form.size, common=form.common)

    def _subject(self, key: str | None, name: str) -> str:
        """Name of an array of a batch in error messages."""
        if key is None:
            return f"the target array of {name}"
        if self._weights is not None and key == self._weights[0]:
            return f"'{key}' of {name}"
        return f"{'target' if key in self._others else 'input'} '{key}' of {name}"

    def _beside(self, value: object, key: str | None, name: str) -> Array:
        """Return targets in the form of the loss, or weights."""
        if isinstance(value, np.ndarray):
            array = value
        else:
            spec = self._target_specs.get(key)
            array = to_numpy(value, self._subject(key, name), "" if spec is None else spec.hint)
        if self._weights is not None and key == self._weights[0]:
            return check_weights(array, self._subject(key, name))
        return self._adapt[key](array) if key in self._adapt else array

    def _column(self, key: str | None, value: object, name: str) -> Column:
        subject = self._subject(key, name)
        if self._weights is not None and key == self._weights[0]:
            return Column.checked(value, self._weights[1], subject, whole=self._whole)
        if key is None or key in self._others:
            return Column.checked(value, self._target_specs.get(key), subject, whole=self._whole)
        spec = self._specs[key]
        if spec.columns is None and key in self._columns:
            spec = dataclasses.replace(spec, columns=self._columns[key])
        column = Column.checked(value, spec, subject, whole=self._whole)
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
