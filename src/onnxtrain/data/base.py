"""Base classes of datasets that are read in batches, and the checks that all of them share."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self, SupportsIndex

import numpy as np

from onnxtrain.data.conversion import (
    Array,
    DeferredArray,
    TensorSpec,
    check_finite,
    check_indices,
    check_right_padded,
    check_shape,
    check_symbols,
    check_type,
    convert,
    is_mapped,
)
from onnxtrain.data.hashing import checksum
from onnxtrain.data.image_form import Pixels
from onnxtrain.data.naming import Wanted, named_array
from onnxtrain.data.target_checks import TargetCheck
from onnxtrain.errors import DataError, OptionError


class Batch(NamedTuple):
    """Examples in the types of the model, C-contiguous."""

    inputs: dict[str, Array]
    targets: Array | None
    size: int
    whole: int | None = None
    content: int = 0
    common: frozenset[str] = frozenset()

    @property
    def total(self) -> int:
        """Total number of examples in all parts."""
        return self.size if self.whole is None else self.whole

    def target(self, name: str | None) -> Array | None:
        """The only targets, or those of a name."""
        return self.targets if name is None else self.inputs.get(name)

    @property
    def tokens(self) -> int:
        """Tokens in all parts of a batch of rows of tokens: those of its mask [size, tokens], else all positions."""
        masks = [array for name, array in self.inputs.items() if "mask" in name.lower() and array.ndim == 2]
        count = int(np.count_nonzero(masks[0])) if masks else 0 if self.targets is None else self.targets.size
        return round(count * self.total / max(self.size, 1))


Divide = Callable[[int, int], slice]
"""Returns the rows of one process, given the number of a batch in the epoch and its size."""


def share(batch: Batch, rows: slice, whole: int | None = None) -> Batch:
    """Return some rows of a batch of ``whole`` examples; inputs with one value for all are kept."""
    start, stop, _ = rows.indices(batch.size)
    inputs = {
        name: array if not array.ndim or name in batch.common else array[rows] for name, array in batch.inputs.items()
    }
    targets = None if batch.targets is None else batch.targets[rows]
    return Batch(inputs, targets, max(0, stop - start), whole, batch.content, batch.common)


NO_CHECKS: Final[Mapping[str | None, TargetCheck]] = MappingProxyType({})
"""No checks of targets."""


READY: Final = "give ready batches, as an iterable or to train_step"
"""Cure for data that cannot be cut into batches."""


class Facts:
    """Facts that data tell about themselves.

    Attributes:
        pixels: Normalization of images that a trained model has to record; None without one.
        declared_labels: Labels that the data declare for their targets, including those without an example.
        hints: Sentences about examples that were changed or left out.
        of_tokens: True where examples are rows of tokens, and targets the tokens to predict.
        kept: Settings of plugins, as JSON data by plugin, that a trained model has to record for later data.
    """

    pixels: Pixels | None = None
    declared_labels: Sequence[str] = ()
    hints: Sequence[str] = ()
    of_tokens: bool = False
    kept: Mapping[str, Any] = MappingProxyType({})


class DataSource(ABC):
    """Data that open themselves for a model: a form that readers of plugins return."""

    @abstractmethod
    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the arrays that a model and its losses want, as a dataset."""


class Dataset(Facts, ABC):
    """Examples that can be read in batches any number of times.

    Attributes:
        size: Number of examples; None where it is unknown.
        name: Name in error messages.
        weighted: True where every example has a weight.
        borrows: True where arrays of a batch belong to others, who may overwrite them once the next one is read.
    """

    size: int | None = None
    weighted: bool = False
    borrows: bool = False
    name: str = "the data"
    _divide: Divide | None = None
    _time_first: TensorSpec | None = None

    def check_cut(self, rows: int = 0, *, shuffle: bool = False) -> None:
        """Refuse to cut into batches of some rows, or to shuffle, what does not have its examples on the first axis."""
        if self._time_first is None:
            return
        if self._divide is not None:
            self._time_first.check_cut("train in one process")
        elif self.size is not None and (shuffle or not rows):
            self._time_first.check_cut(READY)
        elif self.size is not None and self.size > rows:
            self._time_first.check_cut(f"give ready batches as an iterable, or all in one with batch_size={self.size}")

    def values(self, name: str | None = None) -> Array | None:
        """Return the only targets, or the array of a name, as given or of the first batch; None if not known yet."""
        return None

    @property
    def targets(self) -> Array | None:
        """The only targets; see :meth:`values`."""
        return self.values()

    def fingerprint(self) -> str | None:
        """Return a hash of all arrays, which identifies the data of a resumed training; None without one."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return the number of examples and the fingerprint; both are None for an iterable of unknown content."""
        return {"examples": self.size, "content": self.fingerprint()}

    def contents(self, most: int) -> dict[str, tuple[str, Array]]:
        """Return type and shape of every array in words, and sums of up to ``most`` rows; empty if they are unknown."""
        return {}

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the inputs' symbolic dimensions, as far as they are known before batches are read."""
        return {}

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns of inputs that were given as tables, as far as they are known, by input."""
        return {}

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model."""
        return self

    def expecting(self, target_spec: TensorSpec, name: str | None = None) -> Self:
        """Return the same data with its targets, or a named array, checked against the requirements of the loss."""
        return self

    def adapting(self, adapt: Callable[[Array], Array], name: str | None = None) -> Self:
        """Return the same data with a function applied to the targets, or to a named array, before any check."""
        return self

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """Return the same data with one weight per example: an array [N], or the name of an array of this data."""
        named = f" that has no array '{weights}'" if isinstance(weights, str) else ""
        raise DataError(f"'{spec.name}' goes with data in arrays, not with batches of an iterable{named}.").about(
            spec.name
        )

    def batches(
        self, batch_size: int = 1, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read all examples once, in batches; an iterable of batches decides their size and order.

        Args:
            batch_size: Examples per batch; the last batch may be smaller.
            shuffle: Read in random order, which depends on `seed` and `epoch` only.
            seed: At least 0.
            epoch: Number of the epoch, from 0; the order differs in every epoch.
            start: Number of batches to skip, to continue in the middle of an epoch.

        Raises:
            DataError: The batch size is below 1, or the data does not fit the model.
            OptionError: The seed, the epoch or the start is negative.
        """
        batch_size = checked_batch_size(batch_size)
        check_not_negative(seed=seed, epoch=epoch, start=start)
        self.check_cut(batch_size, shuffle=shuffle)
        found = self._read(batch_size, (seed, epoch) if shuffle else None, start)
        return found if self._divide is None else self._parts(found, self._divide, start)

    def shared(self, divide: Divide) -> Self:
        """Return a dataset of one process's part of every batch, which may be empty."""
        result = copy.copy(self)
        result._divide = divide
        return result

    def _parts(self, batches: Iterator[Batch], divide: Divide, start: int) -> Iterator[Batch]:
        """Return parts of batches that are read as a whole, with a checksum of the whole."""
        for number, batch in enumerate(batches, start):
            arrays = [*batch.inputs.values(), *([] if batch.targets is None else [batch.targets])]
            own = share(batch, divide(number, batch.size), batch.size)
            yield own._replace(content=checksum(arrays))

    def take(self, indices: Array) -> Self:
        """Return the examples with these indices, of data whose size is known."""
        raise NotImplementedError

    def split(self, fraction: float) -> tuple[Self, Self] | None:
        """Return parts for training and validation, where any choice of examples would mix them; else ``None``."""
        return None

    def in_units(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return predictions in the units of the data, which may have been scaled."""
        return outputs

    @abstractmethod
    def _read(self, batch_size: int, shuffled: tuple[int, int] | None, start: int) -> Iterator[Batch]:
        """Read all examples once, in the order of a seed and an epoch, or as given."""

    def batch_count(self, batch_size: int = 1) -> int | None:
        """Return the number of batches per epoch, of which the last may be smaller; None if it is unknown."""
        return None if self.size is None else -(-self.size // checked_batch_size(batch_size))

    @abstractmethod
    def validate(self, checks: Mapping[str | None, TargetCheck] = NO_CHECKS) -> None:
        """Check all values once: NaN, infinity, and arrays by the checks of their names; None is the only targets."""


def epoch_order(size: int, shuffled: tuple[int, int] | None) -> Array | None:
    """Return the order of the examples, which depends on seed and epoch only; None for the order of the data."""
    return None if shuffled is None else permutation(np.random.SeedSequence(shuffled), size)


def permutation(seed: np.random.SeedSequence, size: int) -> Array:
    """Return ``Generator.permutation(size)``, as uint32 where the size allows it to halve the memory."""
    rows = np.arange(size, dtype=np.uint32 if size <= 2**32 else np.int64)
    np.random.Generator(np.random.PCG64(seed)).shuffle(rows)
    return rows


class Column(NamedTuple):
    """One array of a dataset with the model's requirements."""

    subject: str
    array: Array
    spec: TensorSpec
    mapped: bool
    names: tuple[str, ...] | None = None

    @classmethod
    def checked(cls, value: object, spec: TensorSpec | None, subject: str, *, whole: bool = False) -> Self:
        """Convert to NumPy and check type and shape; without a spec only the axis of examples is checked."""
        if spec is not None and isinstance(value, DeferredArray):  # checked before the array is created
            check_shape(value.shape, spec, subject)
            check_type(value.dtype, spec, subject)
        array, names = named_array(value, spec, subject)
        spec = spec or TensorSpec(subject, array.dtype, None)
        check_shape(array.shape, spec, subject, whole=whole)
        check_type(array.dtype, spec, subject)
        return cls(subject, array, spec, is_mapped(array), names)

    @property
    def is_common(self) -> bool:
        """True where one value holds for all examples."""
        return self.spec.common or not self.array.ndim

    def converted(self, rows: slice | Array, examples: Sequence[int] | Array, *, check: bool = False) -> Array:
        """Return the values of some examples in the type of the model."""
        if self.is_common:
            rows, examples = slice(None), np.arange(len(self.array) if self.array.ndim else 1)
        if not self.array.ndim:
            return self._replace(array=self.array.reshape(1)).converted(rows, examples, check=check).reshape(())
        return converted(self.read(rows), self.spec, self.subject, examples, check=check)

    def read(self, rows: slice | Array) -> Array:
        """Return the values of some examples, in this order."""
        if isinstance(rows, slice) or not self.mapped:
            return self.array[rows]
        # In file order, so that the disk reads forward.
        order = np.argsort(rows, kind="stable")
        values = np.empty((len(rows), *self.array.shape[1:]), self.array.dtype)
        values[order] = self.array[rows[order]]
        return values


def converted(
    original: Array, spec: TensorSpec, subject: str, examples: Sequence[int] | Array, *, check: bool
) -> Array:
    """Return rows of an array in the type of the model, after the checks of their values; see `Column.converted`."""
    values = convert(original, spec.dtype, subject, examples)
    if spec.right_padded or spec.documents:
        check_right_padded(np.minimum(values, 1) if spec.documents else values, subject, examples)
    if spec.table_rows is not None:
        check_indices(values, spec.table_rows, subject, examples)
    if check:
        check_finite(values, subject, examples, original, spec.may_miss)
    return values


def check_columns(columns: Sequence[Column], data: str, *, whole: bool = False) -> int:
    """Check that columns have equal lengths and symbols; return the number of examples."""
    rows = [column for column in columns if not column.is_common]
    if not rows:
        return 1
    firsts: dict[object, Column] = {}
    for column in rows:
        axis = column.spec.shape[0] if whole and column.spec.shape else None
        first = firsts.setdefault(axis, column)
        if len(column.array) != len(first.array) and (not whole or isinstance(axis, str)):
            for each in () if whole else rows:
                each.spec.check_cut(READY)
            raise DataError(
                f"{data} has arrays of different lengths: {first.subject} has {len(first.array)} examples, "
                f"{column.subject} has {len(column.array)}."
            ).about(column.subject, got=len(column.array), wanted=len(first.array))
        if not len(column.array):
            raise DataError(
                f"{data} is empty: {column.subject} has shape {column.array.shape}; at least one example is needed."
            ).about(column.subject, got=column.array.shape)
        if whole and column.spec.table_rows is not None and not column.array.size:
            raise DataError(
                f"{data} has no tokens: {column.subject} has shape {column.array.shape}; a row needs at least one."
            ).about(column.subject, got=column.array.shape)
    check_symbols((column.spec, column.array.shape, column.subject) for column in columns)
    return len(rows[-1 if whole else 0].array)  # the targets stand last


def checked_batch_size(batch_size: SupportsIndex) -> int:
    """Return a batch size as an integer, or raise a `DataError`."""
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = 0
    if size < 1:
        raise DataError(f"the batch size is {batch_size!r}; it must be an integer of at least 1.").about(
            "batch_size", got=batch_size
        )
    return size


def check_not_negative(**values: Any) -> None:
    """Raise an `OptionError` unless all values are integers of at least 0."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or value < 0:
            raise OptionError(f"{name} is {value!r}; it must be an integer of at least 0.")
