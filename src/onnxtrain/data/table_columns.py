"""Columns with names that make one array: the order in which a model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec, to_numpy
from onnxtrain.errors import DataError


class NamedColumns:
    """An array whose elements along axis 1 have names.

    It has as much of an array's interface as a dataset needs.

    Args:
        array: [N, F].
        names: F names.
    """

    def __init__(self, array: Array, names: tuple[str, ...]) -> None:
        self.array, self.names = array, names
        self.dtype, self.shape, self.ndim = array.dtype, array.shape, array.ndim

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: Any) -> Array:
        return np.asarray(self.array[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.array if dtype is None else self.array.astype(dtype, copy=False)


def is_frame(value: object) -> bool:
    """Return whether a value is a table with named columns, as of pandas, Polars or PyArrow."""
    if isinstance(value, np.ndarray):
        return False
    if type(value).__module__.partition(".")[0] == "pyarrow":
        return hasattr(value, "column_names") and hasattr(value, "column")
    return hasattr(value, "columns") and hasattr(value, "__getitem__") and hasattr(value, "to_numpy")


def columns_of_table(frame: Any, what: str) -> dict[str, Any]:
    """Return the names of a table's columns with the keys under which it has them.

    Raises:
        DataError: Two have one name.
    """
    keys = list(frame.column_names if hasattr(frame, "column_names") else frame.columns)
    names = [str(key) for key in keys]
    check_unique(names, what)
    return dict(zip(names, keys, strict=True))


def check_unique(names: Sequence[str], what: str) -> None:
    """Refuse two columns of one name.

    Raises:
        DataError: There are such.
    """
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{what} has two columns '{name}'; give every column a name of its own.")
        seen.add(name)


def column_of(frame: Any, key: object, name: str) -> Array:
    """Return a column of a table as an array."""
    return to_numpy(frame[key], f"the column '{name}'")


def named_array(value: object, spec: TensorSpec | None, what: str) -> tuple[Array, tuple[str, ...] | None]:
    """Convert a value to NumPy, with the columns of a table in the order of the model; return their names as well.

    Raises:
        DataError: It does not convert, or its columns have other names.
    """
    if isinstance(value, NamedColumns):
        array, names = value.array, value.names
        if spec is None or (order := in_order(names, spec, what)) == list(names):
            return array, names
        places = {name: place for place, name in enumerate(names)}
        return array[:, [places[name] for name in order]], tuple(order)
    if not is_frame(value) or spec is None or spec.beside:
        return to_numpy(value, what), None
    keys = columns_of_table(value, what)
    order = in_order([*keys], spec, what)
    if order == [*keys]:
        array = np.asarray(value)
        if array.dtype.kind in "biuf" or not order:
            return array, tuple(order)
    return np.stack([column_of(value, keys[name], name) for name in order], axis=1), tuple(order)


def in_order(found: Sequence[str], spec: TensorSpec, what: str) -> list[str]:
    """Return names of columns in the order in which an input takes them.

    Names that only count the columns (0, 1, 2, ...) tell nothing, and keep their order.

    Raises:
        DataError: They are not those that the input has names for.
    """
    known = spec.columns
    if known is None or tuple(found) == known:
        return list(found)
    there, wanted = set(found), set(known)
    missing = [name for name in known if name not in there]
    extra = [name for name in found if name not in wanted and name not in spec.left_out]
    if not missing and not extra:
        return list(known)
    if list(found) == [str(index) for index in range(len(found))]:
        return list(found)
    lacks = f"lacks {some_names(missing)}" if missing else ""
    has = f"has {some_names(extra)} besides" if extra else ""
    raise DataError(
        f"{what} has other columns than those that the input '{spec.name}' was trained on: it "
        f"{' and '.join(filter(None, (lacks, has)))}; give the columns {some_names(known)}, in any order, or an array, "
        "whose columns have no names."
    )


def some_names(names: Iterable[str]) -> str:
    """List names as a message shows them."""
    listed = list(names)
    return ", ".join(f"'{name}'" for name in listed[:8]) + (", ..." if len(listed) > 8 else "")
