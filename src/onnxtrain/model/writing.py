"""Write files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from onnxtrain.errors import ModelError


class AtomicFiles:
    """Several files that take their places together, when all are complete.

    Each is written under a temporary name in its own folder and flushed to the disk. On leaving the context
    they replace what was there, in the order of their creation; after an error they are removed and nothing
    has changed. A process that has the old file open or mapped keeps the old content.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with AtomicFiles() as files, files.create(Path(folder) / "a") as file:
        ...         _ = file.write(b"all of it")
        ...     (Path(folder) / "a").read_bytes()
        b'all of it'
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Path, Path]] = []

    @contextlib.contextmanager
    def create(self, target: Path) -> Iterator[BinaryIO]:
        """Open the file that becomes ``target``; missing folders are made."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(target)
        # Not tempfile: its files are private to the user, these get the ordinary permissions.
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self._pending.append((temporary, target))
        with open(descriptor, "r+b") as file:
            with contextlib.suppress(OSError):
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> AtomicFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                while self._pending:
                    temporary, target = self._pending[0]
                    os.replace(temporary, target)
                    self._pending.pop(0)
                    _flush_folder(target.parent)
        finally:
            for temporary, _ in self._pending:
                temporary.unlink(missing_ok=True)
            self._pending.clear()


def _temporary(target: Path) -> Path:
    """A name beside the target that nobody else has."""
    return target.parent / f".{target.name}.{os.urandom(4).hex()}.tmp"


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power failure, where folders can be flushed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out before the work whether a file can be written after it.

    Raises:
        ModelError: The folder does not exist or does not take files, or the path is a folder.
    """
    target = Path(path)
    probe = _temporary(target)
    try:
        if target.is_dir():
            raise ModelError(f"{str(target)!r} cannot be written: it is a folder; give the name of a file in it.")
        if not target.parent.is_dir():
            raise ModelError(
                f"{str(target)!r} cannot be written: there is no folder {str(target.parent)!r}; make it first."
            )
        # Only trying tells: permissions, read-only disks, names that are too long.
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        probe.unlink()
    except OSError as error:
        raise ModelError(
            f"{str(target)!r} cannot be written: {error.strerror}; give a name in a folder that you may write to."
        ) from error
