"""The file that a model's large data was read from, and can be read from again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from onnxtrain.errors import ModelError

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
