"""The data of a file's large initializers on its way to memory of its own, while the model is worked on.

Reading some hundred MB takes as long as making a training of the model: the system finds memory for them page by page.
Both go on side by side. What has been read can become the state of a training without another copy.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from io import FileIO
from typing import NamedTuple

import numpy as np

from onnxtrain.errors import ModelError
from onnxtrain.model_file.aligned import aligned
from onnxtrain.model_file.origin import Origin, stamp_of
from onnxtrain.model_file.writing import reason

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
