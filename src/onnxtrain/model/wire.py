"""A serialised model with replaceable initializers: every other byte stays what it was.

Parsing a model and serialising it again is not the identity. Fields in another order than their numbers', fields
that this version of ONNX does not know, lists that are packed (.NET, Java) or not (C++, Python), lengths that are
not written the shortest way: protocol buffers allow all of these and a serialiser normalises them. So a model is
not reserialised. Its bytes are cut at the data of the initializers and put together again with new data, and the
lengths of the enclosing messages where those changed (only where numbers of variable length did).

The field numbers are those of ``onnx.proto``; the encoding is that of protocol buffers
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_RAW_DATA = 9
_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _DOUBLE_DATA, _UINT64_DATA = 4, 5, 7, 10, 11

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_Accepted = Mapping[int, tuple[int, ...]]
"""Field numbers with the wire types that they may have; under another one a field is unknown."""

_GRAPHS: _Accepted = {_MODEL_GRAPH: (_BYTES,)}
_INITIALIZERS: _Accepted = {_GRAPH_INITIALIZER: (_BYTES,)}
_DATA: _Accepted = {
    _RAW_DATA: (_BYTES,),
    _FLOAT_DATA: (_BYTES, _FIXED32),
    _DOUBLE_DATA: (_BYTES, _FIXED64),
    _INT32_DATA: (_BYTES, _VARINT),
    _INT64_DATA: (_BYTES, _VARINT),
    _UINT64_DATA: (_BYTES, _VARINT),
}

_UNSIZED = (ir.DataType.UNDEFINED, ir.DataType.STRING)
_PACKED = tuple(item.value for item in ir.DataType if item not in _UNSIZED and item.bitwidth < 8)
"""Element types of which several share a byte."""

_LARGE = 4096
"""Raw data from this size on is not part of the template: whoever has the model keeps it, once."""


class WireError(ValueError):
    """The bytes are not a sequence of fields."""


class CutOffError(WireError):
    """A field is longer than what is left."""


@dataclass(frozen=True)
class _Raw:
    """The raw data of an initializer, which is kept elsewhere: where it began, and its bytes."""

    index: int
    begin: int
    size: int


@dataclass(frozen=True)
class _Field:
    """A field that holds (part of) a tensor's data: what precedes the payload, and the payload."""

    number: int
    wire_type: int
    header: bytes
    payload: bytes | _Raw

    @property
    def size(self) -> int:
        return len(self.payload) if isinstance(self.payload, bytes) else self.payload.size


@dataclass
class _Message:
    """A message whose parts may change: its tag and length as written, and the parts."""

    header: bytes
    size: int
    parts: list[bytes | _Field | _Message] = field(default_factory=list)


Chunk = bytes | memoryview | _Raw


class Template:
    """The bytes of a model, cut at its initializers.

    Args:
        data: The serialised model; not kept.

    Raises:
        CutOffError: The data ends inside a field.
        WireError: The data is not what protocol buffers write.
    """

    def __init__(self, data: bytes) -> None:
        self._tensors: list[_Message] = []
        view = memoryview(data)

        def cut_tensor(part: _Slice) -> _Message:
            inside = _fields(view, part.payload, part.end)
            # Where raw data is given twice, the parsed model has the last of them only.
            once = sum(item.number == _RAW_DATA for item in inside) == 1
            message = _cut(view, part, _DATA, lambda item: self._cut_data(view, item, once))
            self._tensors.append(message)
            return message

        def cut_graph(part: _Slice) -> _Message:
            return _cut(view, part, _INITIALIZERS, cut_tensor)

        self._model = _cut(view, _Slice(0, _BYTES, 0, 0, len(data)), _GRAPHS, cut_graph)

    def _cut_data(self, view: memoryview, part: _Slice, once: bool) -> _Field:
        header = bytes(view[part.start : part.payload])
        size = part.end - part.payload
        if part.number == _RAW_DATA and once and size >= _LARGE:
            return _Field(part.number, part.wire_type, header, _Raw(len(self._tensors), part.payload, size))
        return _Field(part.number, part.wire_type, header, bytes(view[part.payload : part.end]))

    def stored_elements(self, index: int) -> tuple[str, int]:
        """How an initializer's data is stored: "raw" and bytes, or "typed" and the number of elements."""
        fields = _data_fields(self._tensors[index])
        raw = [item for item in fields if item.number == _RAW_DATA]
        if raw:
            return "raw", raw[-1].size
        return "typed", sum(_element_count(item) for item in fields)

    def large(self) -> dict[int, slice]:
        """Where the raw data of large initializers is in the serialised model, by their positions."""
        found = {}
        for message in self._tensors:
            for _, raw in _large_fields(message):
                found[raw.index] = slice(raw.begin, raw.begin + raw.size)
        return found

    def light(self) -> bytes:
        """The model's bytes without the raw data of large initializers."""
        dropped: _Payloads = {
            id(message): {position: None for position, _ in _large_fields(message)} for message in self._tensors
        }
        _, chunks = _render(self._model, dropped)
        return b"".join(chunk for chunk in chunks if not isinstance(chunk, _Raw))

    def render(
        self,
        tensors: list[TensorProto],
        arrays: Mapping[int, npt.NDArray[np.generic]],
        raw_data: Callable[[int], bytes],
    ) -> Iterator[bytes | memoryview]:
        """The model's bytes with new data.

        Args:
            tensors: The initializers, in order; their types and shapes are read.
            arrays: New values by position; of the tensors' types and shapes.
            raw_data: The raw data of a large initializer that gets no new value, by its position.
        """
        replaced: _Payloads = {
            id(self._tensors[index]): _replace(self._tensors[index], tensors[index], array)
            for index, array in arrays.items()
        }
        _, chunks = _render(self._model, replaced)
        for chunk in chunks:
            yield raw_data(chunk.index) if isinstance(chunk, _Raw) else chunk


@dataclass(frozen=True)
class _Slice:
    """Where a field is: its tag, its payload, its end."""

    number: int
    wire_type: int
    start: int
    payload: int
    end: int


def _cut(
    view: memoryview,
    whole: _Slice,
    accepted: _Accepted,
    cut: Callable[[_Slice], _Field | _Message],
) -> _Message:
    """Split a message: the accepted fields are cut further, what lies between stays bytes."""
    message = _Message(bytes(view[whole.start : whole.payload]), whole.end - whole.payload)
    begin = whole.payload
    for part in _fields(view, whole.payload, whole.end):
        if part.wire_type in accepted.get(part.number, ()):
            if begin < part.start:
                message.parts.append(bytes(view[begin : part.start]))
            message.parts.append(cut(part))
            begin = part.end
    if begin < whole.end:
        message.parts.append(bytes(view[begin : whole.end]))
    return message


def _fields(view: memoryview, position: int, end: int) -> Iterator[_Slice]:
    while position < end:
        start = position
        tag, position = _read_varint(view, position, end)
        number, wire_type = tag >> 3, tag & 7
        payload = position
        if wire_type == _VARINT:
            _, position = _read_varint(view, position, end)
        elif wire_type == _BYTES:
            length, payload = _read_varint(view, position, end)
            position = payload + length
        elif wire_type in (_FIXED32, _FIXED64):
            position += 4 if wire_type == _FIXED32 else 8
        else:
            raise WireError(f"wire type {wire_type} at byte {start}")
        if number == 0:
            raise WireError(f"field number 0 at byte {start}")
        if position > end:
            raise CutOffError(f"the field at byte {start} ends at byte {position}, the data at byte {end}")
        yield _Slice(number, wire_type, start, payload, position)


def _read_varint(view: memoryview, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= end:
            raise CutOffError(f"the data ends at byte {end} inside a number")
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise WireError(f"a number of more than 64 bits at byte {position}")


_Payloads = dict[int, dict[int, bytes | memoryview | None]]
"""By the identity of a message, new payloads by the position of the field; ``None`` leaves the field out."""


def _render(message: _Message, replaced: _Payloads) -> tuple[int, list[Chunk]]:
    """The payload's size and the message's chunks."""
    chunks: list[Chunk] = []
    size = 0
    new = replaced.get(id(message), {})
    for position, part in enumerate(message.parts):
        if isinstance(part, bytes):
            made: list[Chunk] = [part]
            size += len(part)
        elif isinstance(part, _Field):
            payload = new.get(position, part.payload)
            if payload is None:
                continue
            length = payload.size if isinstance(payload, _Raw) else len(payload)
            grown = part.wire_type == _BYTES and length != part.size
            header = _new_header(part.header, length) if grown else part.header
            made = [header, payload]
            size += len(header) + length
        else:
            length, made = _render(part, replaced)
            header = part.header if length == part.size else _new_header(part.header, length)
            made = [header, *made]
            size += len(header) + length
        chunks += made
    return size, chunks


def _new_header(header: bytes, length: int) -> bytes:
    """A tag as it was, with another length."""
    _, end = _read_varint(memoryview(header), 0, len(header))
    return header[:end] + _varints(np.array([length], np.uint64))


def _large_fields(tensor: _Message) -> list[tuple[int, _Raw]]:
    """The fields whose data is kept elsewhere, with their positions in the message."""
    return [
        (position, part.payload)
        for position, part in enumerate(tensor.parts)
        if isinstance(part, _Field) and isinstance(part.payload, _Raw)
    ]


def _data_fields(tensor: _Message) -> list[_Field]:
    return [part for part in tensor.parts if isinstance(part, _Field)]


def _element_count(item: _Field) -> int:
    """The numbers in a field: one, or as many as are packed."""
    if item.wire_type != _BYTES:
        return 1
    if item.number in (_FLOAT_DATA, _DOUBLE_DATA):
        return item.size // (4 if item.number == _FLOAT_DATA else 8)
    assert isinstance(item.payload, bytes)
    return int(np.count_nonzero(np.frombuffer(item.payload, np.uint8) < 0x80))


def _replace(
    message: _Message, tensor: TensorProto, array: npt.NDArray[np.generic]
) -> dict[int, bytes | memoryview | None]:
    """New payloads of a tensor's data fields, by position in the message."""
    fields = {position: part for position, part in enumerate(message.parts) if isinstance(part, _Field)}
    raw = [position for position, part in fields.items() if part.number == _RAW_DATA]
    if raw:
        return {raw[-1]: raw_bytes(array, tensor.data_type)}  # of several, the last one counts
    elements = _typed_elements(tensor, array)
    payloads: dict[int, bytes | memoryview | None] = {}
    begin = 0
    for position, part in fields.items():
        count = _element_count(part)
        some = elements[begin : begin + count]
        payloads[position] = some.tobytes() if some.dtype.kind == "f" else _varints(some.astype(np.uint64))
        begin += count
    return payloads


def raw_bytes(array: npt.NDArray[np.generic], data_type: int) -> bytes | memoryview:
    """An array as ONNX's raw data: little-endian, rows first, small numbers packed."""
    if data_type in _PACKED:
        return numpy_helper.from_array(array).raw_data
    dtype = array.dtype.newbyteorder("<") if array.dtype.kind in "fciu" else array.dtype
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def _typed_elements(tensor: TensorProto, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The numbers that the field for this element type holds (see ``TensorProto.data_type`` in onnx.proto)."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if tensor.data_type in (TensorProto.FLOAT, TensorProto.COMPLEX64):
        return flat.view(np.float32)
    if tensor.data_type in (TensorProto.DOUBLE, TensorProto.COMPLEX128):
        return flat.view(np.float64)
    if flat.dtype.kind in "iu":
        return flat.astype(np.int64)  # negative numbers are written with 64 bits
    if flat.dtype.itemsize == 2:
        return flat.view(np.uint16)
    return flat.view(np.uint8)


def _varints(values: npt.NDArray[np.uint64]) -> bytes:
    """Numbers of 7 bits a byte, the lowest first; the high bit says that more follow."""
    groups = values[:, None] >> np.arange(0, 70, 7, dtype=np.uint64)
    used = np.where(values == 0, 1, 10 - np.argmax(groups[:, ::-1] != 0, axis=1))
    column = np.arange(10)
    digits = (groups & np.uint64(0x7F)).astype(np.uint8)
    digits |= np.where(column[None, :] < used[:, None] - 1, 0x80, 0).astype(np.uint8)
    return digits[column[None, :] < used[:, None]].tobytes()
