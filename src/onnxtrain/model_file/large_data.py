"""The raw data of a file's large initializers: held once, beside the parsed model, and only while it is needed.

A protocol buffer message frees its memory as a whole and returns its data as copies. Here data is read as views, and
each tensor's memory is free as soon as it is released. Reading some hundred MB takes as long as building a training
graph: the system maps the memory page by page. So a thread reads it meanwhile, and what it read can become the state
of a training without another copy.
"""

from __future__ import annotations

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
"""Bytes of a cache line, on which memory starts as vector loops like it."""


def aligned(size: int, *, zero: bool = False) -> np.ndarray:
    """New memory [size] of bytes that starts on a cache line.

    Args:
        size: In bytes.
        zero: Whether all are 0; the system gives such memory only when it is written.
    """
    raw = (np.zeros if zero else np.empty)(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


Stamp = tuple[int, int, int, int]
"""Tells whether a file is still the one that it was: device, inode, time of change, size."""


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file's status."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


class Origin(NamedTuple):
    """Source file of data, which can be read from it again while the file is unchanged.

    Attributes:
        path: The file.
        stamp: Of the file when it was read.
        places: Where in it the data of each tensor is.
    """

    path: Path
    stamp: Stamp
    places: Mapping[str, slice]

    def read(self, name: str) -> bytes:
        """The data of a tensor, from the file.

        Raises:
            ModelError: The file is gone, or was changed or replaced.
        """
        place = self.places[name]
        try:
            with self.path.open("rb") as file:
                if stamp_of(os.fstat(file.fileno())) == self.stamp:
                    file.seek(place.start)
                    return file.read(place.stop - place.start)
        except OSError:
            pass
        raise ModelError(
            f"The first values of {name!r} are gone: training released them, and {str(self.path)!r} was changed since "
            "it was read; load the model from a copy of the file that stays."
        )


_GAP = 1 << 16
"""Bytes between the data of two initializers up to which both are read in one call, and what lies between with them."""

_MOST_PARTS = 1024
"""Pieces of memory that one call fills on Linux (``IOV_MAX``)."""


class _Run(NamedTuple):
    """One read call: consecutive buffers for the bytes from an offset on."""

    offset: int
    parts: list[np.ndarray]


class BackgroundRead:
    """Reads parts of a file in another thread, each to memory of its own.

    Args:
        origin: The file, and where the parts are.
        file: The same, open; closed at the end.
    """

    def __init__(self, origin: Origin, file: FileIO) -> None:
        places = origin.places
        self._memory = {name: aligned(place.stop - place.start) for name, place in places.items()}
        self._names = {memory.ctypes.data: name for name, memory in self._memory.items()}
        self._shown = defaultdict[str, list["weakref.ref[np.ndarray]"]](list)
        self._work: _Work | None = _Work(origin, file, list(_runs(places, self._memory)))

    @classmethod
    def of(cls, origin: Origin) -> BackgroundRead | None:
        """A file that has just been looked at, or ``None`` where there is another, or none, in its place by now.

        Raises:
            ModelError: Somebody wrote into it.
        """
        try:
            file = origin.path.open("rb", buffering=0)
        except OSError:
            return None
        stamp = stamp_of(os.fstat(file.fileno()))
        if stamp == origin.stamp:
            return cls(origin, file)
        file.close()
        if stamp[:2] == origin.stamp[:2]:
            raise ModelError(_changed(origin))
        return None

    def __contains__(self, name: str) -> bool:
        return name in self._memory

    def __getitem__(self, name: str) -> memoryview:
        """Return the bytes of a part, once all parts have been read.

        Raises:
            ModelError: The file could not be read.
        """
        self._wait()
        shown = self._memory[name].view()  # lives as long as anybody looks at what is handed out here
        self._shown[name] = [*self._still_shown(name), weakref.ref(shown)]
        return shown.data.toreadonly()

    def drop(self, name: str) -> None:
        """Free the memory of a part, as soon as nobody looks at it."""
        self._memory.pop(name, None)

    def take(self, array: np.ndarray) -> np.ndarray | None:
        """Hand over the memory of the part that an array shows, as an array like it which may be written.

        The part is gone then. ``None`` where the array shows no part, or others look at that part, too.
        """
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
    """The reading itself. It does not keep alive who asked for it."""

    def __init__(self, origin: Origin, file: FileIO, runs: list[_Run]) -> None:
        self._origin, self._file, self._runs = origin, file, runs
        self._done, self._error = False, ""
        # A process that ends does not wait for it.
        self._thread = threading.Thread(target=self._read, name="onnxtrain: weights", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Wait for the end; returns why it failed, where it did."""
        self._thread.join()
        if not self._done:  # this is a copy of the process, made by fork, which has no other thread
            self._read()
        return self._error

    def _read(self) -> None:
        try:
            with self._file as file:
                for run in self._runs:
                    _fill(file.fileno(), run)
                if stamp_of(os.fstat(file.fileno())) != self._origin.stamp:
                    raise EOFError
        except EOFError:
            self._error = _changed(self._origin)
        except OSError as error:
            self._error = f"{str(self._origin.path)!r} cannot be read: {reason(error, 'copy it again')}."
        self._done, self._runs = True, []


def _changed(origin: Origin) -> str:
    return (
        f"{str(origin.path)!r} was changed while it was read; load the model from a file that nobody writes into, or "
        "replace files as a whole."
    )


def _runs(places: Mapping[str, slice], memory: Mapping[str, np.ndarray]) -> Iterator[_Run]:
    """The parts in the order of the file, those that are near to each other together."""
    gap = np.empty(_GAP, np.uint8)  # what is between them, which nobody looks at
    run, end = _Run(0, []), 0
    for name, place in sorted(places.items(), key=lambda item: item[1].start):
        between = place.start - end
        if not run.parts or not 0 <= between <= _GAP or len(run.parts) > _MOST_PARTS - 2:
            if run.parts:
                yield run
            run, between = _Run(place.start, []), 0
        if between:
            run.parts.append(gap[:between])
        run.parts.append(memory[name])
        end = place.stop
    if run.parts:
        yield run


def _fill(descriptor: int, run: _Run) -> None:
    """Read one run.

    Raises:
        EOFError: The file ends before.
        OSError: It cannot be read.
    """
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
    """Raw data by the names of the initializers.

    Args:
        data: The serialised model; not kept, unless it is lent.
        places: Where in it the data of each large initializer is.
        origin: Where some or all of it can be read again.
        lent: Whether to look at the data where it is, until :meth:`release` is called, instead of copying it.
        background: Reads the data of all places; then there is none in ``data``.
    """

    def __init__(
        self,
        data: bytes | mmap.mmap = b"",
        places: Mapping[str, slice] | None = None,
        origin: Origin | None = None,
        *,
        lent: bool = False,
        background: BackgroundRead | None = None,
    ):
        self.origin = origin
        source = memoryview(data) if lent else data
        self._background = background
        self._held: dict[str, bytes | memoryview | None] = {
            name: source[place] if background is None else None for name, place in (places or {}).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def read(self, name: str) -> bytes | memoryview:
        """The data of an initializer, from the file again where it was released.

        Raises:
            ModelError: It was released, and the file is not what it was; or the file cannot be read.
        """
        if self._background is not None and name in self._background:
            return self._background[name]
        held = self._held[name]
        if held is not None:
            return held
        assert self.origin is not None  # nothing else is released
        return self.origin.read(name)

    def release(self, names: Iterable[str]) -> None:
        """Free the memory of what can be read from the file again; what stays is not lent any more."""
        for name in names:
            if self._background is not None:
                self._background.drop(name)
            if name in self._held and self.origin is not None and name in self.origin.places:
                self._held[name] = None
        self._held = {name: None if held is None else bytes(held) for name, held in self._held.items()}

    def take(self, array: np.ndarray) -> np.ndarray | None:
        """Release what an array shows, and hand over its memory: an array like it which may be written.

        ``None`` where it shows nothing that can be handed over.
        """
        return None if self._background is None else self._background.take(array)


Array = np.ndarray


class MadeArrays(Mapping[str, Array]):
    """Arrays by name; each is made anew every time that it is asked for.

    Args:
        makers: What makes each.

    Example:
        >>> arrays = MadeArrays({"w": lambda: np.ones(2)}) | {"b": np.zeros(3)}
        >>> list(arrays), arrays["w"] is arrays["w"], arrays["b"] is arrays["b"]
        (['w', 'b'], False, True)
    """

    def __init__(self, makers: Mapping[str, Callable[[], Array]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Array:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:  # without making it
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
