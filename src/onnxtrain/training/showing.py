"""How things show themselves in a terminal and in a notebook: tables of plain text and of HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from numbers import Real

Row = Mapping[str, object]


def text_table(rows: Sequence[Row], *, most: int = 20) -> str:
    """Rows under the names of their columns, in plain text; of many rows the first and the last."""
    columns, cells = _cells(rows, most)
    widths = [max(len(row[index]) for row in [columns, *cells]) for index in range(len(columns))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [columns, *cells]]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def html_table(rows: Sequence[Row], *, most: int = 60) -> str:
    """The same for a notebook."""
    columns, cells = _cells(rows, most)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(rows: Sequence[Row], most: int) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    half = most // 2
    cells = [[_shown(row.get(column, "")) for column in columns] for row in rows]
    if len(cells) > most:
        cells = [*cells[:half], ["..." for _ in columns], *cells[-half:]]
    return columns, cells


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, Real) and not isinstance(value, int) else str(value)
