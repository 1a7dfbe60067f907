"""Cells of tables: texts as numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array

_GROUPED: Final = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d*)?([eE][+-]?\d+)?")
_WORDS: Final = {"false": "0", "true": "1"}
_TRUTH: Final = {"0": False, "1": True, "false": False, "true": True}


def are_truth_values(cells: Array) -> bool:
    """Return whether all cells are one of the texts true and false."""
    return set(np.char.lower(np.char.strip(np.unique(cells.astype(str)))).tolist()) <= _WORDS.keys()


def to_truth_values(cells: Array) -> Array:
    """Return truth values for the texts true and false."""
    return np.asarray(np.char.lower(np.char.strip(cells.astype(str))) == "true")


def is_truth_word(cell: str) -> bool:
    """Return whether a cell is true or false."""
    return cell.strip().lower() in _WORDS


def truth_digit(cell: str) -> str:
    """Return 1 for true and 0 for false."""
    return _WORDS[cell.strip().lower()]


def _with_point(cell: str) -> str:
    """Return a number that has a decimal comma with a decimal point; points before the comma group thousands.

    Raises:
        ValueError: A point groups something else.
    """
    if "." in cell:
        if not _GROUPED.fullmatch(cell.strip()):
            raise ValueError("a point that groups no thousands")
        cell = cell.replace(".", "")
    return cell.replace(",", ".")


def is_number(cell: str, decimal: str = ".", dtype: np.dtype[Any] | None = None, *, finite: bool = True) -> bool:
    """Return whether a cell is a number (of a type)."""
    try:
        value = convert_cells([[cell]], decimal, dtype or np.dtype(np.float64))
    except (ValueError, OverflowError, KeyError):
        return False
    return bool(np.isfinite(value).all()) or not finite


def convert_cells(cells: Sequence[Sequence[str]], decimal: str, dtype: np.dtype[Any]) -> Array:
    """Cells as numbers; what is too large becomes infinite, or an error where the type has no infinity.

    Raises:
        ValueError: one is no number of the type.
        KeyError: one is no truth value, where these are asked for.
        OverflowError: one is too large for it.
    """
    if decimal == ",":
        cells = [[_with_point(cell) for cell in row] for row in cells]
    if dtype.kind == "b":
        return np.array([[_TRUTH[cell.strip().lower()] for cell in row] for row in cells], dtype)
    if any("_" in "".join(row) for row in cells):
        raise ValueError("Python takes 2024_11 for a number, tables do not")
    with np.errstate(over="ignore"):
        return np.array(cells, dtype)
