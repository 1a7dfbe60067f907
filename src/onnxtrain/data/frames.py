"""Tables, such as frames of pandas or Polars: columns by name, one of them perhaps the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec, kind_of
from onnxtrain.data.naming import check_beside
from onnxtrain.data.table_columns import NamedColumns, column_of, columns_of_table, in_order, some_names
from onnxtrain.errors import DataError


class Columns(NamedTuple):
    """Which columns of a table make the inputs.

    Attributes:
        features: the columns that the only input takes side by side, in its order; ``None`` where every input is a
            column.
        target: the column of targets; ``None`` where none is needed.
    """

    features: list[str] | None
    target: str | None


def choose_columns(
    columns: Sequence[str], specs: Sequence[TensorSpec], what: str, *, target: str | None, need_target: bool
) -> Columns:
    """Find inputs and target among the columns of a table.

    Columns named like the model's inputs are these. A model with one input takes all columns side by side but the
    target and what goes beside the inputs: in the order that the input has names for, or else in their own.

    Raises:
        DataError: there is no such column, or the columns do not make the inputs.
    """
    beside = [spec.name for spec in specs if spec.beside]
    specs = [spec for spec in specs if not spec.beside]
    check_beside(beside, columns, f"{what} has no column")
    if target is None and need_target:
        raise DataError(
            f"{what} has the columns {some_names(columns)}; say which is the target: target='{columns[-1]}'."
        )
    if target is not None and target not in columns:
        raise DataError(f"{what} has no column '{target}': it has {some_names(columns)}.")
    held = set(columns)
    missing = [spec.name for spec in specs if spec.name not in held]
    if not missing:
        return Columns(None, target)
    if len(specs) > 1:
        raise DataError(f"{what} has no columns for the inputs {some_names(missing)}: it has {some_names(columns)}.")
    features = [name for name in columns if name != target and name not in beside]
    (spec,) = specs
    if spec.shape is not None and len(spec.shape) != 2:
        raise DataError(
            f"{what} has no column '{spec.name}', and its columns side by side make rank 2, but the input "
            f"'{spec.name}' has rank {len(spec.shape)}: {spec.describe_shape()}."
        )
    return Columns(in_order(features, spec, what), target)


def columns_of(spec: TensorSpec, features: list[str] | None) -> list[str]:
    """The columns that make an array."""
    return [spec.name] if features is None or spec.beside else features


def check_width(columns: Columns, spec: TensorSpec, what: str) -> None:
    """Check that an input takes as many columns as there are.

    Raises:
        DataError: it takes more or fewer.
    """
    features, target = columns
    if not features:
        raise DataError(f"{what} has only the column '{target}', the target; it needs columns for '{spec.name}'.")
    wanted = None if spec.shape is None else spec.shape[1]
    if isinstance(wanted, int) and wanted != len(features):
        count = f"{len(features)} column{'s' if len(features) > 1 else ''}"
        beside = "" if target is None else f" beside the target '{target}'"
        hint = (
            ""
            if target or len(features) < wanted
            else f", or leave out the target by its name: target='{features[-1]}'"
        )
        raise DataError(
            f"{what} has {count}{beside} ({some_names(features)}), but the input '{spec.name}' takes "
            f"{wanted}; give it as many{hint}."
        )


def match_frame(
    frame: Any, specs: Sequence[TensorSpec], *, target: str | None, need_target: bool
) -> tuple[dict[str, object], object | None]:
    """Find inputs and targets in a frame of pandas or Polars; see `choose_columns`.

    Raises:
        DataError: there is no such column, or columns do not make the inputs.
    """
    keys = columns_of_table(frame, "the table")
    chosen = choose_columns([*keys], specs, "the table", target=target, need_target=need_target)
    features, target = chosen
    targets = None if target is None else column_of(frame, keys[target], target)
    alone = [spec for spec in specs if features is None or spec.beside]
    found: dict[str, object] = {
        spec.name: as_input(column_of(frame, keys[spec.name], spec.name), spec) for spec in alone
    }
    if features is None:
        return found, targets
    arrays = [column_of(frame, keys[name], name) for name in features]
    for name, array in zip(features, arrays, strict=True):
        if kind_of(array.dtype) not in ("boolean", "integer", "float"):
            raise DataError(
                f"the column '{name}' holds {array.dtype}, not numbers; encode it, or leave it out of the table."
            )
    check_width(chosen, specs[0], "the table")
    joined = np.stack(arrays, axis=1) if arrays else np.empty((len(frame), 0))
    return {specs[0].name: NamedColumns(joined, tuple(features)), **found}, targets


def as_input(column: Array, spec: TensorSpec) -> Array:
    """A column as an input takes it: as [N, 1] where it has rank 2."""
    return column[:, None] if spec.shape is not None and len(spec.shape) == 2 and column.ndim == 1 else column
