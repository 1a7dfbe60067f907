"""Reading the files that external data is in: opened, mapped, and looked at tensor by tensor."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.model_file.external import ExternalData
from onnxtrain.model_file.writing import reason

_HELD = 16
"""Number of a model's data files that are held open."""

_SMALL_FILE = 1 << 20
"""Data files up to this size are read: each mapping costs a file descriptor, and models may have thousands."""


def raw_array(
    tensor: TensorProto, buffer: mmap.mmap | memoryview | bytes, offset: int, length: int
) -> npt.NDArray[np.generic]:
    """The values of a tensor of this type and shape: a view of its raw data, where elements are not packed."""
    if ir.DataType(tensor.data_type).bitwidth < 8:
        raw = bytes(buffer[offset : offset + length])
        packed = TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=raw)
        return numpy_helper.to_array(packed)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(buffer, dtype, length // dtype.itemsize, offset).reshape(list(tensor.dims))


class DataFiles:
    """Reads data files, and maps them, each once, as long as it is the same file.

    A few are held open, so that they can still be read after another run has saved over the model and removed them.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, tuple[tuple[int, int, int], mmap.mmap | bytes]] = {}
        self._held: dict[Path, int] = {}
        weakref.finalize(self, _close, self._held)

    def hold(self, paths: Iterable[Path]) -> None:
        """Open data files, as far as there are not too many, and let go of those before."""
        _close(self._held)
        for path in list(dict.fromkeys(paths))[:_HELD]:
            with contextlib.suppress(OSError):
                self._held[path] = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    @contextlib.contextmanager
    def open(self, path: Path, size: int = 0) -> Iterator[BinaryIO]:
        """Open a data file for reading.

        Args:
            path: The file.
            size: How many bytes it has to have.

        Raises:
            ModelError: It cannot be read, or was cut off.
        """
        label = f"The data file {str(path)!r}"
        try:
            try:
                file: BinaryIO = path.open("rb")
            except FileNotFoundError:
                if path not in self._held:
                    raise
                file = os.fdopen(os.dup(self._held[path]), "rb")
                file.seek(0)
        except OSError as error:
            raise ModelError(f"{label} cannot be read: {reason(error, 'put it back')}.") from error
        with file:
            found = os.fstat(file.fileno()).st_size
            if found < size:
                raise ModelError(f"{label} has {found} bytes, but the model needs {size}; copy it again.")
            yield file

    def array(self, tensor: TensorProto, data: ExternalData) -> npt.NDArray[np.generic]:
        """The tensor's values, read-only; pages are read when they are used.

        Raises:
            ModelError: The file cannot be read, or was cut off.
        """
        if data.length == 0:
            return np.empty(list(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
        return raw_array(tensor, self._buffer(data), data.offset, data.length)

    def read(self, data: ExternalData) -> bytes:
        """The bytes of a tensor.

        Raises:
            ModelError: The file cannot be read, or was cut off.
        """
        with self.open(data.path, data.end) as file:
            file.seek(data.offset)
            return file.read(data.length)

    def raw(self, data: ExternalData) -> npt.NDArray[np.uint8]:
        """The bytes, read-only; pages are read when they are used.

        Raises:
            ModelError: The file cannot be read, or was cut off.
        """
        if data.length == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._buffer(data), np.uint8, data.length, data.offset)

    def _buffer(self, data: ExternalData) -> mmap.mmap | bytes:
        with self.open(data.path, data.end) as file:
            status = os.fstat(file.fileno())
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._maps.get(data.path)
            if known is not None and known[0] == stamp:
                return known[1]
            try:
                if status.st_size <= _SMALL_FILE:
                    buffer: mmap.mmap | bytes = file.read()
                else:
                    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise ModelError(
                    f"The data file {str(data.path)!r} cannot be read: {reason(error, 'check the file')}."
                ) from error
        self._maps[data.path] = (stamp, buffer)
        return buffer


def _close(held: dict[Path, int]) -> None:
    while held:
        os.close(held.popitem()[1])


class DataTensor(ir.ExternalTensor):
    """An external tensor of a working copy, whose values come from wherever its data is when they are read.

    Args:
        tensor: The initializer.
        data: Where its data is now.
        read: Gives its values.
        folder: Where the model is.
    """

    __slots__ = ("_read", "_where")

    def __init__(
        self,
        tensor: TensorProto,
        data: Callable[[], ExternalData],
        read: Callable[[], npt.NDArray[np.generic]],
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
        self._where, self._read = data, read

    @property
    def location(self) -> str:
        """The data file, relative to the model's folder."""
        return self._where().location

    def numpy(self) -> npt.NDArray[np.generic]:
        """The values; pages are read when they are used."""
        return self._read()

    def __array__(self, dtype: Any = None) -> npt.NDArray[np.generic]:
        return np.asarray(self._read(), dtype)

    def tobytes(self) -> bytes:
        """The raw data."""
        return bytes(ir.Tensor(self._read(), dtype=self.dtype, name=self.name).tobytes())
