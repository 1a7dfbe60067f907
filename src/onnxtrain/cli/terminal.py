"""What commands print: tables for people, plain lines where nobody watches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

_PLAIN_WIDTH = 200
"""Columns where the output is a file or a pipe, so that no table is cut."""


def console(*, stderr: bool = False) -> Console:
    """A console on the standard output, or the standard error."""
    # No markup: names of values and files may hold brackets.
    found = Console(stderr=stderr, highlight=False, markup=False)
    if not found.is_terminal:
        found = Console(stderr=stderr, highlight=False, markup=False, width=_PLAIN_WIDTH)
    return found


def table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in ``right`` hold numbers."""
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        result.add_column(
            column, justify="right" if column in right else "left", no_wrap=column in right, overflow="fold"
        )
    return result


def facts(rows: Mapping[str, str]) -> Table:
    """Names and what they are, without lines."""
    result = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column(style="dim")
    result.add_column(overflow="fold")
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def number(value: float) -> str:
    """A measured value: four significant digits; fractions of accuracy as they are."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else str(value)
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3e}"


def count(value: float) -> str:
    """A number of things."""
    return f"{round(value):,}"


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def file_size(path: Path) -> str:
    """The size of a file in units of a thousand."""
    size = float(path.stat().st_size)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def plural(amount: int, word: str) -> str:
    """A number with its noun."""
    return f"{count(amount)} {word}{'' if amount == 1 else 's'}"
