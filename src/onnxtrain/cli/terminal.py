"""Terminal output of commands: tables on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from onnxtrain.errors.escaping import visible
from onnxtrain.training.callbacks.history import for_json

_PLAIN_WIDTH = 200
"""Columns of a file or a pipe, so that no table is cut."""


class _PlainConsole(Console):
    """Console that prints text verbatim: no markup, no emoji names, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string without markup; its width is measured after escaping."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all segments: styled text passes only through this method."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def console(*, stderr: bool = False) -> Console:
    """Return a console on the standard output or the standard error."""
    found = _PlainConsole(stderr=stderr)
    return found if found.is_terminal else _PlainConsole(stderr=stderr, width=_PLAIN_WIDTH)


def lines(console: Console, text: str) -> None:
    """Print a text, wrapped between words on a terminal only."""
    console.print(text, soft_wrap=not console.is_terminal)


def table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """Return an empty table; the columns named in ``right`` hold numbers."""
    result = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        result.add_column(
            column, justify="right" if column in right else "left", no_wrap=column in right, overflow="fold"
        )
    return result


def facts(rows: Mapping[str, str]) -> Table:
    """Return a table of names and values without lines."""
    result = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column(style="dim")
    result.add_column(overflow="fold")
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def print_facts(rows: Mapping[str, str]) -> None:
    """Print names and values on the standard output."""
    console().print(facts(rows))


def print_json(found: object) -> None:
    """Print a result as JSON."""
    print(json.dumps(for_json(found)))  # noqa: T201 - the output of a command


def sized(path: Path) -> str:
    """Return a written path with its size."""
    return f"{path} ({file_size(path)})"


def file_size(path: Path) -> str:
    """Return the size of a file, or of the files in a folder, in powers of 1000 bytes."""
    try:
        status = path.stat()
    except OSError:
        return "gone meanwhile"
    if stat.S_ISDIR(status.st_mode):
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        return _bytes(sum(sizes))
    if not stat.S_ISREG(status.st_mode):
        return "a device or a pipe"
    return _bytes(status.st_size)


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
