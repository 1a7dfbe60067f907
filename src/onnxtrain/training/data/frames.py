"""Data frames, of pandas or Polars: columns by name, one of them perhaps the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import DataError
from onnxtrain.training.data.conversion import Array, TensorSpec, kind_of, to_numpy


def is_frame(value: object) -> bool:
    """Whether a value is a table with named columns."""
    return hasattr(value, "columns") and hasattr(value, "__getitem__") and hasattr(value, "to_numpy")


def match_frame(
    frame: Any, specs: Sequence[TensorSpec], *, target: str | None, need_target: bool
) -> tuple[dict[str, object], object | None]:
    """Find inputs and targets in a table.

    Columns named like the model's inputs are these. A model with one input takes all columns but the target side by
    side, in their order.

    Raises:
        DataError: There is no such column, or columns do not make the inputs.
    """
    columns = [str(name) for name in frame.columns]
    by_name = dict(zip(columns, frame.columns, strict=True))
    if target is None and need_target:
        raise DataError(f"the table has the columns {_some(columns)}; say which is the target: target='{columns[-1]}'.")
    if target is not None and target not in by_name:
        raise DataError(f"the table has no column '{target}': it has {_some(columns)}.")
    targets = None if target is None else _column(frame, by_name[target], target)
    names = [spec.name for spec in specs]
    if all(name in by_name for name in names):
        return {spec.name: _as_input(_column(frame, by_name[spec.name], spec.name), spec) for spec in specs}, targets
    if len(specs) > 1:
        raise DataError(f"the table has no columns for the inputs {_some(names)}: it has {_some(columns)}.")
    features = [name for name in columns if name != target]
    arrays = [_column(frame, by_name[name], name) for name in features]
    for name, array in zip(features, arrays, strict=True):
        if kind_of(array.dtype) not in ("boolean", "integer", "float"):
            raise DataError(
                f"the column '{name}' holds {array.dtype}, not numbers; encode it, or leave it out of the table."
            )
    return {names[0]: np.stack(arrays, axis=1) if arrays else np.empty((len(frame), 0))}, targets


def _column(frame: Any, key: object, name: str) -> Array:
    return to_numpy(frame[key], f"the column '{name}'")


def _as_input(column: Array, spec: TensorSpec) -> Array:
    return column[:, None] if spec.shape is not None and len(spec.shape) == 2 and column.ndim == 1 else column


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:8]) + (", ..." if len(names) > 8 else "")
