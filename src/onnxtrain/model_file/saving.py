"""Write a model and its data files so that whoever opens it finds the old weights or the new ones, never a mix.

Data files are written under new names. The rename of the model file then switches from the old weights to the new.
Trained weights that cannot be saved to the requested path are kept.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import posixpath
import re
import stat
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from onnxtrain.errors import ModelError
from onnxtrain.model_file.external import DataFiles, ExternalData
from onnxtrain.model_file.large_data import Stamp, stamp_of
from onnxtrain.model_file.protobuf_wire import Template, raw_bytes
from onnxtrain.model_file.writing import ELSEWHERE, AtomicFiles, folder_lock, resolve_output, uninterrupted

_PATIENCE = 10.0
"""Seconds to wait for another save in the same folder; then both go on, since a trained model must not be lost."""

_LONGEST_NAME = 255
"""Bytes of a file name, on all usual file systems."""

_LONGEST_MODEL = 200
"""Bytes of the model's name in the names of its data files."""

_BLOCK = 1 << 20
"""Bytes that are read at once."""

_BEGINNING = 4096
"""Bytes of each change that decide the name of a data file."""

Arrays = Mapping[str, npt.NDArray[np.generic]]


class Change(NamedTuple):
    """New bytes for a range of a data file."""

    offset: int
    length: int
    data: Callable[[], bytes | memoryview]


class DataFile(NamedTuple):
    """A data file to write."""

    source: Path
    size: int
    changes: Sequence[Change]
    held: Sequence[Change]
    is_whole: bool


_written: set[Stamp] = set()
"""Data files that this process wrote."""


def save_model(
    path: str | os.PathLike[str],
    data: Mapping[str, DataFile],
    render: Callable[[Mapping[str, str]], Iterable[bytes | memoryview]],
    *,
    sources: DataFiles,
    keep: Iterable[Path] = (),
) -> dict[str, str]:
    """Write a model with its data files.

    Data files of a new model get the names of :func:`fresh_locations`. Over an existing model they get new names,
    ``MODEL.<hex>.ENDING``, so that the old model stays whole until one rename replaces it. Then those data files of the
    old model are removed that onnxtrain wrote for this path, which such a name tells, or this process.
    """
    target = Path(path)
    folder = target.parent
    with folder_lock(folder, wait=_PATIENCE, needed=False) as locked:
        output = resolve_output(target)
        if output.is_node and data:
            refuse_node(target)
        named = (data_files_of(output.file) or ()) if output.exists and not output.is_node else ()
        replaced = {posixpath.normpath(location) for location in named}
        bases = locations_of(target, data)
        fresh = {} if output.exists else fresh_locations(target, data)
        moved: dict[str, str] = {}
        new: list[Path] = []
        with AtomicFiles() as files, files.create(target) as file:
            for location, item in data.items():
                with _unchanged(sources, item) as source:
                    if output.exists:
                        base = bases[location]
                        old = {location} | {name for name in replaced if _unnumbered(target, name) == base}
                        reusable = sorted((old & replaced).difference(moved.values())) if locked else None
                        name, is_new = _write_beside(files, target, base, source, item, reusable)
                    else:
                        name, is_new = fresh[location], True
                        with files.create_data(folder, name) as pending:
                            _write_data(item, source, pending.file)
                moved[location] = name
                if is_new:
                    new.append(folder / name)
            for chunk in render(moved):
                file.write(chunk)
        with contextlib.suppress(OSError, ValueError), uninterrupted():
            _written.update(stamp_of(os.lstat(file)) for file in new)
            if locked:
                used = [*keep, *(folder / location for location in moved.values())]
                _remove_outdated(target, replaced, {os.path.realpath(path) for path in used})
    return moved


def _write_beside(
    files: AtomicFiles,
    target: Path,
    base: str,
    source: BinaryIO | None,
    item: DataFile,
    reusable: Sequence[str] | None,
) -> tuple[str, bool]:
    """Write a data file of a model that exists already, under a name that follows from the new content."""
    folder = target.parent
    kept = None if item.changes or source is None else _same_file(folder, reusable or (), source)
    if kept is not None:
        return kept, False
    with files.create_data(folder, base) as pending:
        checksum = _write_data(item, source, pending.file)
        pending.file.flush()
        if reusable is not None:
            kept = _same_file(folder, [*reusable, _numbered(target, base, checksum)], pending.file)
        name = kept or _free_name(folder, target, base, checksum, files.data_paths())
        pending.final = None if kept else folder / name
    return name, kept is None


def data_files_of(model: Path) -> set[str] | None:
    """Return the data file locations that a model file names, as spelled there; ``None`` for an unreadable model.

    The file is mapped, not read into memory.
    """
    try:
        if not model.stat().st_size:
            return None
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Template(data).locations()
    except (OSError, ValueError):  # also bytes that are no protocol buffers
        return None


_ENDING = re.compile(r"(?:\.[0-9]{1,6})?[._]data(?:_[0-9]{1,6})?")
"""Endings of the names of data files that are kept."""


def locations_of(target: Path, locations: Collection[str]) -> dict[str, str]:
    """Name the data files of a model after it: ``tuned.onnx.data``.

    A name in a model is the choice of whoever made it, and other programs run or read files by their names. So only a
    usual ending is kept, as that of ``model.onnx_data``.
    """
    found: dict[str, str] = {}
    model = _short(target.name)
    for index, location in enumerate(sorted(locations)):
        endings = [match[0] for match in _ENDING.finditer(location) if match.end() == len(location)]
        name = f"{model}{endings[-1] if endings else '.data'}"
        found[location] = f"{model}.{index}.data" if name in found.values() else name
    return found


def _short(model: str) -> str:
    """Return the name of a model as it begins the names of its data files."""
    while len(os.fsencode(model)) > _LONGEST_MODEL:
        model = model[:-1]
    return model


def fresh_locations(target: Path, locations: Collection[str]) -> dict[str, str]:
    """Choose locations of a new model's data files at which nothing exists, by the locations in the model."""
    found: dict[str, str] = {}
    for location, name in locations_of(target, locations).items():
        taken = [target.parent / other for other in found.values()]
        is_free = target.parent / name not in taken and not os.path.lexists(target.parent / name)
        found[location] = name if is_free else _free_name(target.parent, target, name, 0, taken)
    return found


def _numbered(target: Path, name: str, number: int) -> str:
    """``tuned.onnx.<hex>.data`` for ``tuned.onnx.data``."""
    model = _short(target.name)
    return f"{model}.{number & 0xFFFFFFFF:08x}{name.removeprefix(model)}"


def _unnumbered(target: Path, name: str) -> str | None:
    """Undo :func:`_numbered`; ``None`` for a name of another form."""
    model = _short(target.name)
    match = re.fullmatch(rf"{re.escape(model)}\.[0-9a-f]{{8}}([._].+)", name, re.DOTALL)
    return match and f"{model}{match[1]}"


def _free_name(folder: Path, target: Path, location: str, number: int, taken: Collection[Path]) -> str:
    """Return a numbered location at which nothing exists."""
    names = (_numbered(target, location, each) for each in itertools.count(number))
    return next(name for name in names if folder / name not in taken and not os.path.lexists(folder / name))


def _same_file(folder: Path, names: Iterable[str], content: BinaryIO) -> str | None:
    """Return the one of these data files that holds the bytes of an open file."""
    for name in names:
        path = folder / name
        if path.is_file() and not path.is_symlink() and _holds(path, content):
            return name
    return None


def _remove_outdated(target: Path, locations: Iterable[str], keep: Container[str]) -> None:
    """Remove data files of a replaced model that onnxtrain wrote for it; other models may use any others."""
    for location in locations:
        path = target.parent / location
        real = os.path.realpath(path)
        status = os.lstat(path) if os.path.lexists(path) else None
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or real in keep:
            continue
        ours = _unnumbered(target, location) is not None or stamp_of(status) in _written
        if ours and Path(real).is_relative_to(os.path.realpath(target.parent)):
            path.unlink(missing_ok=True)


def refuse_node(target: Path) -> None:
    """Refuse to save a model with data files into a device or a pipe."""
    raise ModelError(
        f"{str(target)!r} cannot be written: it is a device or a pipe, and this model has data files, which lie beside "
        "it; give the name of a file."
    ).about(str(target))


def _holds(path: Path, other: BinaryIO) -> bool:
    """Return whether a file holds the bytes of an open file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size == os.fstat(other.fileno()).st_size and all(
            os.pread(file.fileno(), _BLOCK, position) == os.pread(other.fileno(), _BLOCK, position)
            for position in range(0, size, _BLOCK)
        )


@contextlib.contextmanager
def _unchanged(sources: DataFiles, item: DataFile) -> Iterator[BinaryIO | None]:
    """Open a data file that is as it was when the model was read; ``None`` if it is not, and not needed."""
    with contextlib.ExitStack() as stack:
        try:
            source: BinaryIO | None = stack.enter_context(sources.open(item.source, item.size))
        except ModelError:
            if not item.is_whole:
                raise
            source = None
        yield source if source is not None and all(_has(source, change) for change in item.held) else None


def _has(source: BinaryIO, change: Change) -> bool:
    """Return whether an open file has these bytes."""
    data, end = change.data(), change.offset + change.length
    return all(
        os.pread(source.fileno(), min(_BLOCK, end - start), start) == data[start - change.offset :][:_BLOCK]
        for start in range(change.offset, end, _BLOCK)
    )


def _write_data(item: DataFile, source: BinaryIO | None, target: BinaryIO) -> int:
    """Write a data file, keeping holes; returns a checksum of the beginnings of the new bytes."""
    position = checksum = 0
    end = item.size if source is None else os.fstat(source.fileno()).st_size
    for change in () if source is not None else item.held:
        _write_change(target, change)
    for change in sorted(item.changes, key=lambda change: change.offset):
        if source is not None:
            _copy(source, target, position, change.offset)
        checksum = zlib.crc32(_write_change(target, change), zlib.crc32(str(change.offset).encode(), checksum))
        position = max(position, change.offset + change.length)
    if source is not None:
        _copy(source, target, position, end)
    target.truncate(max(position, end))
    return checksum


def _write_change(target: BinaryIO, change: Change) -> bytes:
    """Write the new bytes of a range, and return the first of them; only these stay in memory."""
    data = change.data()
    target.seek(change.offset)
    target.write(data)
    return bytes(data[:_BEGINNING])


def _copy(source: BinaryIO, target: BinaryIO, start: int, end: int) -> None:
    """Copy a range of bytes to the same range of another file."""
    while start < end:
        first, last = _content(source, start, end)
        source.seek(first)
        target.seek(first)
        for position in range(first, last, _BLOCK):
            target.write(source.read(min(_BLOCK, last - position)))
        start = last


def _content(file: BinaryIO, start: int, end: int) -> tuple[int, int]:
    """Return the next range before ``end`` that is no hole; all of it if the system cannot tell."""
    if not hasattr(os, "SEEK_DATA"):
        return start, end
    try:
        first = os.lseek(file.fileno(), start, os.SEEK_DATA)
    except OSError as error:
        return (end, end) if error.errno == errno.ENXIO else (start, end)
    return min(first, end), min(os.lseek(file.fileno(), first, os.SEEK_HOLE), end)


def check_value(tensor: TensorProto, array: npt.NDArray[np.generic]) -> None:
    """Check the type and the shape of a tensor's new value."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    if array.dtype != dtype or array.shape != shape:
        raise ModelError(
            f"The new value of {tensor.name!r} is {array.dtype}{list(array.shape)}, "
            f"but the model has {dtype}{list(shape)}; type and shape must stay the same."
        ).about(tensor.name, got=array.shape, wanted=shape)


def stored_bytes(tensor: TensorProto, values: Arrays, name: str) -> bytes | memoryview:
    """Return a tensor's new value as raw data."""
    array = values[name]
    check_value(tensor, array)
    return raw_bytes(array, tensor.data_type)


def check_shared(external: Mapping[str, ExternalData], values: Arrays) -> None:
    """Refuse different values for initializers that share bytes of a data file, as exporters store equal ones."""
    order = sorted(external, key=lambda name: (external[name].file, external[name].offset))
    widest = order[0] if order else ""  # the one that reaches furthest so far
    for name in order[1:]:
        first, second = external[widest], external[name]
        apart = first.file != second.file or second.offset >= first.offset + first.length
        same = (first.offset, first.length) == (second.offset, second.length)
        changed = widest in values or name in values
        if changed and not apart and not (same and _are_equal(values.get(widest), values.get(name))):
            raise ModelError(
                f"The initializers {widest!r} and {name!r} share bytes of {first.file!r}, so that they "
                "cannot be given different values; save the model with its weights inside, and train that."
            ).about(first.file, got=[widest, name])
        if apart or second.offset + second.length > first.offset + first.length:
            widest = name


def _are_equal(one: npt.NDArray[np.generic] | None, other: npt.NDArray[np.generic] | None) -> bool:
    return one is not None and other is not None and one.tobytes() == other.tobytes()


_LONGEST_RESCUED = 200
"""Maximum bytes of a name, with room for a suffix."""


def writable_folder() -> Path | None:
    """Return the first writable folder of: current folder, home folder, folder for temporary files."""
    import tempfile  # a slow import that is needed after errors only

    finders: tuple[Callable[[], Path], ...] = (Path.cwd, Path.home, lambda: Path(tempfile.gettempdir()))
    for find in finders:
        try:
            folder = find()
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"0")
            return folder
        except (OSError, RuntimeError):
            continue
    return None


@contextlib.contextmanager
def kept_in_memory(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add to the error of a failed save that the trainer keeps its weights, and a path that can be written."""
    try:
        yield
    except ModelError as error:
        sentence, folder = str(error), writable_folder()
        if "cannot be written" not in sentence or folder is None:
            raise
        raise ModelError(
            f"{_without_advice(sentence)}; the trainer keeps its weights: save them to another path, such as "
            f"{str(folder / _rescued_name(path))!r}."
        ) from error


def current_folder() -> Path:
    """Return the current folder, or the one for temporary files where it is gone."""
    try:
        return Path.cwd()
    except OSError:
        import tempfile

        return Path(tempfile.gettempdir())


def reached_from(start: Path, path: str | os.PathLike[str]) -> Path:
    """Return a path, or its place in the folder that was the current one, if that is gone."""
    try:
        os.getcwd()
    except OSError:
        return start / path
    return Path(path)


def save_or_rescue(save: Callable[[Path], None], path: str | os.PathLike[str], start: Path) -> None:
    """Save the result of a training, in a folder that was there; if it cannot be written, save it to another path."""
    path = reached_from(start, path)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save(path)
    except (ModelError, OSError) as error:
        import tempfile

        folders = dict.fromkeys([(start / path).parent, writable_folder(), Path(tempfile.gettempdir())])
        for folder in filter(None, folders):
            other = _free_path(folder, _rescued_name(path))
            try:
                save(other)
            except (ModelError, OSError):
                continue
            found = str(error) if isinstance(error, ModelError) else f"{os.fspath(path)!r}: {error.strerror or error}"
            raise ModelError(f"{_without_advice(found)}; the trained weights are in {str(other)!r}.") from error
        raise


def _rescued_name(path: str | os.PathLike[str]) -> str:
    name = Path(path).name or "model.onnx"
    while len(os.fsencode(name)) > _LONGEST_RESCUED:
        name = name[1:]
    return f"unsaved-{name}"


def _free_path(folder: Path, name: str) -> Path:
    """Return a path that does not exist."""
    number, found = 1, folder / name
    while os.path.lexists(found):
        number, found = number + 1, folder / f"{number}-{name}"
    return found


def _without_advice(sentence: str) -> str:
    return sentence.removesuffix(".").removesuffix(f"; {ELSEWHERE}").partition("; the trainer keeps its weights")[0]
