"""Which data files the models of a folder use, so that none is removed that somebody still needs."""

from __future__ import annotations

import mmap
import stat
from collections.abc import Collection
from pathlib import Path

from onnxtrain.model_file.protobuf_wire import Template

_ENDINGS = (".onnx", ".pb", ".ort")
"""The endings of files that say to be models."""

_FIRST_BYTE = b"\x08"
"""The first byte of a model, whatever its name: the tag of the IR version field."""


class Users:
    """The models beside data files.

    A data file counts as used when a model names it that lies in its own folder or in one above it, up to the folder
    given here. It counts as used, too, where a file there has a model's ending and cannot be understood.

    Args:
        folder: The folder of the model that had the data files, or will have them.
        models: Models in it, by whatever name.
    """

    def __init__(self, folder: Path, models: Collection[Path] = ()) -> None:
        self._folder = folder.resolve()
        self._models = {model.absolute() for model in models}
        self._used: dict[Path, set[Path] | None] = {}

    def use(self, data: Path) -> bool:
        """Return whether a model uses, or may use, a data file."""
        real = data.resolve()
        for folder in real.parents:
            if folder not in self._used:
                self._used[folder] = self._used_in(folder)
            used = self._used[folder]
            if used is None or real in used:
                return True
            if folder == self._folder:
                return False
        return True  # it is not in the model's folder: nothing is known about it

    def _used_in(self, folder: Path) -> set[Path] | None:
        """The data files that the models of a folder name; ``None`` where one cannot be understood."""
        found: set[Path] = set()
        try:
            for path in folder.iterdir():
                says_so = path.suffix.lower() in _ENDINGS or path.absolute() in self._models
                if stat.S_ISREG(path.stat().st_mode) and (says_so or _may_be_model(path)):
                    locations = data_files_of(path)
                    if locations is None and says_so:
                        return None
                    found.update((folder / location).resolve() for location in locations or ())
        except (OSError, ValueError, RuntimeError):  # not readable, a name that is none, links in a circle
            return None
        return found


def data_files_of(model: Path) -> set[str] | None:
    """The locations that a model file names, as it spells them; ``None`` where it is no model that can be read.

    The file is mapped, not read into memory.
    """
    try:
        if not model.stat().st_size:
            return None
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Template(data).locations()
    except (OSError, ValueError):  # also what is no sequence of fields
        return None


def _may_be_model(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(1) != _FIRST_BYTE:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"location") >= 0
