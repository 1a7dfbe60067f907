"""Predictions as a table with one row per example: labels and probabilities, or raw outputs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array, kind_of
from onnxtrain.data.data_names import Columns, Labels
from onnxtrain.errors import OptionError
from onnxtrain.losses.probabilities import ScoreKind
from onnxtrain.metrics.dataset_metrics import sigmoid, softmax
from onnxtrain.model_file.writing import AtomicFiles

TABLE_SUFFIXES: Final = (".csv", ".parquet")

_TOLERANCE: Final = 1e-3
"""Tolerated difference of a sum of probabilities from 1."""

_BLOCK: Final = 10_000
"""Number of lines to write at a time."""

Table = dict[str, Array]
"""Columns of equal length by name."""


def prediction_table(
    outputs: Mapping[str, Array],
    *,
    examples: Sequence[str] | Mapping[str, Array] | None = None,
    labels: Labels | None = None,
    probabilities: bool = False,
    kind: ScoreKind | Mapping[str, ScoreKind | None] | None = None,
    output: str | None = None,
    targets: Columns = MappingProxyType({}),
) -> Table:
    """Convert outputs to columns; with ``labels`` or ``probabilities``, the first output holds class scores [N, C].

    Outputs that have labels of their own, and kinds, by name, have columns that begin with the name; ``targets`` has
    names of the columns of outputs. ``examples`` are files, or columns by name.
    """
    size = len(next(iter(outputs.values())))
    for name, array in outputs.items():
        if not array.ndim or len(array) != size:
            raise OptionError(
                f"the output '{name}' has the shape {array.shape}, not one entry for each example."
            ).about(name, got=array.shape)
    named = examples if isinstance(examples, Mapping) else {"file": np.array(examples, np.str_)}
    if twice := named.keys() & {"label", "probability", *outputs}:
        raise OptionError(f"the rows are named by the column '{min(twice)}', which predictions have, too; rename it.")
    table: Table = {"example": np.arange(size)} if examples is None else {**named}
    by_output, kinds = labels if isinstance(labels, Mapping) else {}, kind if isinstance(kind, Mapping) else {}
    if not isinstance(labels, Mapping) and not isinstance(kind, Mapping) and (labels is not None or probabilities):
        name = next(iter(outputs)) if output is None else output
        return table | _classified(name, outputs[name], labels, kind)
    for name, array in outputs.items():
        if name in by_output:
            own = _classified(name, array, by_output[name], kinds.get(name))
            table |= {f"{name} {column}": found for column, found in own.items()}
        elif len(targets.get(name, ())) == array[:1].size and array.ndim == 2:
            table |= dict(zip(targets[name], array.T, strict=True))
        else:
            table |= _columns(name, array)
    return table


def _classified(name: str, scores: Array, labels: Sequence[str] | None, kind: ScoreKind | None) -> Table:
    if scores.ndim not in (1, 2) or kind_of(scores.dtype) != "float":
        raise OptionError(
            f"the output '{name}' is {scores.dtype} {list(scores.shape)}; probabilities need scores [examples, "
            "classes]."
        ).about(name, got=scores.shape)
    rows = scores.reshape(len(scores), -1).astype(np.float64)
    classes = max(2, rows.shape[1])
    if labels is not None and len(labels) > classes:
        raise OptionError(f"the output '{name}' has {classes} classes, but there are {len(labels)} labels.")
    found = _probabilities(name, rows, kind, has_labels=labels is not None)
    chosen = found.argmax(1)
    names: list[Any] = list(range(classes))
    if labels is not None:  # further classes are labeled with their indices
        names = [*labels, *map(str, names[len(labels) :])]
    columns: Table = {"label": np.array(names)[chosen], "probability": found.max(1)}
    return columns | {f"p({each})": found[:, index] for index, each in enumerate(names)}


def _probabilities(name: str, scores: Array, kind: ScoreKind | None, *, has_labels: bool) -> Array:
    """Convert scores [N, C] to probabilities of classes [N, max(2, C)]."""
    inside = bool((scores >= 0).all() and (scores <= 1).all())
    if scores.shape[1] == 1:
        if kind is None and inside:
            raise OptionError(
                f"the output {name!r} has values from 0 to 1, which may be logits or probabilities; write them as "
                "they are, to a .npz file."
            )
        if kind == "log independent":
            scores, kind = np.exp(scores), "independent"
        yes = sigmoid(scores) if kind in (None, "logits") else scores
        return np.concatenate([1 - yes, yes], axis=1)
    if kind == "independent" and not has_labels:
        raise OptionError(
            f"the output {name!r} holds {scores.shape[1]} independent probabilities, not scores of classes of which "
            "one is right; leave out --probabilities, and there is a column for each."
        )
    sums = inside and bool((np.abs(scores.sum(1) - 1) <= _TOLERANCE).all())
    if kind == "distribution" or (kind is None and sums):
        return scores
    return softmax(scores, 1)


def _columns(name: str, array: Array) -> Table:
    if array.ndim == 1:
        return {name: array}
    if array.ndim == 2 and array.shape[1] == 1:
        return {name: array[:, 0]}
    indices = np.ndindex(*array.shape[1:])
    return {f"{name}[{','.join(map(str, index))}]": array[(slice(None), *index)] for index in indices}


def write_table(path: Path, table: Table) -> None:
    """Write columns to a ``.csv`` or ``.parquet`` file atomically."""
    if path.suffix == ".parquet":
        _write_parquet(path, table)
        return
    size = len(next(iter(table.values())))
    with AtomicFiles() as files, files.create(path) as file:
        for start in range(0, size, _BLOCK):
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            if not start:
                writer.writerow(map(_as_text, table))
            writer.writerows(zip(*(_shown(column[start : start + _BLOCK]) for column in table.values()), strict=True))
            file.write(text.getvalue().encode())


def check_table(path: Path) -> None:
    """Check that a table can be written, before any work."""
    if path.suffix == ".parquet":
        _pyarrow()


def _shown(column: Array) -> list[object]:
    """Return values for CSV; floats have the fewest digits that identify them."""
    if column.dtype.kind == "f":
        return [str(value) for value in column]
    return [_as_text(value) if isinstance(value, str) else value for value in column.tolist()]


def _as_text(text: str) -> str:
    """Return a text with an apostrophe in front, if a spreadsheet would run it as a formula.

    >>> _as_text("=1+1"), _as_text("-1"), _as_text("cat")
    ("'=1+1", '-1', 'cat')
    """
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _write_parquet(path: Path, table: Table) -> None:
    arrow = _pyarrow()
    columns = {name: column.astype(object) if column.dtype.kind == "U" else column for name, column in table.items()}
    with AtomicFiles() as files, files.create(path) as file:
        arrow.parquet.write_table(arrow.table(columns), file)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise OptionError("writing Parquet needs pyarrow; install it: pip install pyarrow.") from None
    return pyarrow
