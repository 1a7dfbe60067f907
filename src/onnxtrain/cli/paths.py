"""The paths of a command: no two may be the same file, so that no file is overwritten by accident."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnxtrain.errors import OptionError
from onnxtrain.model_file.saving import data_files_of, fresh_locations

MODEL = "MODEL"
"""Name of the model in messages; it has no flag."""

RUN_FILES = ("metrics.csv", "curves.svg", "report.html", "run.json", "config.toml")
"""Files that ``--run`` writes into its folder."""

Key = tuple[int, int] | str
"""Identity of a file: device and inode, or the resolved path of a missing file."""


@dataclass(frozen=True)
class Given:
    """A path given to a command."""

    path: str | os.PathLike[str] | None
    written: bool = False
    is_model: bool = False
    files: tuple[str, ...] | str = ()


def data(path: str | None) -> Given:
    """Return a path of arrays: a file, or a folder of ``.npy`` files."""
    return Given(path, files="*.npy")


def model(path: str | os.PathLike[str] | None) -> Given:
    """Return the path of a model to read."""
    return Given(path, is_model=True)


def output(path: Path | None, *, is_model: bool = False) -> Given:
    """Return the path of a file to write."""
    return Given(path, written=True, is_model=is_model)


def folder(path: Path | None, files: tuple[str, ...]) -> Given:
    """Return the path of a folder in which files of these names are written."""
    return Given(path, written=True, files=files)


def loss(name: str | None) -> Given:
    """Return the path of a loss that is a model."""
    return model(name if name is not None and name.endswith(".onnx") else None)


def output_of(model: Path, given: Path | None, default: str, *, in_place: bool) -> Path:
    """Return the output path: a separate file, or the model's own."""
    if not in_place:
        return given or Path(default)
    if given is not None:
        raise OptionError(f"--in-place writes onto the model, but --output is {str(given)!r}; leave one of them out.")
    return model


def check_paths(paths: Mapping[str, Given], *, in_place: bool | None = None) -> None:
    """Refuse two paths that are the same file, by whatever names and links."""
    owners: dict[Key, tuple[str, str]] = {}
    for flag, given in paths.items():
        found = {key: part for key, part in _files(given, paths) if key is not None}
        for key, part in found.items():
            owner, part_of_owner = owners.get(key, (flag, part))
            if owner == flag or (in_place and {owner, flag} == {MODEL, "--output"}):
                continue
            if owner == MODEL and part and part_of_owner:
                continue  # an output in the model's folder: writing it raises
            if in_place is not None and (owner, flag) == (MODEL, "--output") and not part and not part_of_owner:
                raise OptionError(
                    f"--output is the model itself, {str(given.path)!r}; say --in-place to write onto it, or give "
                    "another name."
                )
            raise OptionError(
                f"{part_of_owner}{owner} and {part}{flag} are the same file, {str(given.path)!r}; "
                "give each a path of its own."
            )
        owners |= {key: (flag, part) for key, part in found.items() if key not in owners}


def _files(given: Given, paths: Mapping[str, Given]) -> Iterator[tuple[Key | None, str]]:
    """Return the identities of all files of a path, each with a label for messages."""
    if given.path is None:
        return
    path = Path(given.path)
    if given.is_model:
        yield from ((key, f"the data file {name!r} of ") for key, name in _data_files(path, given, paths))
    if isinstance(given.files, str):
        found = sorted(path.rglob(given.files)) if path.is_dir() else []
    else:
        found = [path / name for name in given.files]
    yield from ((_key(file), f"the file {file.relative_to(path).as_posix()!r} of ") for file in found)
    yield _key(path), ""


def _data_files(path: Path, given: Given, paths: Mapping[str, Given]) -> Iterator[tuple[Key | None, str]]:
    """Return the data files of a model; a new model gets those of the model that it is made from."""
    source = path
    if given.written:
        if path.exists():
            return  # they get fresh names
        source = Path(paths[MODEL].path or path)
    found = sorted((data_files_of(source) if source.is_file() else None) or ())
    if given.written:
        found = list(fresh_locations(path, found).values())
    for location in found:
        if given.written or _is_beside(path.parent, location):  # otherwise reading the model reports it
            yield _key(path.parent / location), location


def _is_beside(folder: Path, location: str) -> bool:
    """Return whether a data file exists in the model's folder or below it."""
    try:
        data = (folder / location).resolve()
        return data.is_file() and data.is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # an invalid name, a cycle of links
        return False


def _key(path: Path) -> Key | None:
    """Return the identity of a file; ``None`` for a device, which accepts several outputs, and for an invalid path."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        try:
            return os.path.realpath(path)
        except (OSError, ValueError):
            return None
    return None if stat.S_ISCHR(status.st_mode) else (status.st_dev, status.st_ino)
