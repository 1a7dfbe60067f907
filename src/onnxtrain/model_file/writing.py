"""Write files atomically: temporary file, fsync, rename, so that no reader sees a partial file, even after a crash.

Every output goes through :class:`AtomicFiles`. The temporary file of ``NAME`` is ``.NAME.<hex>.tmp`` in the same
folder. Its name depends on the output alone, and the writer locks it. So a run finds the leftovers of a killed run of
the same output, and does not touch the file of a running one.

Locks are kernel locks (``flock``) and end with the process. On a file system without locks, a run neither waits for
others nor removes leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import signal
import stat
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, BinaryIO, NamedTuple, cast

from onnxtrain.errors import ModelError, OnnxTrainError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger(__name__)

ELSEWHERE = "save it somewhere else"
"""Advice for an output that cannot be written, where the reason implies no other."""

_PERMITTED = "give a name in a folder that you may write to"

_ADVICE = {
    errno.EMFILE: "close files, or allow more of them (ulimit -n)",
    errno.ENFILE: "close files, or allow more of them",
    errno.ELOOP: "its links form a cycle, remove them",
}

_LONGEST_NAME = 255
"""Bytes of a file name, on all usual file systems."""

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)

_LOOK = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class OutputPath(NamedTuple):
    """A resolved output path."""

    path: Path
    file: Path
    is_node: bool
    exists: bool


def resolve_output(path: str | os.PathLike[str], advice: str = ELSEWHERE) -> OutputPath:
    """Resolve an output path without touching it."""
    target = Path(path)
    _check_name(target)
    with explained(target, advice):
        try:
            status = os.stat(target)
        except (FileNotFoundError, NotADirectoryError):  # a new file, or the missing target of a link
            return OutputPath(target, _behind_links(target), is_node=False, exists=False)
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(
                f"{str(target)!r} cannot be written: it is a folder; give the name of a file in it."
            ).about(str(target))
        if stat.S_ISSOCK(status.st_mode):
            raise ModelError(f"{str(target)!r} cannot be written: it is a socket; give the name of a file.").about(
                str(target)
            )
        real = _behind_links(target)
        # Some links, such as those in /proc, lead to no name: their target is written in place.
        found = os.lstat(real) if os.path.lexists(real) else None
        if stat.S_ISREG(status.st_mode) and found is not None and os.path.samestat(status, found):
            return OutputPath(target, real, is_node=False, exists=True)
    return OutputPath(target, target, is_node=True, exists=True)


def _check_name(target: Path) -> None:
    try:
        allowed = b"\0" not in os.fsencode(target)
    except UnicodeEncodeError:
        allowed = False
    if not allowed:
        raise ModelError(
            f"{str(target)!r} cannot be written: no file can have this name; give it one without such characters."
        ).about(str(target))


def _behind_links(target: Path) -> Path:
    """Return the target of a link; links among the folders of the path stay as they are written."""
    return Path(os.path.realpath(target)) if target.is_symlink() else target


@contextlib.contextmanager
def explained(target: Path, advice: str = ELSEWHERE, *, others_pass: bool = False) -> Iterator[None]:
    """Turn an OSError into a one-sentence ModelError that names the output."""
    try:
        yield
    except OSError as error:
        if others_pass and error.filename is not None:
            raise
        raise ModelError(f"{str(target)!r} cannot be written: {reason(error, advice)}.") from error


@contextlib.contextmanager
def only_warns(what: str) -> Iterator[None]:
    """Turn an error into a warning, for what is done beside a training and must not take it along."""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, OnnxTrainError) else f"{type(error).__name__}: {error}"
        _logger.warning("%s: %s", what, text)


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


@contextlib.contextmanager
def _open_node(path: Path) -> Iterator[BinaryIO]:
    """Open a device or a pipe for writing; opening a pipe waits for its reader."""
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOCTTY", 0))
    with open(descriptor, "wb") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.ftruncate(descriptor, 0)
        yield cast("BinaryIO", _Stream(file))
        file.flush()


@dataclass(eq=False)
class PendingFile:
    """A file that is written under a temporary name."""

    temporary: Path
    final: Path | None
    target: Path
    file: BinaryIO
    number: int
    has_final_name: bool = False


class AtomicFiles:
    """Several files that get their final names together, once all are complete.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with AtomicFiles() as files, files.create(Path(folder) / "a") as file:
        ...         _ = file.write(b"all of it")
        ...     (Path(folder) / "a").read_bytes()
        b'all of it'
    """

    def __init__(self) -> None:
        self._outputs: list[PendingFile] = []
        self._data: list[PendingFile] = []

    @contextlib.contextmanager
    def create(self, target: Path) -> Iterator[BinaryIO]:
        """Open the file that becomes ``target``; missing folders are made."""
        output = resolve_output(target)
        if output.is_node:
            with explained(target, others_pass=True), _open_node(output.file) as stream:
                yield stream
            note_written(target)
            return
        with explained(target):
            output.file.parent.mkdir(parents=True, exist_ok=True)
            with uninterrupted():
                temporary, number, descriptor = _create_temporary(output.file)
                file = cast("BinaryIO", open(descriptor, "r+b"))  # noqa: SIM115 - its lock is held until the rename
                self._outputs.append(PendingFile(temporary, output.file, target, file, number))
        with explained(target, others_pass=True):
            if output.exists:
                with contextlib.suppress(OSError):
                    os.chmod(temporary, stat.S_IMODE(output.file.stat().st_mode))
            yield file
            file.flush()
            os.fsync(descriptor)

    @contextlib.contextmanager
    def create_data(self, folder: Path, location: str) -> Iterator[PendingFile]:
        """Open a data file of the output that was created last; it gets its final name before the outputs."""
        output = self._outputs[-1]
        assert output.final is not None
        target = folder / location
        # No lock: it belongs to whoever holds the output's temporary file.
        temporary = _temporary_path(target.parent / output.final.name, f"{output.number}/{location}")
        with explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with uninterrupted():
                temporary.unlink(missing_ok=True)
                file = cast("BinaryIO", open(os.open(temporary, _CREATE, 0o666), "r+b"))  # noqa: SIM115
                pending = PendingFile(temporary, target, target, file, output.number)
                self._data.append(pending)
        with explained(target, others_pass=True), file:
            yield pending
            if pending.final is not None:
                file.flush()
                os.fsync(file.fileno())

    def data_paths(self) -> list[Path]:
        """Return the final paths of the data files so far."""
        return [pending.final for pending in self._data if pending.final is not None]

    def __enter__(self) -> AtomicFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            try:
                if kind is None:
                    self._rename()
            finally:
                for pending in (*self._data, *self._outputs):
                    with contextlib.suppress(OSError):  # closing flushes the buffer, for which a full disk has no room
                        if not pending.has_final_name:
                            pending.temporary.unlink(missing_ok=True)
                        pending.file.close()
                self._data.clear()
                self._outputs.clear()

    def _rename(self) -> None:
        """Give all files their final names; where one cannot get it, remove the data files that have theirs."""
        try:
            for pending in (*self._data, *self._outputs):
                if pending.final is None:
                    continue
                if pending is self._outputs[-1]:
                    self._flush_folders()  # the files before it are on the disk before its name is
                with explained(pending.target):
                    os.replace(pending.temporary, pending.final)
                pending.has_final_name = True
                if pending in self._outputs:
                    note_written(pending.target)
            self._flush_folders()
        except BaseException:
            if not any(pending.has_final_name for pending in self._outputs):
                for pending in self._data:
                    if pending.has_final_name and pending.final is not None:
                        pending.final.unlink(missing_ok=True)
            raise

    def _flush_folders(self) -> None:
        """Make renames survive a power failure, where folders can be flushed."""
        final = (pending for pending in (*self._data, *self._outputs) if pending.has_final_name)
        for folder in {pending.final.parent for pending in final if pending.final is not None}:
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write whole files: all of them, or none."""
    with AtomicFiles() as files:
        for path, content in contents.items():
            with files.create(path) as file:
                file.write(content)


def _temporary_path(file: Path, key: str) -> Path:
    """Return the temporary path of a file, of bounded length, for a key that tells several ones apart."""
    ending = f".{zlib.crc32(key.encode(errors='surrogateescape')):08x}.tmp"
    name = os.fsencode(file.name)[: _LONGEST_NAME - len(ending) - 1]
    return file.parent / f".{os.fsdecode(name)}{ending}"


def _create_temporary(file: Path) -> tuple[Path, int, int]:
    """Create and lock a temporary file: its path, its number and its descriptor."""
    for number in itertools.count():
        path = _temporary_path(file, str(number))
        _remove_abandoned(path)
        try:
            # Not tempfile: its files are private to the user, these get the ordinary permissions.
            descriptor = os.open(path, _CREATE, 0o666)
        except FileExistsError:  # another run is writing the same output
            continue
        if _try_lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return path, number, descriptor
        os.close(descriptor)  # another run took it for abandoned before it was locked
    raise AssertionError("unreachable")


def _remove_abandoned(path: Path) -> None:
    """Remove a temporary file that no process holds; silently leave what cannot be removed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, _LOOK)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and _try_lock(descriptor) and os.path.samestat(status, os.lstat(path)):
                path.unlink()
        finally:
            os.close(descriptor)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Make sure, before the work, that its result can be written to a path."""
    output = resolve_output(path, _PERMITTED)
    label = repr(str(output.path))
    if output.is_node:
        if not os.access(output.file, os.W_OK):
            raise ModelError(f"{label} cannot be written: Permission denied; {_PERMITTED}.").about(label)
        return
    folder = output.file.parent
    if not folder.is_dir():
        raise ModelError(f"{label} cannot be written: there is no folder {str(folder)!r}; make it first.").about(
            label, wanted=str(folder)
        )
    with explained(output.path, _PERMITTED), uninterrupted():
        # Only trying tells: permissions, read-only disks, names that are too long.
        temporary, _, descriptor = _create_temporary(output.file)
        temporary.unlink(missing_ok=True)
        os.close(descriptor)


_MOST_NOTED = 100

_written: dict[Path, None] = {}


def note_written(path: Path) -> None:
    """Record a complete output, for the message after Ctrl-C."""
    if len(_written) < _MOST_NOTED:
        _written[path] = None


def written() -> list[Path]:
    """Return the first outputs that were completed since :func:`forget_written`."""
    return [*_written]


def forget_written() -> None:
    """Clear the record of complete outputs when a command starts."""
    _written.clear()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until a few file operations that belong together are done."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


_POLL_SECONDS = 0.05


@dataclass(eq=False)
class _Held:
    """A folder lock of this process: its descriptor, and the number of its holders."""

    descriptor: int
    count: int


_held: dict[tuple[int, int], _Held] = {}
"""By device and inode: a process would wait for its own lock."""

_guard = threading.Lock()


def _try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder without waiting; ``None`` where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def folder_lock(
    folder: str | os.PathLike[str],
    *,
    wait: float = 0.0,
    needed: bool = True,
    error: type[OnnxTrainError] = ModelError,
) -> Iterator[bool]:
    """Keep other processes out of a folder. One process may take the lock several times.

    The folder itself is locked, so that no lock file has to be created and none can be left.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, folder_lock(folder):
        ...     pass  # no other process is in here
    """
    deadline = time.monotonic() + wait
    while (key := _lock_folder(folder)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if key is None and needed:
        raise error(
            f"{str(Path(folder))!r} is in use: another run of onnxtrain writes there; wait until it has ended, "
            "or give another folder."
        )
    try:
        yield bool(key)
    finally:
        if key:
            _unlock_folder(key)


def _lock_folder(folder: str | os.PathLike[str]) -> tuple[int, int] | tuple[()] | None:
    """Return the key of the lock, ``()`` where there are no locks, ``None`` where another process holds it."""
    with _guard:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except (OSError, ValueError):  # a system that cannot open folders, one that may not be read, NUL in its name
            return ()
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        if key in _held:
            os.close(descriptor)
            _held[key].count += 1
            return key
        locked = _try_lock(descriptor)
        if locked:
            _held[key] = _Held(descriptor, 1)
            return key
        os.close(descriptor)
        return None if locked is False else ()


def _unlock_folder(key: tuple[int, int]) -> None:
    with _guard:
        held = _held[key]
        held.count -= 1
        if not held.count:
            os.close(_held.pop(key).descriptor)
