"""Locks between processes: on a folder as long as a run uses it, and on what a run in progress leaves in one.

They are the kernel's (``flock``), which a process that ends gives back however it ends. Where a file system has none,
whoever asks goes on without.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onnxtrain.errors import ModelError, OnnxTrainError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_POLL_SECONDS = 0.05


@dataclass(eq=False)
class _Held:
    """A folder that this process has locked: through which descriptor, and how often it asked."""

    descriptor: int
    count: int


_held: dict[tuple[int, int], _Held] = {}
"""By device and inode: the kernel would let a process wait for itself."""

_guard = threading.Lock()


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder for this process alone, without waiting.

    Returns:
        Whether it is locked now; ``None`` where the file system has no locks.
    """
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
    """Keep other runs out of a folder. Within one process the lock may be taken again.

    The lock is on the folder itself, so that no file has to be made for it and none can be left.

    Args:
        folder: The folder; it exists.
        wait: For how many seconds to wait for another run.
        needed: Whether it is an error when the other run goes on for longer; otherwise this one goes on, too.
        error: The class of that error.

    Yields:
        Whether the folder is locked: not where the file system has no locks, nor where this run goes on without.

    Raises:
        OnnxTrainError: Another run has the folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, folder_lock(folder):
        ...     pass  # no other process is in here
    """
    deadline = time.monotonic() + wait
    while (key := _take(folder)) is None and time.monotonic() < deadline:
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
            _give_back(key)


def _take(folder: str | os.PathLike[str]) -> tuple[int, int] | tuple[()] | None:
    """Lock a folder: the key of the lock, nothing where there are no locks, ``None`` where another run has it."""
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
        locked = try_lock(descriptor)
        if locked:
            _held[key] = _Held(descriptor, 1)
            return key
        os.close(descriptor)
        return None if locked is False else ()


def _give_back(key: tuple[int, int]) -> None:
    with _guard:
        held = _held[key]
        held.count -= 1
        if not held.count:
            os.close(_held.pop(key).descriptor)
