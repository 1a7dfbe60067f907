"""Writing data files: a copy of another with some bytes changed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

_BLOCK = 1 << 20
"""Bytes that are read at once."""


class Change(NamedTuple):
    """Bytes of a data file that become others.

    Attributes:
        offset: The first.
        length: How many.
        data: Gives the new ones.
    """

    offset: int
    length: int
    data: Callable[[], bytes | memoryview]


def same_content(path: Path, other: BinaryIO) -> bool:
    """Return whether a file holds the bytes of an open file that has no moved data."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size == os.fstat(other.fileno()).st_size and _same_bytes(file, other, 0, size)


def _same_bytes(one: BinaryIO, other: BinaryIO, start: int, end: int) -> bool:
    for position in range(start, end, _BLOCK):
        size = min(_BLOCK, end - position)
        if os.pread(one.fileno(), size, position) != os.pread(other.fileno(), size, position):
            return False
    return True


def copy_with_changes(source: BinaryIO, target: BinaryIO, changes: Iterable[Change]) -> None:
    """Stream an open data file into another one, with some bytes changed; what is a hole there is one here."""
    position, end = 0, os.fstat(source.fileno()).st_size
    for change in sorted(changes, key=lambda change: change.offset):
        _copy(source, target, position, change.offset)
        target.seek(change.offset)
        target.write(change.data())
        position = max(position, change.offset + change.length)
    _copy(source, target, position, end)
    target.truncate(max(position, end))


def _copy(source: BinaryIO, target: BinaryIO, start: int, end: int) -> None:
    """Copy bytes that are there between two places to the same places."""
    while start < end:
        first, last = _content(source, start, end)
        source.seek(first)
        target.seek(first)
        for position in range(first, last, _BLOCK):
            target.write(source.read(min(_BLOCK, last - position)))
        start = last


def _content(file: BinaryIO, start: int, end: int) -> tuple[int, int]:
    """Return the next range before ``end`` that is no hole; all of it if the system cannot tell."""
    if not hasattr(os, "SEEK_DATA"):
        return start, end
    try:
        first = os.lseek(file.fileno(), start, os.SEEK_DATA)
    except OSError as error:
        return (end, end) if error.errno == errno.ENXIO else (start, end)
    return min(first, end), min(os.lseek(file.fileno(), first, os.SEEK_HOLE), end)
