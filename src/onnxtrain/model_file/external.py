"""Tensors whose data lies in files beside the model: where, and whether that is safe."""

from __future__ import annotations

import math
import os
import posixpath
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir
from onnx import TensorProto

from onnxtrain.errors import ModelError
from onnxtrain.ir.limits import LARGEST_SHAPE

_LARGEST_ELEMENT = 16
"""Bytes of the largest element, a complex one."""


class ExternalData(NamedTuple):
    """Location of an external tensor's bytes.

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

    @property
    def file(self) -> str:
        """The location as each file has only one."""
        return posixpath.normpath(self.location)

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.offset + self.length


def data_bytes(tensor: TensorProto) -> int:
    """Return the number of raw bytes of a tensor's type and shape.

    Raises:
        ModelError: The element type has no fixed size, or a dimension is negative.
    """
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"The tensor {tensor.name!r} has the shape {list(tensor.dims)}; sizes must not be negative.")
    if 0 in tensor.dims and math.prod(dim for dim in tensor.dims if dim) > LARGEST_SHAPE // _LARGEST_ELEMENT:
        raise ModelError(f"The tensor {tensor.name!r} has the shape {list(tensor.dims)}, which no tensor can have.")
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


def locate(tensor: TensorProto, folder: Path | None, moved: Mapping[str, str] | None = None) -> ExternalData:
    """Find an external tensor's bytes.

    Args:
        tensor: Says location, offset and length.
        folder: Where the model is; ``None`` for a model that was not read from a file.
        moved: Where data files are now, by where the model says they are.

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
    path = _contained(label, (moved or {}).get(posixpath.normpath(location), location), folder)
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
"""More than any file's size has."""


def _number(label: str, text: str) -> int:
    if not re.fullmatch(rf" *[+-]?[0-9]{{1,{_DIGITS}}} *", text):
        raise ModelError(f"{label} has the offset or length {_short(text)}, not a number.")
    return int(text)


def _short(text: str) -> str:
    """A text of a stranger in quotes, of bearable length."""
    return repr(text if len(text) <= 100 else f"{text[:97]}...")


def _contained(label: str, location: str, folder: Path) -> Path:
    """The data file; reading must not leave the model's folder, whatever a stranger's model says."""
    if not location:
        raise ModelError(f"{label} has no location; export the model again.")
    if os.path.isabs(location) or Path(location).drive:
        raise ModelError(f"{label} has the absolute path {location!r}; it must lie in the model's folder.")
    if ".." in location.replace("\\", "/").split("/"):
        raise ModelError(f"{label} is in {location!r}, which leaves the model's folder; it must lie inside.")
    path = folder / location
    try:
        real = path.resolve()
        found = os.stat(path)  # not path.is_file(), which says no to any error since Python 3.14
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except (OSError, ValueError, RuntimeError) as error:  # too long, no name at all, links in a circle
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ModelError(
            f"{label} is in {_short(location)}, which no file can be: {reason[:100]}; export the model again."
        ) from error
    if not real.is_relative_to(folder.resolve()):
        raise ModelError(
            f"{label} is in {location!r}, a link to {str(real)!r} outside the model's folder; "
            "put the file itself there."
        )
    if found is None or not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{label} is in {location!r}, but there is no such file in {str(folder)!r}; put it there.")
    if found.st_nlink > 1:
        # onnx and onnx_ir refuse these too: a hard link can name a file from anywhere on the disk.
        raise ModelError(f"{label} is in {location!r}, which has several hard links; put a copy of the file there.")
    return path


def set_folder(model: ir.Model, folder: str | os.PathLike[str]) -> None:
    """Say where the external data of a working graph is: of initializers and constants, in functions too."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        ir.external_data.set_base_dir(graph, folder)
