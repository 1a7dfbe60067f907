"""Windows of a table whose rows follow each other in time: the past as input, the future as target, both scaled."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from onnxtrain.data.base import Batch, Dataset, DataSource, epoch_order
from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.naming import Wanted, column_of, columns_of_table, is_frame, some_names
from onnxtrain.errors import DataError, TrainingHint
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.plugins.tables.shards import Shards, is_table, readable

KEPT: Final = "windows"
"""Name of the settings beside a trained model."""

_GAP: Final = 5
"""Usual steps of time that are a gap: more than a weekend of daily rows."""

_LOOKED_AT: Final = 32
"""Windows whose targets are looked at before the first epoch."""

_CONSTANT: Final = 1e-15
"""Deviation by size of the mean up to which rounding alone makes a constant column vary."""


@dataclass(frozen=True)
class Form:
    """Columns that a model was trained on and their scales, which its predictions need.

    Attributes:
        window: Rows of an input.
        horizon: Rows of a target, which follow those of the input.
        columns: Columns of the input, in its order.
        targets: Columns of the target.
        mean: Mean of each column in the rows that were trained on.
        std: Standard deviation of each column in these rows, 1 for a constant one.
    """

    window: int
    horizon: int
    columns: Sequence[str]
    targets: Sequence[str]
    mean: Mapping[str, float] = dataclasses.field(default_factory=dict)
    std: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def fitted(self, rows: Mapping[str, Array]) -> Form:
        """Return the form with the scales of these rows: those of scikit-learn's ``StandardScaler``."""
        mean = {name: float(array.mean()) for name, array in rows.items()}
        deviations = {name: float(array.std()) for name, array in rows.items()}
        std = {name: value if value > abs(mean[name]) * _CONSTANT else 1.0 for name, value in deviations.items()}
        return dataclasses.replace(self, mean=mean, std=std)

    def scaled(self, rows: Mapping[str, Array], names: Sequence[str]) -> Array:
        """Return columns [rows, names] with mean 0 and standard deviation 1."""
        return np.stack([(rows[name] - self.mean[name]) / self.std[name] for name in names], axis=1)

    def in_units(self, array: Array) -> Array:
        """Return predictions [N, ...] of the targets in their own units."""
        form = (len(array), self.horizon, len(self.targets))
        mean, std = (np.array([values[name] for name in self.targets]) for values in (self.mean, self.std))
        return np.asarray(array.reshape(form) * std + mean, array.dtype).reshape(array.shape)

    def record(self) -> dict[str, Any]:
        """Return the form as JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Form:
        """Read the form from JSON data."""
        try:
            found = cls(**record)
            sizes = (found.window, found.horizon, len(found.columns), len(found.targets))
            if min(sizes) >= 1 and {*found.columns, *found.targets} <= found.mean.keys() & found.std.keys():
                return found
        except (TypeError, AttributeError):
            pass
        raise DataError(f"'{KEPT}' beside the model has another form than the training wrote; train the model again.")


@checks_arguments
@dataclass(frozen=True)
class Windows(DataSource):
    """Windows of a table in the order of time: an input is ``window`` rows, its target the ``horizon`` rows after them.

    Inputs are [N, window, columns] of all columns with numbers, also of the targets' past; a model with as many columns
    as there are targets takes these alone. An input [N, window] takes one column, and a model that declares
    [N, columns, window] gets this order. Targets are [N, horizon], of several columns [N, horizon, targets], and with a
    horizon of 1 [N, targets]. A column of dates is left out; its dates, or those of an index, may not go back. Gaps of
    more than five times the usual step, and dates that repeat, give a hint.

    Every column is scaled to mean 0 and standard deviation 1 by the rows that are trained on. ``validation=0.2`` cuts
    the table: the first rows are for training, the last fifth for validation, and no window has rows of both, so that
    no value is on both sides. The losses and metrics are those of scaled values. The columns and their scales are kept
    in ``tuned.labels.json`` beside a saved model; later tables are scaled by them, and predictions are in the original
    units. A prediction takes every window of the table, also the last one, whose target is not known yet.

    Args:
        source: A path, pattern or list of paths of Parquet or CSV files, a table of pandas, Polars or PyArrow, or a
            mapping from name to column [rows].
        window: Rows of an input.
        horizon: Rows of a target.

    Raises:
        DataError: The table cannot be read, is too short, has no value somewhere, or does not fit the model.

    Example:
        >>> import onnxtrain
        >>> data = onnxtrain.tables.Windows({"load": [1.0, 2.0, 3.0, 4.0, 5.0]}, window=3, horizon=1)
        >>> trainer.fit(data, target="load", validation=0.2)  # doctest: +SKIP
    """

    source: Any
    window: int
    horizon: int

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("horizon", self.horizon)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise DataError(f"{name} is {value!r}; it needs a number of rows of at least 1.").about(
                    name, got=value, wanted=1
                )

    @property
    def name(self) -> str:
        """Name of the table in messages."""
        if isinstance(self.source, Shards):
            return self.source.name
        return f"'{os.fspath(self.source)}'" if isinstance(self.source, str | os.PathLike) else "the table"

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the windows in batches; see `DataSource.dataset`."""
        return self.opened(wanted, None)

    def opened(self, wanted: Wanted, form: Form | None) -> WindowDataset:
        """Return the windows in batches, scaled as a model was trained, or by these rows."""
        inputs = [spec for spec in wanted.specs if not spec.beside]
        beside = [spec.name for spec in wanted.specs if spec.beside]
        taken = {name for own in wanted.columns.values() for name in own}
        if len(inputs) != 1 or (beside and (wanted.need_target or (taken and {*beside} - taken))):
            raise DataError(
                f"{self.name} gives windows, one array per example, but the model and its losses read "
                f"{some_names(spec.name for spec in wanted.specs)}; they need one input and one target."
            )
        spec, with_targets = inputs[0], wanted.need_target or bool(beside)
        columns, asked = self._columns(), beside or wanted.target
        if form is None:
            targets = _targets(asked, columns, self.name)
            form = Form(self.window, self.horizon, _inputs(columns, targets, spec, self.name), targets)
        elif (self.window, self.horizon) != (form.window, form.horizon):
            raise DataError(
                f"the windows have {self.window} rows and a horizon of {self.horizon}, but the model was trained on "
                f"{form.window} and {form.horizon}; give these."
            ).about("window", got=(self.window, self.horizon), wanted=(form.window, form.horizon))
        elif with_targets and asked and (found := _targets(asked, columns, self.name)) != [*form.targets]:
            raise DataError(
                f"the target of {self.name} is {some_names(found)}, but the model was trained on "
                f"{some_names(form.targets)}; give this target, or train another model."
            ).about("target", got=found, wanted=[*form.targets])
        read = dict.fromkeys([*form.columns, *(form.targets if with_targets else ())])
        missing = [name for name in read if name not in columns]
        if missing:
            raise DataError(
                f"{self.name} has no column {some_names(missing)}: it has {some_names(columns)}; the model reads "
                f"{some_names(form.columns)}."
            ).about(missing, got=[*columns])
        rows = {name: _finite(columns[name], name, self.name) for name in read}
        return WindowDataset(rows, form, wanted, self.name)

    def _columns(self) -> dict[str, Array]:
        """Return the columns with numbers, and check that dates do not go back."""
        source: Any = self.source
        if not isinstance(source, Shards) and (
            is_table(source) or isinstance(source, str | os.PathLike | list | tuple)
        ):
            source = Shards(source)
        if isinstance(source, Shards):
            _check_order(source)
            with readable(source.name):
                source = source.table(()).to_table()
        if isinstance(source, Mapping):
            found = {str(name): np.asarray(column) for name, column in source.items()}
        elif is_frame(source):
            keys = columns_of_table(source, self.name)
            found = {name: _plain(source[key], name) for name, key in keys.items()}
            _check_index(getattr(source, "index", None), self.name)
        else:
            raise DataError(
                f"the table of windows is a {type(source).__name__}; give a path, a table of pandas, Polars or "
                "PyArrow, or a mapping from name to column."
            ).about("source", got=type(source).__name__)
        return {name: array for name, array in found.items() if not _is_date(array, name, self.name)}


class WindowDataset(IterableDataset):
    """Windows of the rows of a table."""

    size: int
    borrows = False

    def __init__(self, rows: Mapping[str, Array], form: Form, wanted: Wanted, name: str) -> None:
        super().__init__((), dataclasses.replace(wanted, target=None))
        self.name, self._spec, self._with_targets = name, wanted.specs[0], wanted.need_target or len(wanted.specs) > 1
        self._is_given = bool(form.mean)
        self._set(rows, form)

    def _set(self, rows: Mapping[str, Array], form: Form) -> None:
        self._raw, self._form_of = rows, form if self._is_given else form.fitted(rows)
        form = self._form_of
        self.kept = {KEPT: form.record()}
        self._inputs = form.scaled(rows, form.columns)
        self._targets = form.scaled(rows, form.targets) if self._with_targets else None
        needed = form.window + (form.horizon if self._with_targets else 0)
        self.size = len(self._inputs) - needed + 1
        if self.size < 1:
            raise DataError(
                f"{self.name} has {len(self._inputs):,} rows here, but a window and its horizon take {needed}; give "
                "more rows, or shorter windows."
            ).about(self.name, got=len(self._inputs), wanted=needed)
        self._chosen = np.arange(self.size)

    def split(self, fraction: float) -> tuple[Self, Self]:
        """Cut the rows; return the windows of the first rows and those of the last ones."""
        count = len(self._inputs)
        cut = count - min(max(1, round(count * fraction)), count - 1)
        train, validation = copy.copy(self), copy.copy(self)
        train._set({name: array[:cut] for name, array in self._raw.items()}, self._form_of)
        validation._is_given = True
        validation._set({name: array[cut:] for name, array in self._raw.items()}, train._form_of)
        return train, validation

    def in_units(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return predictions in the units of the table: those of the first output with a value for each target."""
        form = self._form_of
        size = self.size * form.horizon * len(form.targets)
        name = next((name for name, array in outputs.items() if array.size == size), None)
        return outputs if name is None else {**outputs, name: form.in_units(outputs[name])}

    def values(self, name: str | None = None) -> Array | None:
        """Return the targets of the first windows."""
        if name is not None or not self._with_targets:
            return None
        return self.adapted(self._futures(self._chosen[:_LOOKED_AT]), None, "the target array")

    def batch_count(self, batch_size: int = 1) -> int | None:
        """Return the number of batches per epoch; the last batch may be smaller."""
        return Dataset.batch_count(self, batch_size)

    def take(self, indices: Array) -> Self:
        """Return the windows with these indices."""
        result = copy.copy(self)
        result._chosen, result.size = self._chosen[indices], len(indices)
        return result

    def fingerprint(self) -> str:
        """Return a hash of the scaled rows and of the windows in them."""
        content = Fingerprint()
        content.add_text(f"{self._form_of.window} {self._form_of.horizon} {self.size} {int(self._chosen.sum())}")
        for array in (self._inputs, self._targets):
            if array is not None:
                content.add_large_array(array)
        return content.digest()

    def _read(self, batch_size: int, shuffled: tuple[int, int] | None, start: int) -> Iterator[Batch]:
        order = epoch_order(self.size, shuffled)
        chosen = self._chosen if order is None else self._chosen[order]
        for first in range(start * batch_size, self.size, batch_size):
            rows = chosen[first : first + batch_size]
            targets = self._futures(rows) if self._with_targets else None
            yield self.convert(
                {self._spec.name: self._pasts(rows)}, targets, f"the windows {rows[0]} ... of {self.name}"
            )

    def _pasts(self, rows: Array) -> Array:
        form = self._form_of
        found = np.lib.stride_tricks.sliding_window_view(self._inputs, form.window, axis=0)[
            rows
        ]  # [N, columns, window]
        shape = self._spec.shape or ()
        if len(shape) == 2 and len(form.columns) == 1:
            return found[:, 0]
        size = (len(form.columns), form.window)
        return found if shape[1:] == size and size != size[::-1] else found.swapaxes(1, 2)

    def _futures(self, rows: Array) -> Array:
        assert self._targets is not None
        form = self._form_of
        later = self._targets[form.window :]
        found = np.lib.stride_tricks.sliding_window_view(later, form.horizon, axis=0)[rows].swapaxes(1, 2)
        if found.shape[2] == 1:
            return found[..., 0]
        return found[:, 0] if form.horizon == 1 else found


def _targets(given: Any, columns: Mapping[str, Array], name: str) -> list[str]:
    """Return the names of the target columns: one, several with commas, or a list."""
    if given is None:
        last = [*columns, "y"][len(columns) - 1]
        raise DataError(
            f"{name} has the columns {some_names(columns)}; say which is the target: target='{last}'."
        ).about("target", got=[*columns])
    texts = [given] if isinstance(given, str) else [str(each) for each in given]
    found = [name.strip() for text in texts for name in ([text] if text in columns else text.split(","))]
    for each in found:
        if each not in columns:
            raise DataError(f"{name} has no column '{each}' with numbers: it has {some_names(columns)}.").about(
                each, got=[*columns]
            )
    return found


def _inputs(columns: Mapping[str, Array], targets: Sequence[str], spec: TensorSpec, name: str) -> list[str]:
    """Return the columns of the input: all, or the targets where the model has room for these alone."""
    shape, counts = spec.shape or (None, None, None), (len(columns), len(targets))
    if len(shape) not in (2, 3):
        raise DataError(
            f"{name} gives windows (batch, rows, columns), but the input '{spec.name}' is {spec.describe_shape()}."
        ).about(spec.name, wanted=spec.shape)
    sizes = shape[1:] if len(shape) == 3 else (1,)
    if len(columns) in sizes or None in sizes or any(isinstance(size, str) for size in sizes):
        return [*columns] if len(shape) == 3 or len(columns) == 1 else [*targets]
    if len(targets) in sizes:
        return [*targets]
    raise DataError(
        f"{name} has {counts[0]} columns with numbers ({some_names(columns)}) and {counts[1]} targets, but the input "
        f"'{spec.name}' is {spec.describe_shape()}; give as many columns as it takes."
    ).about(spec.name, got=counts, wanted=spec.shape)


def _check_order(source: Shards) -> None:
    """Refuse files whose order by name, in which they are read, is not that of the numbers in their names."""
    if not isinstance(source.path, str | os.PathLike):
        return  # the order of a list was chosen
    files = source.files()
    parts = [re.split(r"(\d+)", str(file)) for file in files]
    orders = [[int(part) if index % 2 else part for index, part in enumerate(each)] for each in parts]
    moved = next((index for index, order in enumerate(orders) if index and order < orders[index - 1]), None)
    if moved is not None:
        raise DataError(
            f"{source.name} has the files '{files[moved - 1].name}' and '{files[moved].name}' in this order, by name, "
            "which is hardly that of time; give a list of paths in the order of time."
        ).about(source.name, got=[file.name for file in files])


def _plain(column: Any, name: str) -> Array:
    """Return a column of a table; dates with a time zone as those of UTC."""
    if getattr(getattr(column, "dtype", None), "kind", "") == "M":
        return np.asarray(column, "datetime64[ns]")
    if hasattr(column, "combine_chunks") and str(column.type).startswith(("timestamp", "date")):
        return np.asarray(column.cast("timestamp[ns]").to_numpy())
    return column_of({name: column}, name, name)


def _is_date(array: Array, column: str, name: str) -> bool:
    """Return whether a column has dates, also as texts, and check that they do not go back."""
    if array.dtype.kind in "biuf":
        return False
    try:
        dates = array.astype("datetime64[ns]")
    except (ValueError, TypeError):
        raise DataError(
            f"the column '{column}' of {name} holds texts, which are neither numbers nor dates such as "
            "2024-01-31 18:00; convert it, or remove it."
        ).about(column) from None
    back = np.flatnonzero(np.diff(dates) < np.timedelta64(0))
    if len(back):
        raise DataError(
            f"the column '{column}' of {name} goes back in time at row {back[0] + 1}; sort the rows by it."
        ).about(column, got=int(back[0]) + 1)
    _hint_at_steps(dates, f"the column '{column}' of {name}")
    return True


def _hint_at_steps(dates: Array, label: str) -> None:
    """Warn of dates that repeat, as those of several series do, and of gaps, which windows would go across."""
    steps = np.diff(dates).astype(np.int64)
    repeated, usual = np.flatnonzero(steps == 0), np.median(steps) if len(steps) else 0
    gaps = np.flatnonzero(steps > _GAP * usual)
    if len(repeated):
        problem = f"repeats the date {dates[repeated[0]]} at row {repeated[0] + 1}"
        advice = "give the rows of each series on their own, where these are several"
    elif len(gaps):
        problem = f"has a gap from {dates[gaps[0]]} to {dates[gaps[0] + 1]} at row {gaps[0] + 1}"
        advice = "fill the gap, or train on the rows before it and those behind it in turn"
    else:
        return
    warnings.warn(f"{label} {problem}, and windows go across it; {advice}.", TrainingHint, stacklevel=2)


def _check_index(index: Any, name: str) -> None:
    """Check that an index of dates, as tables of pandas may have one, does not go back."""
    if type(index).__name__ in ("DatetimeIndex", "PeriodIndex") and not index.is_monotonic_increasing:
        raise DataError(f"the index of {name} goes back in time; sort the rows by it (table.sort_index()).").about(name)
    if type(index).__name__ == "DatetimeIndex":
        _hint_at_steps(_plain(index, name), f"the index of {name}")


def _finite(array: Array, column: str, name: str) -> Array:
    values = array.astype(np.float64)
    missing = np.flatnonzero(~np.isfinite(values))
    if array.ndim != 1 or len(missing):
        where = f"has no value at row {missing[0]}" if len(missing) else f"has the shape {array.shape}, not [rows]"
        raise DataError(f"the column '{column}' of {name} {where}; fill it in, or remove the row.").about(column)
    return values
