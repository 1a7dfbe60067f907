"""Resolution of output paths: the target of a link, or a device or pipe that is written in place."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from onnxtrain.errors import ModelError

ELSEWHERE = "save it somewhere else"
"""Advice for an output that cannot be written, where the reason implies no other."""

_ADVICE = {
    errno.EMFILE: "close files, or allow more of them (ulimit -n)",
    errno.ENFILE: "close files, or allow more of them",
    errno.ELOOP: "its links lead in a circle, remove them",
}


class Place(NamedTuple):
    """A resolved output path.

    Attributes:
        path: The path as it was given; messages name it.
        file: The file to replace or to make, behind all links; for a device or a pipe the path itself.
        is_node: Whether it is a device or a pipe, which is written into and never replaced.
        exists: Whether something is there already.
    """

    path: Path
    file: Path
    is_node: bool
    exists: bool


def place_of(path: str | os.PathLike[str], advice: str = ELSEWHERE) -> Place:
    """Find out what an output path stands for, without touching it.

    Args:
        path: The path.
        advice: How messages end where the system's reason does not say what to do.

    Raises:
        ModelError: Nothing can be written there: it is a folder or a socket, its links lead in a circle, or it is no
            path at all.
    """
    target = Path(path)
    _check_name(target)
    with explained(target, advice):
        try:
            status = os.stat(target)
        except (FileNotFoundError, NotADirectoryError):  # a new file, perhaps the one that a link waits for
            return Place(target, _behind_links(target), is_node=False, exists=False)
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{str(target)!r} cannot be written: it is a folder; give the name of a file in it.")
        if stat.S_ISSOCK(status.st_mode):
            raise ModelError(f"{str(target)!r} cannot be written: it is a socket; give the name of a file.")
        real = _behind_links(target)
        # Some links, such as those in /proc, cannot be followed by name: what they lead to is written in place.
        found = os.lstat(real) if os.path.lexists(real) else None
        if stat.S_ISREG(status.st_mode) and found is not None and os.path.samestat(status, found):
            return Place(target, real, is_node=False, exists=True)
    return Place(target, target, is_node=True, exists=True)


def _check_name(target: Path) -> None:
    try:
        allowed = b"\0" not in os.fsencode(target)
    except UnicodeEncodeError:
        allowed = False
    if not allowed:
        raise ModelError(
            f"{str(target)!r} cannot be written: no file can have this name; give it one without such characters."
        )


def _behind_links(target: Path) -> Path:
    """The file that a link leads to; links in the folders before it do no harm and stay as they are written."""
    return Path(os.path.realpath(target)) if target.is_symlink() else target


@contextmanager
def explained(target: Path, advice: str = ELSEWHERE, *, others_pass: bool = False) -> Iterator[None]:
    """Raise what the system refuses as one sentence that names the output.

    Args:
        target: The output.
        advice: How the sentence ends where the reason does not say what to do.
        others_pass: Whether an error that names a file is about another one than the output, and passes.

    Raises:
        ModelError: The system refused something.
    """
    try:
        yield
    except OSError as error:
        if others_pass and error.filename is not None:
            raise
        raise ModelError(f"{str(target)!r} cannot be written: {reason(error, advice)}.") from error


def reason(error: OSError, advice: str) -> str:
    """Return the system's reason with the advice for it, or the given advice if there is none."""
    return f"{error.strerror or error}; {_ADVICE.get(error.errno or 0, advice)}"


class _Stream(io.RawIOBase):
    """Write-only stream to a device or a pipe: no seeks, and each write is complete."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


@contextmanager
def open_node(place: Place) -> Iterator[BinaryIO]:
    """Open a device or a pipe for writing; opening a pipe waits until somebody reads from it."""
    descriptor = os.open(place.file, os.O_WRONLY | getattr(os, "O_NOCTTY", 0))
    with open(descriptor, "wb") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.ftruncate(descriptor, 0)
        yield cast("BinaryIO", _Stream(file))
        file.flush()
