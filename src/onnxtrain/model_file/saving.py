"""Write a model and its data files so that whoever opens it finds the old weights or the new ones, never a mix."""

from __future__ import annotations

import itertools
import os
import posixpath
import re
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from onnxtrain.errors import ModelError
from onnxtrain.model_file.crash_recovery import clear_leftovers
from onnxtrain.model_file.data_changes import Change, copy_with_changes, same_content
from onnxtrain.model_file.data_files import DataFiles
from onnxtrain.model_file.output_path import place_of
from onnxtrain.model_file.references import data_files_of
from onnxtrain.model_file.writing import AtomicFiles, folder_lock

_PATIENCE = 10.0
"""Seconds to wait for another save in the same folder; a training must not be lost, so that then both go on."""

_NUMBERED = r"(?P<stem>.+)\.[0-9a-f]{8}(?P<ending>(?:\.[^.]*)?)"
"""A data file that was saved over before: ``NAME.<hex>.ENDING``."""

_BEGINNING = 4096

_LONGEST = 255
"""Bytes of a file's name, on all usual file systems."""


class DataFile(NamedTuple):
    """A data file to write.

    Attributes:
        source: Where its bytes are now.
        size: Up to which byte tensors reach in it.
        changes: What is written over them.
    """

    source: Path
    size: int
    changes: Sequence[Change]


class _Beginnings:
    """Records the first bytes of each change to a data file as it is written, so that each is computed once."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._known: dict[int, bytes] = {}
        self.changes = [change._replace(data=partial(self._made, change)) for change in changes]
        """The same changes; what they write is noted."""

    def _made(self, change: Change) -> bytes | memoryview:
        data = change.data()
        self._known[change.offset] = bytes(data[:_BEGINNING])
        return data

    def token(self, number: int) -> str:
        """Eight hexadecimal digits that follow from what is written: from its beginnings, which differ soon enough."""
        checksum = number
        for change in self.changes:
            begin = self._known.get(change.offset, b"")
            checksum = zlib.crc32(begin, zlib.crc32(str(change.offset).encode(), checksum))
        return f"{checksum:08x}"


def save_model(
    path: str | os.PathLike[str],
    data: Mapping[str, DataFile],
    render: Callable[[Mapping[str, str]], Iterable[bytes | memoryview]],
    *,
    sources: DataFiles,
    keep: Iterable[Path] = (),
    original: str | None = None,
) -> dict[str, str]:
    """Write a model with its data files.

    Where there is no file yet, data files get the names of :func:`fresh_locations`. Where there is one, they get new
    names, so that the old model stays whole until the new one takes its place, in one rename; data files that only the
    old one used are removed after that.

    Args:
        path: The new file.
        data: The data files by the locations that the model names.
        render: The model's bytes, given new locations by old ones.
        sources: Reads the data files.
        keep: Data files that are not removed whatever was there.
        original: The name of the file that the model was read from; ``None`` where it was given as an object.

    Returns:
        Where data files are now, by the locations that were given.

    Raises:
        ModelError: Something cannot be written or read.
    """
    target = Path(path)
    folder = target.parent
    with folder_lock(folder, wait=_PATIENCE, needed=False) as locked:
        place = place_of(target)
        if place.is_node and data:
            refuse_node(target)
        named = (data_files_of(place.file) or set()) if place.exists and not place.is_node else set()
        _clear(folder, [target.name, *data, *named])
        moved = {} if place.exists else fresh_locations(target, data, original)
        if not place.exists:
            _clear(folder, moved.values())
        with AtomicFiles(target) as files:
            for outdated in _outdated(folder, named, keep):
                files.outdate(outdated)
            for location, item in data.items():
                with sources.open(item.source, item.size) as source:
                    if not place.exists:
                        with files.create(inside(folder, moved[location]), is_data=True) as file:
                            copy_with_changes(source, file, item.changes)
                        continue
                    written = _Beginnings(item.changes)
                    own = own_location(target, location, len(data), original)
                    candidates = (location, own, _after(target.name, location, single=len(data) == 1))
                    base = next((name for name in candidates if name in named), own)
                    names = _Names(folder, base, written, named if locked else ())
                    if not item.changes and (kept := names.with_bytes_of(source)) is not None:
                        moved[location] = kept
                        continue

                    def settle(file: BinaryIO, location: str = location, names: _Names = names) -> Path | None:
                        kept = names.with_bytes_of(file)
                        moved[location] = kept or names.new(moved.values())
                        return None if kept else inside(folder, moved[location])

                    provisional = inside(folder, names.new(moved.values()))
                    with files.create(provisional, is_data=True, settle=settle) as file:
                        copy_with_changes(source, file, written.changes)
            with files.create(target) as file:
                for chunk in render(moved):
                    file.write(chunk)
    return moved


def fresh_locations(target: Path, locations: Collection[str], original: str | None) -> dict[str, str]:
    """Choose the data files of a new model, by the locations that the model has for them; none of them exists.

    A data file that is named after the model (``model.onnx.data``) is named after the new one (``tuned.onnx.data``).
    Any other keeps its name where that is free, and is named after the new one where it is not.

    Args:
        target: The new model.
        locations: Its data files.
        original: The name of the file that it was read from; ``None`` where it was given as an object.
    """
    found: dict[str, str] = {}

    def free(location: str) -> bool:
        return location not in found.values() and not os.path.lexists(target.parent / location)

    for location in locations:
        chosen = own_location(target, location, len(locations), original)
        if not free(chosen):
            chosen = _after(target.name, location, single=len(locations) == 1)
        name = chosen
        for number in itertools.count():
            if free(name):
                break
            name = _numbered(chosen, f"{number:08x}")
        found[location] = name
    return found


def own_location(target: Path, location: str, count: int, original: str | None) -> str:
    """The location of a data file for a new model: another one only where its name begins with the original's."""
    name = location.rpartition("/")[2]
    if original is None or original == target.name or not name.startswith(original):
        return location
    return _after(target.name, location, single=count == 1, original=original)


def _after(target: str, location: str, *, single: bool, original: str | None = None) -> str:
    """``tuned.onnx.data`` for the only data file of a model, else the old name behind ``tuned.onnx``."""
    before, slash, name = location.rpartition("/")
    other = ".data" if single else f".{name}"
    rest = other if original is None else name.removeprefix(original)
    while len(os.fsencode(target + rest)) > _LONGEST:
        target, rest = (target[:-1], rest) if target else ("", rest[1:])
    return f"{before}{slash}{target}{rest}"


def _clear(folder: Path, locations: Iterable[str]) -> None:
    """Remove what runs that were killed have left, also in the folders of data files."""
    names: dict[str, list[str]] = {}
    for location in map(posixpath.normpath, locations):
        below, _, name = location.rpartition("/")
        if not os.path.isabs(location) and location.split("/")[0] != "..":
            names.setdefault(below, []).append(name)
    for below, found in names.items():
        clear_leftovers(folder / below, found)


def refuse_node(target: Path) -> None:
    """A device or a pipe takes one file.

    Raises:
        ModelError: Always.
    """
    raise ModelError(
        f"{str(target)!r} cannot be written: it is a device or a pipe, and this model has data files, which lie beside "
        "it; give the name of a file."
    )


def inside(folder: Path, location: str) -> Path:
    """The path of a data file, which no link may lead out of the model's folder.

    Raises:
        ModelError: One does.
    """
    path = folder / location
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"{str(path)!r} cannot be written: a link leads out of {str(folder)!r}; save elsewhere.")
    return path


class _Names(NamedTuple):
    """Candidate names of a data file that is written over an old model's.

    Attributes:
        folder: Of the model.
        location: Its name in the model that was given.
        written: What is written over it.
        named: The data files of the old model.
    """

    folder: Path
    location: str
    written: _Beginnings
    named: Container[str]

    def with_bytes_of(self, complete: BinaryIO) -> str | None:
        """The data file of the old model that holds the very same bytes, where there is one: then it stays.

        So who saves the same result again gets the same files.
        """
        for name in (self.location, _numbered(self.location, self.written.token(0))):
            path = self.folder / name
            if name in self.named and path.is_file() and not path.is_symlink() and same_content(path, complete):
                return name
        return None

    def new(self, taken: Collection[str]) -> str:
        """A name that nothing has; for the same new weights the same one, if that is free."""
        for number in itertools.count():
            name = _numbered(self.location, self.written.token(number))
            if name not in taken and not os.path.lexists(self.folder / name):
                break
        return name


def _numbered(location: str, token: str) -> str:
    """``model.data`` becomes ``model.<token>.data``; an earlier number is replaced."""
    before, slash, name = location.rpartition("/")
    match = re.fullmatch(_NUMBERED, name, re.DOTALL)
    stem, ending = (match["stem"], match["ending"]) if match else os.path.splitext(name)
    while len(os.fsencode(f"{stem}.{token}{ending}")) > _LONGEST:
        stem, ending = (stem[:-1], ending) if stem else ("", ending[:-1])
    return f"{before}{slash}{stem}.{token}{ending}"


def _outdated(folder: Path, named: Iterable[str], keep: Iterable[Path]) -> list[Path]:
    """The data files of the model that is replaced: plain files in its folder, no links."""
    kept = {path.resolve() for path in keep}
    found = []
    for location in named:
        path = folder / location
        plain = path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1
        if plain and path.resolve().is_relative_to(folder.resolve()) and path.resolve() not in kept:
            found.append(path)
    return found
