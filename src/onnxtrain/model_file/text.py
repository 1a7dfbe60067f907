"""Check that all strings of a model are UTF-8: ONNX's protobuf version returns bytes for others."""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto

_VERSION_3 = b"\x62\x06proto3"


def is_text(data: bytes) -> bool:
    """Return whether every string field of a serialized model is UTF-8.

    Attributes of the type string are bytes to protocol buffers, and not looked at.
    """
    try:
        _strict_model().FromString(data)
    except DecodeError as error:
        return "UTF-8" not in str(error)
    return True


@functools.cache
def _strict_model() -> Any:
    """The message of a model in version 3 of protocol buffers, which reads the same bytes and checks text.

    ONNX writes its messages such that they are valid in both versions; that of a description is its field 12.
    """
    pool = descriptor_pool.DescriptorPool()  # beside the usual one, so that names may be the same
    pool.AddSerializedFile(ModelProto.DESCRIPTOR.file.serialized_pb + _VERSION_3)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(ModelProto.DESCRIPTOR.full_name))


def first_line(error: BaseException) -> str:
    """The first line of what an error of another package says, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else f"{type(error).__name__} without a word"
