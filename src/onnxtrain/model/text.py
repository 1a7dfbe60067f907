"""Whether all text of a model is text: protocol buffers of ONNX's version do not look, and hand out bytes instead."""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto

_PACKAGE = "onnxtrain.strict"


def is_text(data: bytes) -> bool:
    """Whether every name and every other text of a serialised model is UTF-8.

    Attributes of the type string are bytes to protocol buffers, and not looked at.
    """
    try:
        _strict_model().FromString(data)
    except DecodeError as error:
        return "UTF-8" not in str(error)
    return True


@functools.cache
def _strict_model() -> Any:
    """The message of a model in version 3 of protocol buffers, which reads the same bytes and checks text."""
    file = descriptor_pb2.FileDescriptorProto()
    ModelProto.DESCRIPTOR.file.CopyToProto(file)
    own = f".{file.package}."
    file.name, file.package, file.syntax = "onnxtrain/strict.proto", _PACKAGE, "proto3"
    file.ClearField("options")
    for message in file.message_type:
        _make_strict(message, own)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.ModelProto"))


def _make_strict(message: Any, own: str) -> None:
    for field in message.field:
        field.ClearField("default_value")
        if field.type_name.startswith(own):
            field.type_name = f".{_PACKAGE}.{field.type_name.removeprefix(own)}"
    for inner in message.nested_type:
        _make_strict(inner, own)


def first_line(error: BaseException) -> str:
    """The first line of what an error of another package says, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else f"{type(error).__name__} without a word"
