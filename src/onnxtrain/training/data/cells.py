"""Cells of tables: texts as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from onnxtrain.training.data.conversion import Array

_TRUTH: Final = {"0": False, "1": True, "false": False, "true": True}


def is_number(cell: str, decimal: str = ".", dtype: np.dtype[Any] | None = None, *, finite: bool = True) -> bool:
    """Whether a cell is a number (of a type)."""
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
        cells = [[cell.replace(",", ".") for cell in row] for row in cells]
    if dtype.kind == "b":
        return np.array([[_TRUTH[cell.strip().lower()] for cell in row] for row in cells], dtype)
    if any("_" in "".join(row) for row in cells):
        raise ValueError("Python takes 2024_11 for a number, tables do not")
    with np.errstate(over="ignore"):
        return np.array(cells, dtype)
