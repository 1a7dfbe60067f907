"""How things show themselves in a terminal and in a notebook: numbers in words, tables of plain text and of HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real

Row = Mapping[str, object]


def number(value: float) -> str:
    """A measured value: four significant digits; fractions of accuracy as they are."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else str(value)
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3e}"


def count(value: float) -> str:
    """A number of things."""
    return f"{round(value):,}"


WAITING_FROM = 0.05
"""The share of the time that a training may wait for its data before that is said."""


def waiting(waited: float, seconds: float, data: str) -> str:
    """That data are slow, where a training waited for them for more than a twentieth of its time, or "".

    A tenth of a second is nothing to speak of, whatever its share.

    >>> waiting(3.0, 10.0, "a DataLoader"), waiting(0.1, 10.0, "a DataLoader")
    ('30 % of the time waiting for a DataLoader', '')
    """
    share = waited / seconds if seconds > 0 else 0.0
    return (
        f"{share:.0%} of the time waiting for ".replace("%", " %") + data
        if share > WAITING_FROM and waited > 0.1
        else ""
    )


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def plural(amount: int, word: str) -> str:
    """A number with its noun."""
    return f"{count(amount)} {word}{'' if amount == 1 else 's'}"


def text_table(rows: Sequence[Row], *, most: int = 20) -> str:
    """Rows under the names of their columns, in plain text; of many rows the first and the last."""
    columns, cells = _cells(rows, most)
    widths = [max(len(row[index]) for row in [columns, *cells]) for index in range(len(columns))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [columns, *cells]]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def html_table(rows: Sequence[Row], *, most: int = 60) -> str:
    """The same for a notebook."""
    import html  # which no program needs that shows nothing in a notebook

    columns, cells = _cells(rows, most)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_facts(rows: Mapping[str, str], *, notes: Sequence[str] = ()) -> str:
    """Names and what they are, and notes below, for a notebook."""
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
