"""Predictions as a table, one line per example: labels and probabilities, or what the model gives."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array, kind_of
from onnxtrain.errors import OptionError
from onnxtrain.model_file.writing import AtomicFiles

TABLE_SUFFIXES: Final = (".csv", ".parquet")

_TOLERANCE: Final = 1e-3
"""How far the sum of probabilities may be from 1."""

_BLOCK: Final = 10_000
"""How many lines are written at a time."""

Table = dict[str, Array]
"""Columns by name, all of one length."""


def prediction_table(
    outputs: Mapping[str, Array],
    *,
    examples: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    probabilities: bool = False,
) -> Table:
    """Outputs of a model as columns.

    With labels, or where probabilities are asked for, the first output is taken for scores of classes [N, C]: the table
    has the most probable class, its probability, and the probability of each. Scores become probabilities by softmax,
    those of a single column [N] or [N, 1] by the logistic function of which yes is 1; what is a distribution already
    stays as it is. Otherwise there is a column for each element of an output.

    Args:
        outputs: arrays by name, examples first.
        examples: what to call the examples, such as their files; by default they are counted from 0.
        labels: the names of the classes.
        probabilities: whether the first output has scores of classes.

    Raises:
        OptionError: an output has not one entry per example, or is none of scores of as many classes as labels.

    >>> table = prediction_table({"y": np.log([[0.25, 0.75]])}, labels=["no", "yes"])
    >>> list(table), str(table["label"][0]), round(float(table["p(yes)"][0]), 2)
    (['example', 'label', 'probability', 'p(no)', 'p(yes)'], 'yes', 0.75)
    """
    size = len(next(iter(outputs.values())))
    for name, array in outputs.items():
        if not array.ndim or len(array) != size:
            raise OptionError(f"the output '{name}' has the shape {array.shape}, not one entry for each example.")
    table: Table = {"example": np.arange(size)} if examples is None else {"file": np.array(examples, np.str_)}
    name, first = next(iter(outputs.items()))
    if labels is not None or probabilities:
        return table | _classified(name, first, labels)
    for name, array in outputs.items():
        table |= _columns(name, array)
    return table


def _classified(name: str, scores: Array, labels: Sequence[str] | None) -> Table:
    if scores.ndim not in (1, 2) or kind_of(scores.dtype) != "float":
        raise OptionError(
            f"the output '{name}' is {scores.dtype} {list(scores.shape)}; probabilities need scores [examples, "
            "classes]."
        )
    rows = scores.reshape(len(scores), -1).astype(np.float64)
    classes = max(2, rows.shape[1])
    if labels is not None and len(labels) > classes:
        raise OptionError(f"the output '{name}' has {classes} classes, but there are {len(labels)} labels.")
    found = _probabilities(rows)
    chosen = found.argmax(1)
    names: list[Any] = list(range(classes))
    if labels is not None:  # of a model with more classes the others have their numbers
        names = [*labels, *map(str, names[len(labels) :])]
    columns: Table = {"label": np.array(names)[chosen], "probability": found.max(1)}
    return columns | {f"p({each})": found[:, index] for index, each in enumerate(names)}


def _probabilities(scores: Array) -> Array:
    if scores.shape[1] == 1:
        inside = (scores >= 0).all() and (scores <= 1).all()
        yes = scores if inside else 1 / (1 + np.exp(-np.clip(scores, -700, 700)))
        return np.concatenate([1 - yes, yes], axis=1)
    distributions = (scores >= 0).all() and (np.abs(scores.sum(1) - 1) <= _TOLERANCE).all()
    if distributions:
        return scores
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(raised / raised.sum(1, keepdims=True))


def _columns(name: str, array: Array) -> Table:
    """A column for each element of an output, called by its place."""
    if array.ndim == 1:
        return {name: array}
    if array.ndim == 2 and array.shape[1] == 1:
        return {name: array[:, 0]}
    places = np.ndindex(*array.shape[1:])
    return {f"{name}[{','.join(map(str, place))}]": array[(slice(None), *place)] for place in places}


def write_table(path: Path, table: Table) -> None:
    """Write columns to a ``.csv`` or ``.parquet`` file, as a whole or not at all.

    Raises:
        OptionError: pyarrow is missing, which Parquet needs.
        ModelError: the path cannot be written.
    """
    if path.suffix == ".parquet":
        _write_parquet(path, table)
        return
    size = len(next(iter(table.values())))
    with AtomicFiles() as files, files.create(path) as file:
        for start in range(0, size, _BLOCK):
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            if not start:
                writer.writerow(table)
            writer.writerows(zip(*(_shown(column[start : start + _BLOCK]) for column in table.values()), strict=True))
            file.write(text.getvalue().encode())


def check_table(path: Path) -> None:
    """Find out before any work whether a table can be written.

    Raises:
        OptionError: pyarrow is missing, which Parquet needs.
    """
    if path.suffix == ".parquet":
        _pyarrow()


def _shown(column: Array) -> list[object]:
    """Values as CSV has them: floats with as many digits as tell them apart."""
    return [str(value) for value in column] if column.dtype.kind == "f" else list(column.tolist())


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
        raise OptionError("writing Parquet needs pyarrow; install it: pip install 'onnxtrain[parquet]'.") from None
    return pyarrow
