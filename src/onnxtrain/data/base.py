"""Base classes of datasets that are read in batches, and the checks that all of them share."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, SupportsIndex

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
from onnxtrain.data.image_form import Pixels
from onnxtrain.data.naming import named_array
from onnxtrain.data.target_checks import LabelCheck, TargetCheck
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


class Dataset(ABC):
    """Examples that can be read in batches any number of times.

    Attributes:
        size: Number of examples; None where it is unknown.
        name: Name in error messages.
        weighted: True where every example has a weight.
    """

    size: int | None = None
    weighted: bool = False
    name: str = "the data"

    @property
    def targets(self) -> Array | None:
        """The given target array, or the first batch's; None if it is not known yet."""
        return None

    def fingerprint(self) -> str | None:
        """Return a hash of all arrays, which identifies the data of a resumed training; None without one."""
        return None

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

    @property
    def pixels(self) -> Pixels | None:
        """Normalization of images that a trained model has to record; None without one."""
        return None

    @property
    def declared_labels(self) -> Sequence[str]:
        """Labels that the data declare for their targets, including those without an example."""
        return ()

    @property
    def hints(self) -> Sequence[str]:
        """Sentences about examples that were changed or left out."""
        return ()

    @property
    def of_tokens(self) -> bool:
        """True where examples are rows of tokens, and targets the tokens to predict."""
        return False

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model.

        Raises:
            DataError: The names differ.
        """
        return self

    def values(self, name: str) -> Array | None:
        """Return an array as given, or that of the first batch; None where it is not known yet."""
        return None

    def expecting(self, target_spec: TensorSpec | None, name: str | None = None) -> Self:
        """Return the same data with targets checked against the requirements of the loss, and converted.

        Args:
            target_spec: Requirements of the loss; None keeps the targets as given.
            name: Name of the array, where it is not the only target.

        Raises:
            DataError: The targets do not fit.
        """
        return self

    def adapting(self, adapt: Callable[[Array], Array], name: str | None = None) -> Self:
        """Return the same data with a function applied to the targets, or to a named array, before any check."""
        return self

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """Return the same data with one weight per example.

        Args:
            weights: The weights [N], or the name of an array of this data.
            spec: Name and requirements of the loss.

        Raises:
            DataError: The weights do not fit, or the batches of an iterable have no array of this name.
        """
        named = f" that has no array '{weights}'" if isinstance(weights, str) else ""
        raise DataError(f"'{spec.name}' goes with data in arrays, not with batches of an iterable{named}.").about(
            spec.name
        )

    @abstractmethod
    def batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Read all examples once, in batches.

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

    @abstractmethod
    def batch_count(self, batch_size: int) -> int | None:
        """Return the number of batches per epoch; None if it is unknown."""

    @abstractmethod
    def validate(
        self,
        *,
        classes: int | None = None,
        ignore_index: int | None = None,
        check: TargetCheck | None = None,
        checks: Mapping[str, TargetCheck] | None = None,
    ) -> None:
        """Check all values once: NaN and infinity in inputs and targets, and the range of targets.

        Args:
            classes: Number of classes, where targets are class indices; None checks no labels.
            ignore_index: Label outside the range that is allowed.
            check: Another check of the targets.
            checks: Checks of arrays by name.

        Raises:
            DataError: A value is invalid; the message names the array and the first example.
        """


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
        check_finite(values, subject, examples, original)
    return values


def check_columns(columns: Sequence[Column], data: str, *, whole: bool = False) -> int:
    """Check that columns have equal lengths and symbols; return the number of examples."""
    rows = [column for column in columns if not column.is_common]
    if not rows:
        raise DataError(f"{data} has no examples: each of its arrays holds for all examples.")
    firsts: dict[object, Column] = {}
    for column in rows:
        axis = column.spec.shape[0] if whole and column.spec.shape else None
        first = firsts.setdefault(axis, column)
        if len(column.array) != len(first.array) and (not whole or isinstance(axis, str)):
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
            )
    check_symbols((column.spec, column.array.shape, column.subject) for column in columns)
    return len(rows[0].array)


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


def chosen_check(classes: int | None, ignore_index: int | None, check: TargetCheck | None) -> TargetCheck | None:
    """Return the check of targets for the arguments of `Dataset.validate`."""
    return check if classes is None else LabelCheck(classes, ignore_index)


def check_not_negative(**values: Any) -> None:
    """Raise an `OptionError` unless all values are integers of at least 0."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or value < 0:
            raise OptionError(f"{name} is {value!r}; it must be an integer of at least 0.")
