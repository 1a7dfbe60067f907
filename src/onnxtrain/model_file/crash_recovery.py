"""Temporary files of a run that was killed while it wrote, and their removal by a later run.

While a run writes to a folder, the folder has a marker file, ``.onnxtrain.<hex>.tmp``, which the run keeps locked.
Unfinished files carry the marker's number in their names: ``.NAME.<hex>.tmp``. Before a run renames several files to
their final names, it lists them in the marker, with stamps that identify them. A marker without a lock therefore
belongs to a dead run, and the files that it identifies can be removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from onnxtrain.model_file.locks import try_lock
from onnxtrain.model_file.references import Users

_MARKER = "onnxtrain"
_TEMPORARY = r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{8})\.tmp"
_MAXIMUM_BYTES = 1 << 24
"""No marker is larger."""

_Stamp = tuple[int, int, int]
"""Tells a file from all others that had or will have its name: inode, time of change, size."""


def temporary(target: Path, token: str) -> Path:
    """The name, beside a file, under which it is written; the file's own is shortened where that is needed."""
    name = os.fsencode(target.name)[: 255 - len(f"..{token}.tmp")]
    return target.parent / f".{os.fsdecode(name)}.{token}.tmp"


def new_token() -> str:
    """Eight random hexadecimal digits."""
    return os.urandom(4).hex()


class Marker:
    """Says that a run writes to a folder, to other runs that look for leftovers there.

    Args:
        folder: The folder.

    Attributes:
        token: What is in the names of all that this run has in the making here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        while True:
            self.token = new_token()
            self._path = temporary(folder / _MARKER, self.token)
            try:
                self._descriptor = os.open(self._path, _CREATE, 0o600)
            except FileExistsError:
                continue
            if try_lock(self._descriptor) is not False and os.fstat(self._descriptor).st_nlink:
                return
            os.close(self._descriptor)  # before it was locked, another run took it for a leftover

    def note(self, model: Path, files: Iterable[tuple[Path, Path]]) -> None:
        """Write down, before the first one takes its place, which files are of no use unless a model names them.

        Args:
            model: The model that will, in this folder.
            files: The name that each will have or has, in this folder or below, and where it is now.
        """
        stamps = [[os.path.relpath(name, self.folder), *_stamp(os.lstat(now))] for name, now in files]
        with open(self._descriptor, "wb", closefd=False) as file:
            file.write(json.dumps({"model": model.name, "files": stamps}).encode())
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Nothing is in the making any more: what was noted and is of no use goes, then the marker."""
        try:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            _remove_unused(self._descriptor, self.folder)
            _remove([self._path])
        finally:
            os.close(self._descriptor)


_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_size


def clear_leftovers(folder: Path, names: Collection[str] = ()) -> None:
    """Remove what runs that are no more have left in a folder. What cannot be removed stays, silently.

    Args:
        folder: The folder.
        names: Files whose temporary ones are known to be ours also without a marker.
    """
    by_token: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = re.fullmatch(_TEMPORARY, name, re.DOTALL)
            if match:
                by_token.setdefault(match["token"], []).append(name)
    for token, found in by_token.items():
        marker = temporary(folder / _MARKER, token)
        if os.path.lexists(marker):  # asked for now: it is there before what belongs to it, and goes after it
            _clear_after(marker, found)
        else:
            ours = {temporary(folder / name, token).name for name in names}
            _remove(folder / name for name in found if name in ours)


def _clear_after(marker: Path, found: list[str]) -> None:
    """Remove what belongs to a marker, if nobody holds it."""
    try:
        descriptor = os.open(marker, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return
    try:
        if try_lock(descriptor) is not True or not os.fstat(descriptor).st_nlink:
            return
        _remove(marker.parent / name for name in found if name != marker.name)
        _remove_unused(descriptor, marker.parent)  # by now no unfinished model names them
        _remove([marker])
    finally:
        os.close(descriptor)


def _remove_unused(descriptor: int, folder: Path) -> None:
    """Remove the files that a marker notes, where no model uses them and they are still what they were.

    A note that is cut off says nothing: while it was written, nothing had taken its place yet.
    """
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        note = json.loads(os.read(descriptor, _MAXIMUM_BYTES))
        users = Users(folder, [folder / note["model"]])
        for name, *stamp in note["files"]:
            path = folder / name
            inside = not os.path.isabs(name) and ".." not in Path(name).parts
            with contextlib.suppress(OSError):
                if inside and _stamp(os.lstat(path)) == tuple(stamp) and not users.use(path):
                    path.unlink()


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                path.unlink()
