"""Base classes of datasets: examples that are read in batches, and the checks that all kinds share."""

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
    check_right_padded,
    check_shape,
    check_symbols,
    check_type,
    convert,
    is_mapped,
)
from onnxtrain.data.table_columns import named_array
from onnxtrain.data.target_checks import LabelCheck, TargetCheck
from onnxtrain.errors import DataError, OptionError


class Batch(NamedTuple):
    """Some examples, ready for the model: right types, C-contiguous.

    Attributes:
        inputs: by input name, each [size, ...].
        targets: [size, ...], or None where none are needed.
        size: how many examples.
        whole: of how many this is a part, where other processes have the rest.
    """

    inputs: dict[str, Array]
    targets: Array | None
    size: int
    whole: int | None = None

    @property
    def total(self) -> int:
        """Total number of examples in all parts."""
        return self.size if self.whole is None else self.whole


Divide = Callable[[int, int], slice]
"""Which rows to take of a batch, from its number in the epoch and how many it has."""


def share(batch: Batch, rows: slice, whole: int | None = None) -> Batch:
    """Some examples of a batch, of ``whole`` in all processes; what is one number for all of them stays."""
    start, stop, _ = rows.indices(batch.size)
    inputs = {name: array[rows] if array.ndim else array for name, array in batch.inputs.items()}
    return Batch(inputs, None if batch.targets is None else batch.targets[rows], max(0, stop - start), whole)


class Dataset(ABC):
    """Examples that can be read in batches, as often as wanted.

    Attributes:
        size: how many examples; None when not known.
        name: what messages call it.
        weighted: whether every example has a weight.
    """

    size: int | None = None
    weighted: bool = False
    name: str = "the data"

    @property
    def targets(self) -> Array | None:
        """The target array as it came, or that of the first batch; None where there is none to be seen yet."""
        return None

    def fingerprint(self) -> str | None:
        """A hash of all that the model is given, by which a resumed training knows its data; None where none can be."""
        return None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the symbolic dimensions of the inputs that are known before batches are read."""
        return {}

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """The names of the columns of inputs that came as tables, by input, as far as they are known."""
        return {}

    @property
    def declared_labels(self) -> Sequence[str]:
        """The labels that the data declare for their targets, also those without an example."""
        return ()

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model.

        Raises:
            DataError: They have other names.
        """
        return self

    def values(self, name: str) -> Array | None:
        """An array as it came, or that of the first batch; None where there is none to be seen yet."""
        return None

    def expecting(self, target_spec: TensorSpec | None, name: str | None = None) -> Self:
        """The same data with its targets checked against, and converted to, what the loss needs, where it can be.

        Args:
            target_spec: what the loss needs; None takes them as they are.
            name: the array that is meant, where it is not the only target.

        Raises:
            DataError: they do not fit.
        """
        return self

    def adapting(self, adapt: Callable[[Array], Array], name: str | None = None) -> Self:
        """The same data with targets, or an array of a name, as a function makes them of those that came.

        That is done before anything else.
        """
        return self

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """The same data with one weight per example.

        Args:
            weights: the weights [N], or the name of an array of this data.
            spec: what the loss needs, and calls them.

        Raises:
            DataError: they do not fit, or go with batches of an iterable that have none by this name.
        """
        named = f" that has no array '{weights}'" if isinstance(weights, str) else ""
        raise DataError(f"'{spec.name}' goes with data in arrays, not with batches of an iterable{named}.")

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
        """Check all values, once: NaN and infinity in inputs and targets, and what targets may be.

        Args:
            classes: when the targets are class indices, how many classes there are; None to not check labels.
            ignore_index: a label that is allowed although it is outside the range.
            check: any other check of the targets.
            checks: checks of arrays by name.

        Raises:
            DataError: a value that cannot be used; the message names the array and the first example.
        """


class Column(NamedTuple):
    """One array of a dataset with what the model needs of it.

    Attributes:
        what: How messages call it.
        array: Its values.
        spec: What the model needs of it.
        mapped: Whether it lies in a mapped file.
        names: The names along axis 1, where it was a table.
    """

    what: str
    array: Array
    spec: TensorSpec
    mapped: bool
    names: tuple[str, ...] | None = None

    @classmethod
    def checked(cls, value: object, spec: TensorSpec | None, what: str) -> Self:
        """Convert to NumPy and check type and shape; without a spec anything goes that has examples."""
        if spec is not None and isinstance(value, DeferredArray):  # what does not fit is not made
            check_shape(value.shape, spec, what)
            check_type(value.dtype, spec, what)
        array, names = named_array(value, spec, what)
        spec = spec or TensorSpec(what, array.dtype, None)
        check_shape(array.shape, spec, what)
        check_type(array.dtype, spec, what)
        return cls(what, array, spec, is_mapped(array), names)

    @property
    def is_scalar(self) -> bool:
        """Return whether one value holds for all examples."""
        return not self.array.ndim

    def converted(self, rows: slice | Array, examples: Sequence[int] | Array, *, check: bool = False) -> Array:
        """The values of some examples in the type of the model.

        Args:
            rows: Which, in the order asked for.
            examples: For each row its index in the data, for error messages.
            check: Whether to refuse NaN and infinity.
        """
        if self.is_scalar:
            return self._replace(array=self.array.reshape(1)).converted(slice(None), [0], check=check).reshape(())
        original = self.read(rows)
        values = convert(original, self.spec.dtype, self.what, examples)
        if self.spec.right_padded:
            check_right_padded(values, self.what, examples)
        if check:
            check_finite(values, self.what, examples, original)
        return values

    def read(self, rows: slice | Array) -> Array:
        """The values of some examples, in the order asked for."""
        if isinstance(rows, slice) or not self.mapped:
            return self.array[rows]
        # In file order, so that the disk reads forward; then back to the order asked for.
        order = np.argsort(rows, kind="stable")
        values = np.empty((len(rows), *self.array.shape[1:]), self.array.dtype)
        values[order] = self.array[rows[order]]
        return values


def check_columns(columns: Sequence[Column], data: str) -> int:
    """Check that columns fit each other; return how many examples they have."""
    rows = [column for column in columns if not column.is_scalar]
    if not rows:
        raise DataError(f"{data} has no examples: every array of it is a scalar.")
    first = rows[0]
    size = len(first.array)
    for column in rows[1:]:
        if len(column.array) != size:
            raise DataError(
                f"{data} has arrays of different lengths: {first.what} has {size} examples, "
                f"{column.what} has {len(column.array)}."
            )
    if not size:
        raise DataError(f"{data} is empty: {first.what} has shape {first.array.shape}; at least one example is needed.")
    check_symbols((column.spec, column.array.shape, column.what) for column in columns)
    return size


def checked_batch_size(batch_size: SupportsIndex) -> int:
    """Return a batch size as an integer, or raise a `DataError`."""
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = 0
    if size < 1:
        raise DataError(f"the batch size is {batch_size!r}; it must be a whole number of at least 1.")
    return size


def chosen_check(classes: int | None, ignore_index: int | None, check: TargetCheck | None) -> TargetCheck | None:
    """The check of targets that the arguments of `Dataset.validate` mean."""
    return check if classes is None else LabelCheck(classes, ignore_index)


def check_not_negative(**values: Any) -> None:
    """Raise an `OptionError` unless all values are whole numbers from 0 upwards."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or value < 0:
            raise OptionError(f"{name} is {value!r}; it must be a whole number of at least 0.")
