"""The raw data of a file's large initializers: held once, beside the parsed model, and only while it is needed.

A message of protocol buffers frees its memory as a whole, and gives its data away in copies. What is read here are
views, and each tensor's memory is free as soon as it is released.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from onnxtrain.errors import ModelError

Stamp = tuple[int, int, int, int]
"""Tells whether a file is still the one that it was: device, inode, time of change, size."""


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file's status."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


class Origin(NamedTuple):
    """Where data was read from, and can be read again while the file stays as it was.

    Attributes:
        path: The file.
        stamp: Of the file when it was read.
        places: Where in it the data of each tensor is.
    """

    path: Path
    stamp: Stamp
    places: Mapping[str, slice]

    def check_lent(self) -> None:
        """Look whether the mapped file is as it was read; reading behind its new end would end the process.

        A file that was removed, or replaced by another, is still mapped as it was.

        Raises:
            ModelError: Somebody wrote into the file.
        """
        try:
            stamp = stamp_of(os.stat(self.path))
        except OSError:
            return
        if stamp[:2] == self.stamp[:2] and stamp != self.stamp:
            raise ModelError(
                f"{str(self.path)!r} was changed while it was read; load the model from a file that nobody writes "
                "into, or replace files as a whole."
            )

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


class LargeData:
    """Raw data by the names of the initializers.

    Args:
        data: The serialised model; not kept, unless it is lent.
        places: Where in it the data of each large initializer is.
        origin: Where some or all of it can be read again.
        lent: Whether to look at the data where it is, until :meth:`release` is called, instead of copying it.
    """

    def __init__(
        self,
        data: bytes | mmap.mmap = b"",
        places: Mapping[str, slice] | None = None,
        origin: Origin | None = None,
        *,
        lent: bool = False,
    ):
        self.origin = origin
        source = memoryview(data) if lent else data
        self._held: dict[str, bytes | memoryview | None] = {
            name: source[place] for name, place in (places or {}).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def read(self, name: str) -> bytes | memoryview:
        """The data of an initializer, from the file again where it was released.

        Raises:
            ModelError: It was released, or is lent, and the file is not what it was.
        """
        held = self._held[name]
        if held is not None:
            self._check(held)
            return held
        assert self.origin is not None  # nothing else is released
        return self.origin.read(name)

    def release(self, names: Iterable[str]) -> None:
        """Free the memory of what can be read from the file again; what stays is not lent any more.

        Raises:
            ModelError: What stays was lent, and the file is not what it was.
        """
        for name in names:
            if name in self._held and self.origin is not None and name in self.origin.places:
                self._held[name] = None
        self._check(next((held for held in self._held.values() if held), None))
        self._held = {name: None if held is None else bytes(held) for name, held in self._held.items()}

    def _check(self, held: bytes | memoryview | None) -> None:
        if isinstance(held, memoryview) and isinstance(held.obj, mmap.mmap) and self.origin is not None:
            self.origin.check_lent()
