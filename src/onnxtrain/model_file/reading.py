"""From a file to the parts of a model: the parsed message, its template, and where the large data is."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import ModelProto

from onnxtrain.errors import ModelError
from onnxtrain.model_file.origin import Stamp, stamp_of
from onnxtrain.model_file.protobuf_wire import CutOffError, Template, TooManyFieldsError, WireError
from onnxtrain.model_file.writing import reason

_MAXIMUM_BYTES = (1 << 31) - 1
"""The limit of protocol buffers."""

_MAPPED_FROM = 1 << 24
"""Bytes from which on a file is not read but mapped."""


def serialised(model: ModelProto) -> bytes:
    """The bytes of a model.

    Raises:
        ModelError: It is larger than protocol buffers can be.
    """
    try:
        return bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise ModelError(
            "The model is larger than 2 GiB, which protocol buffers cannot hold; "
            "save it with external data and give the path."
        ) from error


def read_file(path: Path) -> tuple[bytes | mmap.mmap, Stamp]:
    """The bytes of a file, and what tells whether it is still the same.

    A large file is mapped, so that what is no model costs no memory.

    Raises:
        ModelError: It cannot be read; the message says why.
    """
    label = repr(str(path))
    try:
        _check_regular(label, os.stat(path))  # before it is opened: that would wait for the writer of a pipe
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            _check_regular(label, status)
            if status.st_size > _MAXIMUM_BYTES:
                raise ModelError(
                    f"{label} is larger than 2 GiB, which an ONNX file cannot be; large weights must be external data."
                )
            if status.st_size > _MAPPED_FROM:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), stamp_of(status)
            data = file.read(_MAPPED_FROM)  # not more: files of /proc say that they are empty
    except FileNotFoundError as error:
        raise ModelError(f"There is no file {label}; check the path.") from error
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {reason(error, 'check the file')}.") from error
    except ValueError as error:  # a character that no path has
        raise ModelError(f"There is no file {label}, since no file can have this name; check the path.") from error
    if not data:
        raise ModelError(f"{label} is empty; an ONNX model is needed.")
    return data, stamp_of(status)


def _check_regular(label: str, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{label} is a folder; give the model file in it.")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{label} is a device, a pipe or a socket, which may have no end; give a file.")


def parse_file(path: Path, data: bytes | mmap.mmap) -> tuple[ModelProto, Template, dict[str, slice]]:
    """The model without the raw data of large initializers, its template, and where that data is.

    Raises:
        ModelError: These are not the bytes of a model.
    """
    label = repr(str(path))
    no_model = f"{label} is not an ONNX model: it starts with {data[:8]!r}; give a file that an ONNX exporter wrote."
    try:
        template = Template(data)
    except CutOffError as error:
        # Every exporter starts with the IR version: field 1, a small number.
        if data[0] == 0x08 and len(data) > 1 and 0 < data[1] < 0x80:
            raise ModelError(
                f"{label} is cut off: it has {len(data)} bytes and the model in it is longer; copy it again."
            ) from error
        raise ModelError(no_model) from error
    except TooManyFieldsError as error:
        raise ModelError(
            f"{label} has more parts than any model, so that its numbers must be stored one by one; export it again, "
            "with raw data."
        ) from error
    except WireError as error:
        raise ModelError(no_model) from error
    try:
        proto: ModelProto = ModelProto.FromString(template.light())
    except DecodeError as error:
        if "MaxDepth" in str(error):
            raise ModelError(
                f"{label} nests the bodies of If, Loop and Scan deeper than protocol buffers read; "
                "export it with fewer levels."
            ) from error
        raise ModelError(no_model) from error
    if not proto.ir_version:
        raise ModelError(no_model)
    return proto, template, places_by_name(proto, template)


def places_by_name(proto: ModelProto, template: Template) -> dict[str, slice]:
    """Return the byte ranges of large initializers' raw data, by name."""
    return {proto.graph.initializer[index].name: place for index, place in template.large().items()}
