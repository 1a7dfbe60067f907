"""Conversion and checks of one array for a model: NumPy, element type, shape, finite values, numbers in text."""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from onnxtrain.data.image_form import Pixels, Resizing
from onnxtrain.errors import DataError
from onnxtrain.runtime.failures import outside_of_table

Array = npt.NDArray[Any]


class LazyRows(ABC):
    """Array whose rows are computed when they are read; its ``dtype``, ``shape`` and ``ndim`` are known before."""

    dtype: np.dtype[Any] = np.dtype(np.float32)
    shape: tuple[int, ...]
    pixels: Pixels | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: Any) -> Array:
        """Return some rows, or all of a slice."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or self.dtype, copy=False)


class Rescaled(LazyRows):
    """Array of bytes that reads as ``stored * scale + shift`` in float32: a quarter of the memory."""

    def __init__(self, stored: Array, scale: Array, shift: Array, pixels: Pixels | None = None) -> None:
        self._stored, self.pixels = stored, pixels
        self._scale, self._shift = scale.astype(np.float32), shift.astype(np.float32)
        self.shape, self.ndim = stored.shape, stored.ndim
        self.base = stored

    def __getitem__(self, rows: Any) -> Array:
        values = self._stored[rows].astype(np.float32)
        values *= self._scale
        values += self._shift
        return np.asarray(values)


# Kinds of data that convert to each kind of input. Floats never become integers, which would lose fractions.
_ACCEPTED: Final = {
    "boolean": {"boolean"},
    "integer": {"boolean", "integer"},
    "float": {"boolean", "integer", "float"},
    "string": {"string"},
}


def is_mapped(array: Array) -> bool:
    """Return whether an array is, or is a view of, a memory-mapped file."""
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap):
            return True
        base = getattr(base, "base", None)
    return False


@dataclass(frozen=True)
class TensorSpec:
    """Requirements of a model on one array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None = None
    hint: str = ""
    size_hint: str = ""
    beside: bool = False
    columns: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()
    kv_caches: tuple[str, ...] = ()
    right_padded: bool = False
    table_rows: int | None = None
    documents: bool = False
    may_miss: bool = False
    pixels: Pixels | None = None
    resizing: Resizing | None = None
    common: bool = False
    time_of: str | None = None

    def check_cut(self, cure: str) -> None:
        """Refuse to cut arrays along their first axis where that is time, or none of examples."""
        if self.time_of == "":
            raise DataError(
                f"The first axis of the input {self.name!r} is not the axis of examples, so that data cannot be cut "
                f"into batches or shuffled along it; {cure}."
            ).about(self.name)
        if self.time_of is not None:
            raise DataError(
                f"The first axis of the input {self.name!r} is the time of {self.time_of}, not the axis of examples, "
                "so that data cannot be cut into batches or shuffled along it; export the model with "
                f"batch_first=True, or {cure}."
            ).about(self.name)

    @property
    def takes_all(self) -> bool:
        """True where any finite values of the type and shape are accepted."""
        return self.table_rows is None and not self.right_padded and not self.documents

    def describe_shape(self) -> str:
        """Format the shape for an error message, for example ``(batch, 3, 32, 32)``.

        >>> TensorSpec("image", np.dtype(np.float32), (None, 3, "height", "width")).describe_shape()
        '(batch, 3, height, width)'
        """
        axes = self.shape or ()
        names = ["any" if size is None else str(size) for size in axes]
        if axes and not self.common and self.time_of is None:
            names[0] = "batch"
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def time_first(specs: Iterable[TensorSpec]) -> TensorSpec | None:
    """Return the first input whose first axis is time, or none of examples; ``None`` without one."""
    return next((spec for spec in specs if spec.time_of is not None), None)


class DeferredArray:
    """An array of known shape and type that is created when its values are needed."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], make: Callable[[], Array]) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        self._make = make
        self._made: Array | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        self._made = self._make() if self._made is None else self._made
        return self._made if dtype is None else self._made.astype(dtype, copy=False)


@functools.cache  # dtype.name is computed at every access
def kind_of(dtype: np.dtype[Any]) -> str:
    """Classify an element type: ``boolean``, ``integer``, ``float``, ``string`` or ``other``."""
    if dtype.fields is not None:
        return "other"
    # The floats that ml_dtypes adds (bfloat16, float8...) have NumPy's kind "V" and only a name to go by.
    if dtype.name.startswith(("float", "bfloat")):
        return "float"
    return {"b": "boolean", "i": "integer", "u": "integer", "U": "string", "O": "string", "T": "string"}.get(
        dtype.kind, "other"
    )


def to_numpy(value: object, subject: str, hint: str = "", *, may_miss: bool = False) -> Array:
    """Convert an array, a tensor of any framework or a list of numbers to NumPy, if possible without a copy.

    With ``may_miss``, None and NaN among objects become empty texts, or NaN among numbers.
    """
    try:
        array = _convert_container(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        if "inhomogeneous" in str(error):
            raise DataError(f"{subject} holds rows of different lengths; pad them to one length.{hint}").about(
                subject
            ) from None
        raise DataError(
            f"{subject} is a {type(value).__name__} that does not convert to a NumPy array ({error}); "
            f"give a NumPy array, or a tensor that has detach().cpu().numpy()."
        ) from error
    if array.dtype == object and not all(isinstance(item, str) for item in array.flat):
        if may_miss and (filled := _filled(array)) is not None:
            return filled
        are_numbers = all(isinstance(item, int | float | np.number | np.bool_) for item in array.flat)
        if are_numbers and (numbers := np.array(array.tolist())).dtype != object:  # of a table of several types
            return numbers
        if (row := _missing_text(array)) is not None:
            raise DataError(
                f"{subject} has no value at row {row} ({array.flat[row]!r} among texts); leave the row out, or fill in "
                "a text."
            )
        raise DataError(
            f"{subject} is a {type(value).__name__} that holds Python objects; it needs numbers in a rectangular array."
        )
    return array


def _filled(array: Array) -> Array | None:
    """Return texts or numbers with empty texts or NaN in place of missing ones; ``None`` for other objects."""
    absent = np.array([str(item) in _ABSENT and not isinstance(item, str) for item in array.flat]).reshape(array.shape)
    present = array[~absent]
    if not all(isinstance(x, str | float | np.number) or (isinstance(x, int) and abs(x) < 2**1023) for x in present):
        return None
    texts = any(isinstance(item, str) for item in present)
    return np.where(absent, "", array) if texts else np.where(absent, np.nan, array).astype(np.float64)


def _missing_text(array: Array) -> int | None:
    """Return the first row that holds None or NaN, where all others of a column hold texts."""
    others = [row for row, item in enumerate(array.flat) if not isinstance(item, str)]
    absent = array.ndim == 1 and len(others) < len(array) and all(str(array[row]) in _ABSENT for row in others)
    return others[0] if absent else None


_ABSENT: Final = {"None", "nan", "NaT", "<NA>"}


def _convert_container(value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, LazyRows):
        return cast("Array", value)
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # PyTorch cannot convert bfloat16 to NumPy; float32 holds every bfloat16.
        return np.asarray(value.float().numpy() if "bfloat16" in str(value.dtype) else value.numpy())
    if not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
        return np.asarray(np.from_dlpack(value))
    return np.asarray(value)


def check_type(dtype: np.dtype[Any], spec: TensorSpec, subject: str) -> None:
    """Raise a `DataError` if arrays of a type cannot be converted to the type of the model."""
    found, needed = kind_of(dtype), kind_of(spec.dtype)
    if dtype == spec.dtype or found in _ACCEPTED.get(needed, ()):
        return
    hint = "round and convert it first" if (found, needed) == ("float", "integer") else "convert it first"
    raise DataError(f"{subject} has type {dtype}, but the model needs {spec.dtype}: {hint} (array.astype).").about(
        subject, got=dtype, wanted=spec.dtype
    )


def check_shape(shape: tuple[int, ...], spec: TensorSpec, subject: str, *, whole: bool = False) -> None:
    """Raise a `DataError` if the rank or a static size differs; the batch size is dynamic, except of a whole batch."""
    if not shape and spec.shape != ():
        raise DataError(f"{subject} is a scalar, but it needs a first axis of examples.")
    if spec.shape is None:
        return
    if len(shape) != len(spec.shape):
        raise DataError(
            f"{subject} has rank {len(shape)} (shape {shape}), but the model needs rank {len(spec.shape)}: "
            f"{spec.describe_shape()}.{spec.hint}"
        ).about(subject, got=shape, wanted=spec.shape)
    for axis in range(0 if spec.common or spec.time_of is not None or whole else 1, len(shape)):
        if isinstance(spec.shape[axis], int) and shape[axis] != spec.shape[axis]:
            raise DataError(
                f"{subject} has shape {shape}, but the model needs {spec.describe_shape()}: "
                f"axis {axis} is {shape[axis]} instead of {spec.shape[axis]}.{spec.size_hint}"
            ).about(subject, got=shape, wanted=spec.shape)


def symbol_sizes(shapes: Iterable[tuple[TensorSpec, tuple[int, ...]]]) -> dict[str, int]:
    """Return the sizes of symbolic dimensions in arrays of these shapes, except the batch axis."""
    return {
        symbol: size
        for spec, shape in shapes
        for symbol, size in zip((spec.shape or ())[1:], shape[1:], strict=False)
        if isinstance(symbol, str)
    }


def check_right_padded(array: Array, what: str, examples: Sequence[int] | Array) -> None:
    """Refuse a mask [batch, ..., sequence] with a row that is not ones followed by zeros."""
    rows = np.atleast_2d(array)
    if not rows.size:
        return
    real = rows == 1
    wrong = ~real[..., 0] | (real[..., 1:] & ~real[..., :-1]).any(axis=-1) | (~real & (rows != 0)).any(axis=-1)
    if wrong.any():
        raise DataError(
            f"{what} has a row that is not ones followed by zeros, at example {examples[first_row(wrong)]}, but the "
            "model's attention (GroupQueryAttention) reads only how many tokens a row has: pad on the right "
            "(padding_side='right')."
        ).about(what)


def check_indices(array: Array, rows: int, what: str, examples: Sequence[int] | Array) -> None:
    """Refuse values, such as token ids, that are no row of the model's table; negative ones count from its end."""
    wrong = (array < 0) | (array >= rows)
    if wrong.any():
        example = examples[first_row(np.atleast_1d(wrong))]
        raise DataError(outside_of_table(what, array[wrong][0], f"example {example}", rows))


def check_symbols(shapes: Iterable[tuple[TensorSpec, tuple[int, ...], str]]) -> None:
    """Raise a `DataError` if axes that share a symbol have different sizes; the batch axis is not checked."""
    seen: dict[str, tuple[int, str]] = {}
    for spec, shape, subject in shapes:
        for symbol, size in zip((spec.shape or ())[1:], shape[1:], strict=False):
            if not isinstance(symbol, str):
                continue
            first_size, first = seen.setdefault(symbol, (size, subject))
            if size != first_size:
                raise DataError(
                    f"{subject} has {size} for the dimension '{symbol}' (shape {shape}), "
                    f"but {first} has {first_size}; they must be equal."
                ).about(subject, got=size, wanted=first_size)


def convert(array: Array, dtype: np.dtype[Any], subject: str, examples: Sequence[int] | Array) -> Array:
    """Convert a batch to the model's type: C-contiguous, aligned, native byte order; a copy only if needed."""
    if array.dtype == dtype and type(array) is np.ndarray and array.flags.c_contiguous and array.flags.aligned:
        return array
    if kind_of(dtype) == "integer" and not np.can_cast(array.dtype, dtype, "safe") and array.size:
        limits = np.iinfo(dtype)
        outside = (array < limits.min) | (array > limits.max)
        if outside.any():
            row = first_row(outside)
            raise DataError(
                f"{subject} holds {array[outside][0]} at example {int(examples[row])}, "
                f"which {dtype} cannot hold ({limits.min} to {limits.max}); correct the data."
            ).about(subject, got=array[outside][0], wanted=dtype)
    with np.errstate(over="ignore"):  # an overflow becomes infinite, which check_finite reports
        if type(array) is np.ndarray and array.dtype != dtype:
            return array.astype(dtype, order="C")
        # "A": an array that is mapped from inside a zip file can start at any byte.
        return np.require(array, dtype.newbyteorder("="), ["C", "A"]).view(np.ndarray)


_SMALL = 1 << 12
"""Elements below which it is faster to look at each than at their sum."""


def all_finite(array: Array) -> bool:
    """Return whether an array holds neither NaN nor infinity, without copying a large one.

    >>> all_finite(np.array([1.0, np.inf])), all_finite(np.array([1e308, 1e308]))
    (False, True)
    """
    if kind_of(array.dtype) != "float":
        return True
    if array.size < _SMALL:
        return bool(np.isfinite(array).all())
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum(dtype=np.float64)  # NaN and infinity stay in a sum
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())


def check_finite(
    array: Array, subject: str, examples: Sequence[int] | Array, original: Array | None = None, may_miss: bool = False
) -> None:
    """Raise a `DataError` that names the first example with NaN or an infinite value."""
    if kind_of(array.dtype) != "float":
        return
    finite = np.isfinite(array)
    if may_miss:
        finite |= np.isnan(array)
    if finite.all():
        return
    row, value = first_row(~finite), array[~finite][0]
    before = value if original is None else original[~finite][0]
    if np.isfinite(before):
        problem = f"{before} at example {int(examples[row])}, which {array.dtype} cannot hold: scale the data"
    else:
        problem = f"{value} at example {int(examples[row])}: remove such examples or fill in a number"
    raise DataError(f"{subject} holds {problem}.").about(subject, got=before)


def check_possible(shape: Sequence[int], dtype: np.dtype[Any], subject: str) -> None:
    """Raise a `DataError` if no array can have a shape: next to a size of 0, others may overflow."""
    if math.prod(size for size in shape if size) * dtype.itemsize > np.iinfo(np.intp).max:
        raise DataError(f"{subject} has the shape {tuple(shape)}, which no array can have; write the file again.")


def first_row(mask: Array) -> int:
    """Return the first row with a true element."""
    return int(np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1))[0])


_GROUPED: Final = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d*)?([eE][+-]?\d+)?")
_WORDS: Final = {"false": "0", "true": "1"}
_TRUTH: Final = {"0": False, "1": True, "false": False, "true": True}


def are_truth_values(cells: Array) -> bool:
    """Return whether all cells are the words true or false."""
    return set(np.char.lower(np.char.strip(np.unique(cells.astype(str)))).tolist()) <= _WORDS.keys()


def to_truth_values(cells: Array) -> Array:
    """Convert the words true and false to booleans."""
    return np.asarray(np.char.lower(np.char.strip(cells.astype(str))) == "true")


def is_truth_word(cell: str) -> bool:
    """Return whether a cell is true or false."""
    return cell.strip().lower() in _WORDS


def truth_digit(cell: str) -> str:
    """Return 1 for true and 0 for false."""
    return _WORDS[cell.strip().lower()]


def _with_point(cell: str) -> str:
    """Convert a number with a decimal comma to one with a decimal point; points group thousands."""
    if "." in cell:
        if not _GROUPED.fullmatch(cell.strip()):
            raise ValueError("a point that does not group thousands")
        cell = cell.replace(".", "")
    return cell.replace(",", ".")


def is_number(cell: str, decimal: str = ".", dtype: np.dtype[Any] | None = None, *, finite: bool = True) -> bool:
    """Return whether a cell holds a number of a type."""
    try:
        value = convert_cells([[cell]], decimal, dtype or np.dtype(np.float64))
    except (ValueError, OverflowError, KeyError):
        return False
    return bool(np.isfinite(value).all()) or not finite


def convert_cells(cells: Sequence[Sequence[str]], decimal: str, dtype: np.dtype[Any]) -> Array:
    """Convert cells to numbers; values that are too large become infinite where the type has infinity."""
    if decimal == ",":
        cells = [[_with_point(cell) for cell in row] for row in cells]
    if dtype.kind == "b":
        return np.array([[_TRUTH[cell.strip().lower()] for cell in row] for row in cells], dtype)
    if any("_" in "".join(row) for row in cells):
        raise ValueError("2024_11 is a number in Python, not in tables")
    with np.errstate(over="ignore"):
        return np.array(cells, dtype)
