"""External data: tensors whose bytes lie in files beside the model, located, checked and read."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import posixpath
import re
import stat
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.graph.limits import LARGEST_SHAPE
from onnxtrain.model_file.large_data import (
    BackgroundRead,
    SourceFile,
    Stamp,
    aligned,
    changed_while_read,
    free_memory,
    stamp_of,
)
from onnxtrain.model_file.proto import all_tensors
from onnxtrain.model_file.writing import reason

_LARGEST_ELEMENT = 16
"""Bytes of the largest element, complex128."""


class ExternalData(NamedTuple):
    """Location of an external tensor's bytes."""

    location: str
    path: Path
    offset: int
    length: int

    @property
    def file(self) -> str:
        """The normalized location."""
        return posixpath.normpath(self.location)

    @property
    def end(self) -> int:
        """End of the range."""
        return self.offset + self.length


def data_bytes(tensor: TensorProto) -> int:
    """Return the number of raw bytes of a tensor's type and shape."""
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(
            f"The tensor {tensor.name!r} has the shape {list(tensor.dims)}; dimensions must not be negative."
        )
    if 0 in tensor.dims and math.prod(dim for dim in tensor.dims if dim) > LARGEST_SHAPE // _LARGEST_ELEMENT:
        raise ModelError(
            f"The tensor {tensor.name!r} has the shape {list(tensor.dims)}, which is too large for any tensor."
        )
    try:
        bits: int = ir.DataType(tensor.data_type).bitwidth
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"The tensor {tensor.name!r} has the element type {tensor.data_type}, whose size is unknown; "
            "raw data needs a numeric type."
        ) from error
    elements: int = math.prod(tensor.dims)
    return (elements * bits + 7) // 8


def locate(
    tensor: TensorProto, folder: str | os.PathLike[str] | None, moved: Mapping[str, str] | None = None
) -> ExternalData:
    """Find an external tensor's bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    label = f"The external data of {tensor.name!r}"
    if folder is None:
        raise ModelError(
            f"{label} is in {location!r}, but the model was not read from a file, so that its folder is not known; "
            "give the path of the model instead."
        ).about(label, got=location)
    path = _contained(label, (moved or {}).get(posixpath.normpath(location), location), Path(folder))
    offset = _number(label, entries.get("offset") or "0")
    length = _number(label, entries["length"]) if entries.get("length") else data_bytes(tensor)
    if length != data_bytes(tensor) or offset < 0:
        raise ModelError(
            f"{label} has {length} bytes from {offset}, but its type and shape {list(tensor.dims)} need "
            f"{data_bytes(tensor)} bytes; export the model again."
        )
    size = path.stat().st_size
    if size < offset + length:
        raise ModelError(
            f"{label} ends at byte {offset + length}, but the file {location!r} has {size} bytes; "
            "it is cut off or belongs to another model: copy it again."
        )
    return ExternalData(location, path, offset, length)


_DIGITS = 19
"""Maximum number of digits of an offset; no file size has more."""


def _number(label: str, text: str) -> int:
    if not re.fullmatch(rf" *[+-]?[0-9]{{1,{_DIGITS}}} *", text):
        raise ModelError(f"{label} has the offset or length {_short(text)}, not a number.")
    return int(text)


def _short(text: str) -> str:
    """Quote untrusted text, shortened."""
    return repr(text if len(text) <= 100 else f"{text[:97]}...")


def _contained(label: str, location: str, folder: Path) -> Path:
    """Return the path of a data file, which must be inside the model's folder, since models are untrusted."""
    if not location:
        raise ModelError(f"{label} has no location; export the model again.")
    if os.path.isabs(location) or Path(location).drive:
        raise ModelError(f"{label} has the absolute path {location!r}; it must lie in the model's folder.")
    if ".." in location.replace("\\", "/").split("/"):
        raise ModelError(f"{label} is in {location!r}, which leaves the model's folder; it must lie inside.")
    path = folder / location
    try:
        real = path.resolve()
        found = os.stat(path)  # not path.is_file(), which hides errors since Python 3.14
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except (OSError, ValueError, RuntimeError) as error:  # too long, an invalid name, a cycle of links
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ModelError(
            f"{label} is in {_short(location)}, which is not a valid path: {reason[:100]}; export the model again."
        ) from error
    if not real.is_relative_to(folder.resolve()):
        raise ModelError(
            f"{label} is in {location!r}, a link to {str(real)!r} outside the model's folder; "
            "put the file itself there."
        )
    if found is None or not stat.S_ISREG(found.st_mode):
        raise ModelError(
            f"{label} is in {location!r}, but there is no such file in {str(folder)!r}; put it there."
        ).about(label, got=location)
    if found.st_nlink > 1:
        # as onnx and onnx_ir do: a hard link can name a file from anywhere on the disk
        raise ModelError(f"{label} is in {location!r}, which has several hard links; put a copy of the file there.")
    return path


def set_folder(model: ir.Model, folder: str | os.PathLike[str]) -> None:
    """Set the folder of external data in a working graph: of initializers and constants, in functions too."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        ir.external_data.set_base_dir(graph, folder)


_HELD = 16
"""Data files of a model that are held open."""

_SURELY = 1 << 24
"""Bytes that are read into memory without asking how much is free."""


def raw_array(tensor: TensorProto, buffer: memoryview | bytes, offset: int, length: int) -> npt.NDArray[np.generic]:
    """Return the values of a tensor: a view of its raw data, unless elements are packed."""
    if ir.DataType(tensor.data_type).bitwidth < 8:
        raw = bytes(buffer[offset : offset + length])
        packed = TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=raw)
        return numpy_helper.to_array(packed)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(buffer, dtype, length // dtype.itemsize, offset).reshape(list(tensor.dims))


class DataFiles:
    """The data files of a model, as they were when it was read.

    The data of a training is read into memory by a thread, so that a file that is replaced or truncated later changes
    neither the training nor what it saves. Other data is read when it is needed, from a file that is unchanged. Some
    files are held open, so that they can be read after another process has saved over the model and removed them.
    """

    def __init__(self) -> None:
        self._stamps: dict[Path, Stamp] = {}
        self._opened: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._background: BackgroundRead | None = None
        self._size = 0  # bytes that were asked for so far
        weakref.finalize(self, _close, self._opened)

    def hold(self, paths: Iterable[Path]) -> None:
        """Record the state of the data files, and hold the first ones open instead of those that were before."""
        _close(self._opened)
        self._stamps.clear()
        self._maps.clear()
        for path in dict.fromkeys(paths):
            with contextlib.suppress(OSError):
                self._stamps[path] = stamp_of(os.stat(path))
                if len(self._opened) < _HELD:
                    self._opened[path] = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def read_ahead(self, ranges: Iterable[ExternalData]) -> None:
        """Read ranges of the files into memory, in another thread, unless they take half of what is free."""
        sources: dict[Path, dict[str, slice]] = {}
        for data in ranges:
            if data.length and data.path in self._stamps:
                sources.setdefault(data.path, {})[_key(data)] = slice(data.offset, data.end)
        size = sum(span.stop - span.start for spans in sources.values() for span in spans.values())
        with contextlib.suppress(MemoryError):
            if sources and self._fits(size):
                files = [SourceFile(path, self._stamps[path], spans) for path, spans in sources.items()]
                self._background = BackgroundRead(*files)

    def held(self, data: ExternalData) -> memoryview | None:
        """Return bytes that were read ahead; ``None`` for others."""
        found = self._background
        return found[_key(data)] if found is not None and _key(data) in found else None

    def drop(self, data: ExternalData) -> None:
        """Free bytes that were read ahead, once no view of them is left."""
        if self._background is not None:
            self._background.drop(_key(data))

    def take(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic] | None:
        """Transfer the memory that an array views; see :meth:`BackgroundRead.take`."""
        return None if self._background is None else self._background.take(array)

    @contextlib.contextmanager
    def open(self, path: Path, size: int = 0) -> Iterator[BinaryIO]:
        """Open a data file for reading."""
        label = f"The data file {str(path)!r}"
        known = self._stamps.get(path)
        try:
            try:
                file: BinaryIO = path.open("rb")
                if known not in (None, stamp_of(os.fstat(file.fileno()))) and path in self._opened:
                    file.close()  # maybe replaced: the one that is held open may still be as it was
                    file = self._reopened(path)
            except FileNotFoundError:
                if path not in self._opened:
                    raise
                file = self._reopened(path)
        except OSError as error:
            raise ModelError(f"{label} cannot be read: {reason(error, 'put it back')}.") from error
        with file:
            found = os.fstat(file.fileno())
            if found.st_size < size:
                raise ModelError(f"{label} has {found.st_size} bytes, but the model needs {size}; copy it again.")
            if known not in (None, stamp_of(found)):
                raise ModelError(f"{label} was changed since the model was read; put it back, or load the model again.")
            yield file

    def _reopened(self, path: Path) -> BinaryIO:
        file = os.fdopen(os.dup(self._opened[path]), "rb")
        file.seek(0)
        return file

    def array(self, tensor: TensorProto, data: ExternalData, path: Path | None = None) -> npt.NDArray[np.generic]:
        """Return the tensor's values, read-only."""
        if data.length == 0:
            return np.empty(list(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
        return raw_array(tensor, self.bytes(data, path), 0, data.length)

    def bytes(self, data: ExternalData, path: Path | None = None) -> memoryview:
        """Return the bytes of a tensor, read-only: those that were read ahead, else those of the file."""
        held = self.held(data) if data.length else memoryview(b"")
        if held is not None:
            return held
        path = path or data.path
        with self.open(path, data.end) as file:
            try:
                if not self._fits(data.length):
                    return self._map(path, file)[data.offset : data.end]
                memory = aligned(data.length)
                file.seek(data.offset)
                if file.readinto(memory.data) < data.length:  # type: ignore[attr-defined]
                    raise ModelError(changed_while_read(path))
            except MemoryError:
                return self._map(path, file)[data.offset : data.end]
            except OSError as error:
                raise ModelError(
                    f"The data file {str(path)!r} cannot be read: {reason(error, 'check the file')}."
                ) from error
        return memory.data.toreadonly()

    def _map(self, path: Path, file: BinaryIO) -> memoryview:
        if path not in self._maps:
            self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._maps[path])

    def _fits(self, size: int) -> bool:
        """Return whether data is read into memory instead of being mapped."""
        self._size += size
        free = free_memory() if self._size > _SURELY else None
        return free is None or self._size < free // 2


def _key(data: ExternalData) -> str:
    return f"{data.offset}:{data.length}:{data.file}"


def _close(held: dict[Path, int]) -> None:
    while held:
        os.close(held.popitem()[1])


class DataTensor(ir.ExternalTensor):
    """An external tensor of a working copy, whose data file may get another name by a save."""

    __slots__ = ("_read", "_where", "raw_bytes")

    def __init__(
        self,
        tensor: TensorProto,
        data: Callable[[], ExternalData],
        read: Callable[[], npt.NDArray[np.generic]],
        raw: Callable[[], memoryview],
        folder: str = "",
    ) -> None:
        found = data()
        super().__init__(
            found.location,
            found.offset,
            found.length,
            ir.DataType(tensor.data_type),
            shape=ir.Shape(tensor.dims),
            name=tensor.name,
            doc_string=tensor.doc_string or None,
            base_dir=folder,
        )
        self._where, self._read, self.raw_bytes = data, read, raw

    @property
    def location(self) -> str:
        """Path of the data file, relative to the model's folder."""
        return self._where().location

    def numpy(self) -> npt.NDArray[np.generic]:
        """Return the values."""
        return self._read()

    def __array__(self, dtype: Any = None) -> npt.NDArray[np.generic]:
        return np.asarray(self._read(), dtype)

    def tobytes(self) -> bytes:
        """Return the raw data."""
        return bytes(ir.Tensor(self._read(), dtype=self.dtype, name=self.name).tobytes())


def with_external_data(
    proto: ModelProto,
    folder: str | os.PathLike[str] | None,
    read: Callable[[TensorProto], bytes | memoryview] | None = None,
) -> ModelProto:
    """Load external data into a model, in place, and return the model.

    A result of more than 2 GiB cannot be written as one file; use ``onnx.save(..., save_as_external_data=True)``.
    """
    files = DataFiles()
    for tensor in external_tensors(proto):
        found = read(tensor) if read is not None else files.bytes(locate(tensor, folder))
        tensor.raw_data = bytes(found)
        drop_location(tensor)
    return proto


def drop_location(tensor: TensorProto) -> None:
    """Declare a tensor's data to be inside the model, in place."""
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


def check_external_data(
    proto: ModelProto, folder: str | os.PathLike[str] | None, *, without: Container[str] = ()
) -> None:
    """Check that a model's data files exist, except those of some tensors."""
    for tensor in external_tensors(proto):
        if tensor.name not in without:
            locate(tensor, folder)


def external_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Yield the tensors of a model whose data is in files."""
    return (tensor for tensor in all_tensors(proto) if tensor.data_location == TensorProto.EXTERNAL)
