"""Tensors whose data lies in files beside the model: where, whether that is safe, and mapping them."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.errors import ModelError

_SMALL_FILE = 1 << 20
"""Data files up to this size are read: each mapping costs a file descriptor, and models may have thousands."""


@dataclass(frozen=True)
class ExternalData:
    """Where an external tensor's bytes are.

    Attributes:
        location: The file, relative to the model's folder, as the model says it.
        path: The file.
        offset: First byte.
        length: Number of bytes.
    """

    location: str
    path: Path
    offset: int
    length: int


def data_bytes(tensor: TensorProto) -> int:
    """How many bytes a tensor of this type and shape has as raw data.

    Raises:
        ModelError: The element type has no fixed size, or a dimension is negative.
    """
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"The tensor {tensor.name!r} has the shape {list(tensor.dims)}; sizes must not be negative.")
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"The tensor {tensor.name!r} has the element type {tensor.data_type}, whose size is not known; "
            "raw data needs a numeric type."
        ) from error
    elements = 1
    for dim in tensor.dims:
        elements *= dim
    return (elements * bits + 7) // 8


def locate(tensor: TensorProto, folder: Path | None) -> ExternalData:
    """Find an external tensor's bytes.

    Args:
        tensor: Says location, offset and length.
        folder: Where the model is; ``None`` for a model that was not read from a file.

    Raises:
        ModelError: The file is outside the folder, missing or too short, or the tensor's description is not
            valid.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    label = f"The external data of {tensor.name!r}"
    if folder is None:
        raise ModelError(
            f"{label} is in {location!r}, but the model was not read from a file, so that its folder is not known; "
            "give the path of the model instead."
        )
    path = _contained(label, location, folder)
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries["length"]) if entries.get("length") else data_bytes(tensor)
    except ValueError as error:
        raise ModelError(f"{label} has the offset or length {error.args[0].rsplit(': ')[-1]}, not a number.") from error
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


def _contained(label: str, location: str, folder: Path) -> Path:
    """The data file; reading must not leave the model's folder, whatever a stranger's model says."""
    if not location:
        raise ModelError(f"{label} has no location; export the model again.")
    if os.path.isabs(location) or Path(location).drive:
        raise ModelError(f"{label} has the absolute path {location!r}; it must lie in the model's folder.")
    if ".." in location.replace("\\", "/").split("/"):
        raise ModelError(f"{label} is in {location!r}, which leaves the model's folder; it must lie inside.")
    path = folder / location
    real = path.resolve()
    if not real.is_relative_to(folder.resolve()):
        raise ModelError(
            f"{label} is in {location!r}, a link to {str(real)!r} outside the model's folder; "
            "put the file itself there."
        )
    if not real.is_file():
        raise ModelError(f"{label} is in {location!r}, but there is no such file in {str(folder)!r}; put it there.")
    if real.stat().st_nlink > 1:
        # onnx and onnx_ir refuse these too: a hard link can name a file from anywhere on the disk.
        raise ModelError(f"{label} is in {location!r}, which has several hard links; put a copy of the file there.")
    return path


def raw_array(tensor: TensorProto, buffer: mmap.mmap | bytes, offset: int, length: int) -> npt.NDArray[np.generic]:
    """The values of a tensor of this type and shape: a view of its raw data, where elements are not packed."""
    if ir.DataType(tensor.data_type).bitwidth < 8:
        raw = buffer[offset : offset + length]
        packed = TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=raw)
        return numpy_helper.to_array(packed)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(buffer, dtype, length // dtype.itemsize, offset).reshape(list(tensor.dims))


class DataFiles:
    """Maps data files for reading, each once, as long as it is the same file."""

    def __init__(self) -> None:
        self._maps: dict[Path, tuple[tuple[int, int, int], mmap.mmap | bytes]] = {}

    def array(self, tensor: TensorProto, data: ExternalData) -> npt.NDArray[np.generic]:
        """The tensor's values, read-only; pages are read when they are used."""
        if data.length == 0:
            return np.empty(list(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
        return raw_array(tensor, self._buffer(data.path), data.offset, data.length)

    def _buffer(self, path: Path) -> mmap.mmap | bytes:
        status = path.stat()
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._maps.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        with path.open("rb") as file:
            if status.st_size <= _SMALL_FILE:
                buffer: mmap.mmap | bytes = file.read()
            else:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps[path] = (stamp, buffer)
        return buffer


def copy_with_changes(source: Path, target: BinaryIO, changes: Iterable[tuple[int, memoryview | bytes]]) -> None:
    """Stream a data file into an open one and overwrite the bytes at the given offsets."""
    with source.open("rb") as file:
        shutil.copyfileobj(file, target, 1 << 20)
    for offset, data in changes:
        target.seek(offset)
        target.write(data)
