"""Read small files (settings, manifests, labels, records): regular files only, within limits."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from typing import Any, Final

MEGABYTE: Final = 1 << 20

TEXT_LIMIT: Final = 64 * MEGABYTE
"""Maximum bytes of a JSON file; records of runs and checkpoints grow with their rows."""

TOML_LIMIT: Final = MEGABYTE

_DEPTH: Final = 64
"""Maximum levels of lists and tables."""

_DIGITS: Final = 40
"""Maximum digits of an integer; 64 bits have 20."""

_KEY_PARTS: Final = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){33}""")
"""Dotted keys with more than 33 parts, for which the parser takes quadratic time."""


class RefusedFileError(ValueError):
    """A file is refused; the message is the reason, for a sentence that names the file."""


def check_regular_file(path: str | os.PathLike[str]) -> None:
    """Refuse a pipe, a device, a socket or a folder: opening may block, and reading may never end."""
    _check_kind(os.stat(path))


def read_small(path: str | os.PathLike[str], limit: int = TEXT_LIMIT) -> bytes:
    """Read a regular file of at most ``limit`` bytes."""
    check_regular_file(path)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        _check_kind(os.fstat(descriptor))  # it may have been replaced since
        data = file.read(limit + 1)
    if len(data) > limit:
        size = f"{limit // MEGABYTE} MiB" if limit >= MEGABYTE else f"{limit} bytes"
        raise RefusedFileError(f"it has more than {size}, the limit for such a file")
    return data


def read_text(path: str | os.PathLike[str], limit: int = TEXT_LIMIT, encoding: str = "utf-8") -> str:
    """Read a small text file."""
    try:
        return read_small(path, limit).decode(encoding)
    except UnicodeDecodeError as error:
        raise RefusedFileError(f"it is not in UTF-8 ({error.reason} at byte {error.start})") from error


def read_json(path: str | os.PathLike[str], limit: int = TEXT_LIMIT, *, finite: bool = True) -> Any:
    """Read a JSON file; see :func:`parse_json`."""
    return parse_json(read_text(path, limit), finite=finite)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file of at most 1 MiB, with keys of at most 33 parts."""
    import tomllib  # only commands need it

    text = read_text(path, TOML_LIMIT)
    if _KEY_PARTS.search(text):
        raise RefusedFileError("it has a key of more than 33 parts")
    try:
        found = tomllib.loads(text)
    except RecursionError as error:
        raise RefusedFileError(f"it has more than {_DEPTH} levels of lists and tables") from error
    except ValueError as error:  # also for integers with more digits than Python reads
        raise RefusedFileError(str(error)) from error
    _check_values(found, finite=False)
    return found


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse JSON of at most 64 levels, with integers of at most 40 digits and valid Unicode."""
    try:
        found = json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise RefusedFileError(f"it has more than {_DEPTH} levels of lists and objects") from error
    except ValueError as error:
        raise RefusedFileError(str(error)) from error
    _check_values(found, finite=finite)
    return found


def _check_kind(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a device or a socket"
        raise RefusedFileError(f"it is {kind}, not a regular file")


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise RefusedFileError(f"it has a number of more than {_DIGITS} digits")
    return int(text)


def _check_values(found: Any, *, finite: bool) -> None:
    """Refuse deep nesting and invalid values."""
    level = [found]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
            else:
                _check_value(value, finite=finite)
        if not below:
            return
        level = below
    raise RefusedFileError(f"it has more than {_DEPTH} levels of lists and objects")


def _check_value(value: Any, *, finite: bool) -> None:
    if isinstance(value, str):
        if not value.isascii() and re.search("[\ud800-\udfff]", value):
            raise RefusedFileError("it has text with a lone surrogate")
    elif isinstance(value, int):
        if value.bit_length() > 4 * _DIGITS:
            raise RefusedFileError(f"it has a number of more than {_DIGITS} digits")
    elif finite and isinstance(value, float) and not math.isfinite(value):
        raise RefusedFileError(f"it has the number {value}, which is not finite")
