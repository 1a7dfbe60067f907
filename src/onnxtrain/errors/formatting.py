"""Format values and tables for terminals and notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

Row = Mapping[str, object]


def number(value: float) -> str:
    """Format a measured value: four decimals from 0.001 to 1000 and for 0, otherwise scientific notation."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else str(value)
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3e}"


def count(value: float) -> str:
    """Format a count with thousands separators."""
    return f"{round(value):,}"


WAITING_FROM = 0.05
"""Fraction of the training time spent waiting for data above which it is reported."""


def waiting(waited: float, seconds: float, data: str) -> str:
    """Report slow data: the share of the time spent waiting, if above 5 % and 0.1 s; otherwise "".

    >>> waiting(3.0, 10.0, "a DataLoader"), waiting(0.1, 10.0, "a DataLoader")
    ('30 % of the time waiting for a DataLoader', '')
    """
    share = waited / seconds if seconds > 0 else 0.0
    if share <= WAITING_FROM or waited <= 0.1:
        return ""
    return f"{share:.0%} of the time waiting for ".replace("%", " %") + data


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def plural(amount: int, word: str) -> str:
    """Format a count with its noun in singular or plural."""
    return f"{count(amount)} {word}{'' if amount == 1 else 's'}"


def listed(names: Iterable[object], most: int = 3, *, counted: bool = True) -> str:
    """Join names with commas, and count those beyond the first ones, or say that there are some.

    Example:
        >>> listed(["a", "b"]), listed("abcdef"), listed("abcdef", counted=False)
        ('a, b', 'a, b, c and 3 more', 'a, b, c, ...')
    """
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most} more" if counted else ", ..."
    return ", ".join(texts[:most]) + (more if len(texts) > most else "")


def text_table(rows: Sequence[Row], *, most: int = 20) -> str:
    """Format rows as a plain-text table with a header; of more than ``most`` rows, show the first and last."""
    columns, cells = _cells(rows, most)
    widths = [max(len(row[index]) for row in [columns, *cells]) for index in range(len(columns))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [columns, *cells]]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def html_table(rows: Sequence[Row], *, most: int = 60) -> str:
    """Format rows as an HTML table; see :func:`text_table`."""
    import html  # only notebooks need it

    columns, cells = _cells(rows, most)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_facts(rows: Mapping[str, str], *, notes: Sequence[str] = ()) -> str:
    """Format names with their values as an HTML table, with notes below."""
    import html

    body = "".join(
        f'<tr><th style="text-align: left">{html.escape(name)}</th>'
        f'<td style="text-align: left">{html.escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    below = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<table><tbody>{body}</tbody></table>" + (f"<ul>{below}</ul>" if notes else "")


def _cells(rows: Sequence[Row], most: int) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    half = most // 2
    cells = [[_shown(row.get(column, "")) for column in columns] for row in rows]
    if len(cells) > most:
        cells = [*cells[:half], ["..." for _ in columns], *cells[-half:]]
    return columns, cells


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, Real) and not isinstance(value, int) else str(value)
