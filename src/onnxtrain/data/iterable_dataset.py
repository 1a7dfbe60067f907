"""Datasets of batches from any iterable."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Self

import numpy as np

from onnxtrain.data.base import NO_CHECKS, Batch, Column, Dataset, check_columns, converted
from onnxtrain.data.conversion import Array, TensorSpec, time_first, to_numpy
from onnxtrain.data.naming import Wanted
from onnxtrain.data.target_checks import TargetCheck, check_weights
from onnxtrain.errors import DataError


class _Form(NamedTuple):
    """Facts about batches of one form, so that the next one needs no checks of types and shapes."""

    arrays: list[tuple[str | None, np.dtype[Any], tuple[int, ...]]]
    specs: dict[str | None, TensorSpec]
    size: int
    common: frozenset[str]


class _Beside(NamedTuple):
    """Requirements of an array beside the inputs: targets, or weights of examples."""

    spec: TensorSpec | None = None
    adapt: Callable[[Array], Array] | None = None
    check: TargetCheck | None = None


class IterableDataset(Dataset):
    """Examples from any iterable of batches, which decides their size and order; a generator is read for one epoch."""

    borrows = True

    def __init__(
        self, source: Iterable[object] | Callable[[], Iterable[object]], wanted: Wanted, *, whole: bool = False
    ) -> None:
        self._source, self._wanted, self._time_first = source, wanted, time_first(wanted.specs)
        firsts = {spec.shape[0] for spec in wanted.specs if spec.shape and isinstance(spec.shape[0], str)}
        self._whole = whole or self._time_first is not None or len(firsts) > 1  # axes of other names are others
        self._form: _Form | None = None  # of the last batch
        self.name = getattr(source, "__name__", "") if callable(source) else f"the {type(source).__name__}"
        self._specs = {spec.name: spec for spec in wanted.specs if not spec.beside}
        self._beside: dict[str | None, _Beside] = dict.fromkeys([*wanted.names_beside(), None], _Beside())
        self._weights: str | None = None  # name of the array of weights
        self._check_values = False
        self._epochs_read = [0]  # shared by all copies, as a one-shot iterator is
        self._columns: dict[str, tuple[str, ...]] = {}  # of the first batch; shared by all copies

    def values(self, name: str | None = None) -> Array | None:
        """Return an array of the first batch of a list; other sources are not read in advance."""
        if not isinstance(self._source, list | tuple) or not self._source:
            return None
        inputs, targets = self._matched(self._source[0], "batch 0")
        given = targets if name is None else inputs.get(name)
        shown = "the target array" if name is None else f"'{name}'"
        return None if given is None else self.adapted(given, name, f"{shown} of batch 0")

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns of tables in the batches that have been read."""
        return dict(self._columns)

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model; see `Dataset.in_order_of`."""
        result = self._copy()
        result._specs = self._specs | {
            spec.name: spec for spec in specs if spec.columns is not None and spec.name in self._specs
        }
        return result

    def _copy(self, name: str | None = None, **changes: Any) -> Self:
        result = copy.copy(self)
        result._form = None
        result._beside = {**self._beside, name: self._beside.get(name, _Beside())._replace(**changes)}
        return result

    def adapting(self, adapt: Callable[[Array], Array], name: str | None = None) -> Self:
        """Return the same source with other targets; see `Dataset.adapting`."""
        return self._copy(name, adapt=adapt)

    def expecting(self, target_spec: TensorSpec, name: str | None = None) -> Self:
        """Return the same source with other requirements of its targets, checked when batches are read."""
        return self._copy(name, spec=target_spec)

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """Return the same source with one weight per example; see `Dataset.with_weights`."""
        if not isinstance(weights, str) or weights not in self._beside:
            return super().with_weights(weights, spec)
        result = self._copy(weights, spec=spec)
        result._weights, result.weighted = weights, True
        return result

    def batch_count(self, batch_size: int = 1) -> int | None:
        """Return the number of batches that the source reports; None if it reports none."""
        try:
            return len(self._source) if isinstance(self._source, Sized) else None
        except TypeError:  # a PyTorch loader over a stream has no length
            return None

    def validate(self, checks: Mapping[str | None, TargetCheck] = NO_CHECKS) -> None:
        """Check every batch when it is read, since the source may be large or endless."""
        self._check_values = True
        self._beside = {name: beside._replace(check=checks.get(name)) for name, beside in self._beside.items()}

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

    def _read(self, batch_size: int, shuffled: tuple[int, int] | None, start: int) -> Iterator[Batch]:
        return self._converted(self._open(), start)

    def _converted(self, items: Iterator[object], start: int) -> Iterator[Batch]:
        number = -1
        for number, item in enumerate(items):
            if number >= start:
                yield self.batch_of(item, f"batch {number}")
        if number < 0:
            raise DataError("the data is empty: its iterator returned no batch; at least one is needed.")

    def batch_of(self, item: object, name: str) -> Batch:
        """Convert one item of the source, inputs with their targets, to a batch."""
        return self.convert(*self._matched(item, name), name)

    def convert(self, inputs: Mapping[str, object], targets: object | None, name: str, *, known: bool = False) -> Batch:
        """Convert the arrays of one batch; types and shapes are checked where they differ from the last ones."""
        given: dict[str | None, Any] = dict(inputs.items())
        if targets is not None:
            given[None] = targets
        for key in self._beside:
            if key in given:
                given[key] = self.adapted(given[key], key, self._subject(key, name))
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
        for key, beside in self._beside.items():
            if beside.check is not None and key in found:
                beside.check(found[key], self._subject(key, name), rows)
        if self._weights is not None and (spec := self._beside[self._weights].spec) is not None:
            found[spec.name] = found.pop(self._weights)
        only = found.pop(None, None)
        return Batch(found, only, form.size, common=form.common)

    def _subject(self, key: str | None, name: str) -> str:
        if key is None:
            return f"the target array of {name}"
        kind = "" if key == self._weights else "target " if key in self._beside else "input "
        return f"{kind}'{key}' of {name}"

    def adapted(self, value: object, key: str | None, subject: str) -> Array:
        """Return targets in the form of the loss, or weights."""
        spec, adapt, _ = self._beside[key]
        plain = value if isinstance(value, np.ndarray) and not value.dtype.hasobject else None
        array = to_numpy(value, subject, "" if spec is None else spec.hint, may_miss=True) if plain is None else plain
        if key is not None and key == self._weights:
            return check_weights(array, subject)
        return array if adapt is None else adapt(array)

    def _column(self, key: str | None, value: object, name: str) -> Column:
        subject = self._subject(key, name)
        if key is None or key in self._beside:
            return Column.checked(value, self._beside[key].spec, subject, whole=self._whole)
        spec = self._specs[key]
        if spec.columns is None and key in self._columns:
            spec = dataclasses.replace(spec, columns=self._columns[key])
        column = Column.checked(value, spec, subject, whole=self._whole)
        if column.names is not None:
            self._columns.setdefault(key, column.names)
        return column

    def _matched(self, item: object, name: str) -> tuple[dict[str, object], object | None]:
        if self._weights is not None and isinstance(item, list | tuple) and not isinstance(item[0], Mapping):
            raise DataError(
                f"{name} is a {type(item).__name__} of arrays without names, but sample_weight is the name of an "
                f"array; give a mapping with '{self._weights}'."
            )
        return self._wanted.joined(self._wanted.of_batch(item, name), name)
