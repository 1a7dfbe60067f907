"""Raw data of a file's large initializers: held once, outside the parsed model, and only while it is needed.

A protobuf message returns its data as copies and frees its memory as a whole. Here tensors are views of the file's
data, and each is freed as soon as it is released. Reading some hundred MB takes as long as building a training graph,
since the system maps memory page by page. So a thread reads the data in the meantime, and its memory can become the
state of a training without another copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onnxtrain.errors import ModelError
from onnxtrain.model_file.writing import reason

ALIGNMENT = 64
"""Bytes of a cache line, the alignment of arrays for vector loops."""


def aligned(size: int, *, zero: bool = False) -> np.ndarray:
    """Allocate bytes [size] that start on a cache line."""
    raw = (np.zeros if zero else np.empty)(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


Stamp = tuple[int, int, int, int]
"""Identifies the content of a file: device, inode, modification time, size."""


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of a file's status."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


class SourceFile(NamedTuple):
    """File from which large data was read, and can be read again while the file is unchanged."""

    path: Path
    stamp: Stamp
    ranges: Mapping[str, slice]

    def read(self, name: str) -> bytes:
        """Read the data of a tensor."""
        span = self.ranges[name]
        try:
            with self.path.open("rb") as file:
                if stamp_of(os.fstat(file.fileno())) == self.stamp:
                    file.seek(span.start)
                    return file.read(span.stop - span.start)
        except OSError:
            pass
        raise ModelError(
            f"The initial values of {name!r} are gone: training released them, and {str(self.path)!r} was changed "
            "since it was read; load the model from a copy of the file that nobody changes."
        )


def _system_file(*path: str) -> str:
    with open(os.path.join("/", *path), encoding="utf-8") as file:
        return file.read()


def free_memory() -> int | None:
    """Return the bytes of memory that are free for new data; ``None`` where the system does not say."""
    try:
        lines = [line for name in ("meminfo", "self/status") for line in _system_file("proc", name).splitlines()]
    except OSError:  # not Linux
        return None
    import resource

    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    found = [sizes["MemAvailable:"]]
    for limit, used in ((resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")):
        if (allowed := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            found.append(max(allowed - sizes[used], 0))
    with contextlib.suppress(OSError, ValueError):  # in a container; "max" is no number
        most, now = (int(_system_file("sys", "fs", "cgroup", name)) for name in ("memory.max", "memory.current"))
        found.append(max(most - now, 0))
    return min(found)


_GAP = 1 << 16
"""Maximum gap in bytes between the data of two initializers that are read in one call."""

_MOST_PARTS = 1024
"""Buffers per read call on Linux (``IOV_MAX``)."""


class _Run(NamedTuple):
    """One read call: consecutive buffers for the bytes from an offset on."""

    offset: int
    parts: list[np.ndarray]


class BackgroundRead:
    """Read ranges of files in another thread, each into memory of its own."""

    def __init__(self, *sources: SourceFile, opened: FileIO | None = None) -> None:
        spans = {name: span for source in sources for name, span in source.ranges.items()}
        self._memory = {name: aligned(span.stop - span.start) for name, span in spans.items()}
        self._names = {memory.ctypes.data: name for name, memory in self._memory.items()}
        self._shown = defaultdict[str, list["weakref.ref[np.ndarray]"]](list)
        parts = [(source, list(_runs(source.ranges, self._memory))) for source in sources]
        self._work: _Work | None = _Work(parts, opened)

    @classmethod
    def of(cls, source: SourceFile) -> BackgroundRead | None:
        """Start reading a file; ``None`` if it was replaced or removed since its stamp was taken."""
        try:
            file = source.path.open("rb", buffering=0)
        except OSError:
            return None
        stamp = stamp_of(os.fstat(file.fileno()))
        if stamp == source.stamp:
            return cls(source, opened=file)
        file.close()
        if stamp[:2] == source.stamp[:2]:
            raise ModelError(changed_while_read(source.path))
        return None

    def __contains__(self, name: str) -> bool:
        return name in self._memory

    def __getitem__(self, name: str) -> memoryview:
        """Return the bytes of a range, after waiting for all ranges."""
        self._wait()
        shown = self._memory[name].view()  # lives as long as any view of the returned memory
        self._shown[name] = [*self._still_shown(name), weakref.ref(shown)]
        return shown.data.toreadonly()

    def drop(self, name: str) -> None:
        """Free the memory of a range once no view of it is left."""
        self._memory.pop(name, None)

    def take(self, array: np.ndarray) -> np.ndarray | None:
        """Transfer the memory that an array views, as a writable array of the same shape."""
        name = self._names.get(array.ctypes.data, "")
        memory = self._memory.get(name)
        if memory is None or memory.nbytes != array.nbytes or not array.flags.c_contiguous:
            return None
        if len(self._still_shown(name)) > 1:
            return None
        del self._memory[name]
        return memory.view(array.dtype).reshape(array.shape)

    def _still_shown(self, name: str) -> list[weakref.ref[np.ndarray]]:
        return [shown for shown in self._shown[name] if shown() is not None]

    def _wait(self) -> None:
        if self._work is not None:
            error = self._work.wait()
            if error:
                raise ModelError(error)
            self._work = None


class _Work:
    """The reading thread, which does not keep the `BackgroundRead` alive."""

    def __init__(self, parts: list[tuple[SourceFile, list[_Run]]], opened: FileIO | None) -> None:
        self._parts, self._opened = parts, opened
        self._done, self._error = False, ""
        # a daemon, so that the process does not wait for it at exit
        self._thread = threading.Thread(target=self._read, name="onnxtrain: weights", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Wait for the end and return the error, or an empty string."""
        self._thread.join()
        if not self._done:  # a forked process, which has no such thread
            self._read()
        return self._error

    def _read(self) -> None:
        for source, runs in self._parts:
            try:
                with self._opened or source.path.open("rb", buffering=0) as file:
                    self._opened = None
                    for run in runs:
                        _fill(file.fileno(), run)
                    if stamp_of(os.fstat(file.fileno())) != source.stamp:
                        raise EOFError
            except EOFError:
                self._error = changed_while_read(source.path)
            except OSError as error:
                self._error = f"{str(source.path)!r} cannot be read: {reason(error, 'copy it again')}."
        self._done, self._parts = True, []


def changed_while_read(path: Path) -> str:
    """Return the sentence of an error for a file that another program writes to."""
    return (
        f"{str(path)!r} was changed while it was read; load the model from a file that nobody writes to, or "
        "replace files atomically."
    )


def _runs(ranges: Mapping[str, slice], memory: Mapping[str, np.ndarray]) -> Iterator[_Run]:
    """Group the ranges into read calls, in the order of the file."""
    gap = np.empty(_GAP, np.uint8)  # receives the bytes between ranges
    run, end = _Run(0, []), 0
    for name, span in sorted(ranges.items(), key=lambda item: item[1].start):
        between = span.start - end
        if not run.parts or not 0 <= between <= _GAP or len(run.parts) > _MOST_PARTS - 2:
            if run.parts:
                yield run
            run, between = _Run(span.start, []), 0
        if between:
            run.parts.append(gap[:between])
        run.parts.append(memory[name])
        end = span.stop
    if run.parts:
        yield run


def _fill(descriptor: int, run: _Run) -> None:
    """Read one run."""
    parts, offset = [part.data for part in run.parts], run.offset
    while parts:
        count = os.preadv(descriptor, parts, offset)
        if not count:
            raise EOFError
        offset += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]


class LargeData:
    """Raw data by the names of the initializers."""

    def __init__(
        self,
        data: bytes | mmap.mmap = b"",
        ranges: Mapping[str, slice] | None = None,
        source: SourceFile | None = None,
        *,
        lent: bool = False,
        background: BackgroundRead | None = None,
    ):
        self.source = source
        view = memoryview(data) if lent else data
        self._background = background
        self._held: dict[str, bytes | memoryview | None] = {
            name: view[span] if background is None else None for name, span in (ranges or {}).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def read(self, name: str) -> bytes | memoryview:
        """Return the data of an initializer; data that was released is read from the file again."""
        if self._background is not None and name in self._background:
            return self._background[name]
        held = self._held[name]
        if held is not None:
            return held
        assert self.source is not None  # only data with a source is released
        return self.source.read(name)

    def release(self, names: Iterable[str]) -> None:
        """Free the data that can be read from the file again, and copy the rest of what was lent."""
        for name in names:
            if self._background is not None:
                self._background.drop(name)
            if name in self._held and self.source is not None and name in self.source.ranges:
                self._held[name] = None
        self._held = {name: None if held is None else bytes(held) for name, held in self._held.items()}

    def take(self, array: np.ndarray) -> np.ndarray | None:
        """Transfer the memory that an array views; see :meth:`BackgroundRead.take`."""
        return None if self._background is None else self._background.take(array)


Array = np.ndarray


class MadeArrays(Mapping[str, Array]):
    """Arrays by name, created at every access, so that one of many is in memory at a time.

    Example:
        >>> arrays = MadeArrays({"w": lambda: np.ones(2)}) | {"b": np.zeros(3)}
        >>> list(arrays), arrays["w"] is arrays["w"], arrays["b"] is arrays["b"]
        (['w', 'b'], False, True)
    """

    def __init__(self, makers: Mapping[str, Callable[[], Array]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Array:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:  # without creating the array
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __or__(self, other: Mapping[str, Array]) -> MadeArrays:
        return MadeArrays(self._makers | _makers(other))

    def __ror__(self, other: Mapping[str, Array]) -> MadeArrays:
        return MadeArrays(_makers(other) | self._makers)


def _makers(arrays: Mapping[str, Array]) -> dict[str, Callable[[], Array]]:
    return {name: partial(arrays.__getitem__, name) for name in arrays}
