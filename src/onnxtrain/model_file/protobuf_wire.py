"""Replace initializers in a serialized model; every other byte stays the same.

Parsing and serializing a model is not the identity: a serializer normalizes the order of fields, packed (.NET, Java)
and unpacked (C++, Python) lists, and lengths that are not encoded the shortest way, and protobuf allows them all. So a
model is not serialized again. Its bytes are cut at the data of the initializers and joined with new data, and with new
lengths of the enclosing messages if those change (only with integers of variable length).

The field numbers are those of ``onnx.proto``; the encoding is that of protocol buffers
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""


class WireError(ValueError):
    """The bytes are not a sequence of fields."""


class CutOffError(WireError):
    """A field is longer than the remaining data."""


class TooManyFieldsError(WireError):
    """There are more fields than any model has."""


class Budget:
    """Limit on the number of fields that are read in a message and its submessages."""

    def __init__(self, most: int) -> None:
        self.left = most


class Slice(NamedTuple):
    """Position of a field: its tag, its payload, its end."""

    number: int
    wire_type: int
    start: int
    payload: int
    end: int


def read_fields(view: memoryview, position: int, end: int, budget: Budget) -> Iterator[Slice]:
    """Yield the fields of a message."""
    while position < end:
        start = position
        tag, position = read_varint(view, position, end)
        number, wire_type = tag >> 3, tag & 7
        payload = position
        if wire_type == VARINT:
            _, position = read_varint(view, position, end)
        elif wire_type == BYTES:
            length, payload = read_varint(view, position, end)
            position = payload + length
        elif wire_type in (FIXED32, FIXED64):
            position += 4 if wire_type == FIXED32 else 8
        else:
            raise WireError(f"wire type {wire_type} at byte {start}")
        if number == 0:
            raise WireError(f"field number 0 at byte {start}")
        if position > end:
            raise CutOffError(f"the field at byte {start} ends at byte {position}, the data at byte {end}")
        budget.left -= 1
        if budget.left < 0:
            raise TooManyFieldsError(f"more fields at byte {start}")
        yield Slice(number, wire_type, start, payload, position)


def read_varint(view: memoryview, position: int, end: int) -> tuple[int, int]:
    """Return an integer and its end."""
    value = shift = 0
    while True:
        if position >= end:
            raise CutOffError(f"the data ends at byte {end} inside an integer")
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise WireError(f"an integer of more than 64 bits at byte {position}")


def varints(values: npt.NDArray[np.uint64], tag: bytes = b"") -> bytes:
    """Encode integers with 7 bits per byte, lowest first; the high bit marks continuation. A tag precedes each."""
    groups = values[:, None] >> np.arange(0, 70, 7, dtype=np.uint64)
    used = np.where(values == 0, 1, 10 - np.argmax(groups[:, ::-1] != 0, axis=1))
    column = np.arange(10)
    digits = (groups & np.uint64(0x7F)).astype(np.uint8)
    digits |= np.where(column[None, :] < used[:, None] - 1, 0x80, 0).astype(np.uint8)
    chosen = column[None, :] < used[:, None]
    if tag:
        tags = np.broadcast_to(np.frombuffer(tag, np.uint8), (len(values), len(tag)))
        digits, chosen = np.hstack([tags, digits]), np.hstack([np.ones(tags.shape, bool), chosen])
    return digits[chosen].tobytes()


_UNSIZED = (ir.DataType.UNDEFINED, ir.DataType.STRING)

_PACKED = tuple(item.value for item in ir.DataType if item not in _UNSIZED and item.bitwidth < 8)
"""Element types with several elements per byte."""


def raw_bytes(array: npt.NDArray[np.generic], data_type: int) -> bytes | memoryview:
    """Return an array as ONNX raw data: little-endian, row-major, small elements packed."""
    if data_type in _PACKED:
        return numpy_helper.from_array(array).raw_data
    dtype = array.dtype.newbyteorder("<") if array.dtype.kind in "fciu" else array.dtype
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def typed_elements(tensor: TensorProto, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the values of the typed field for this element type (see ``TensorProto.data_type`` in onnx.proto)."""
    if tensor.data_type in _PACKED:
        return np.frombuffer(raw_bytes(array, tensor.data_type), np.uint8)
    flat = np.ascontiguousarray(array).reshape(-1)
    if tensor.data_type in (TensorProto.FLOAT, TensorProto.COMPLEX64):
        return flat.view(np.float32)
    if tensor.data_type in (TensorProto.DOUBLE, TensorProto.COMPLEX128):
        return flat.view(np.float64)
    if flat.dtype.kind in "iu":
        return flat.astype(np.int64)  # negative integers are encoded with 64 bits
    if flat.dtype.itemsize == 2:
        return flat.view(np.uint16)
    return flat.view(np.uint8)


__all__ = ["CutOffError", "Template", "TooManyFieldsError", "WireError"]

_RAW_DATA = 9
_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _DOUBLE_DATA, _UINT64_DATA = 4, 5, 7, 10, 11

_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_LOCATION = b"location"

_GRAPH = {1: "node", 5: "tensor", 15: "sparse tensor"}
_CHILDREN: Mapping[str, Mapping[int, str]] = {
    "model": {7: "main graph", 20: "training", 25: "function"},
    "main graph": _GRAPH | {5: "initializer"},
    "graph": _GRAPH,
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
    "initializer": {13: "entry"},
    "tensor": {13: "entry"},
}
"""Fields on the paths from a model to initializers and to locations of external data."""

_ALWAYS_CUT = ("main graph", "initializer")
"""Messages that are always cut; others only if they may contain a location."""

_COST_OF_A_MESSAGE = 8
"""Cost of cutting a message, in fields."""

_MOST_FIELDS = 1 << 21
"""Maximum fields of a model, without those of nodes; each takes two or three microseconds."""

_DEEPEST = 100
"""Maximum depth of messages, the limit of protocol buffers."""

_DATA: Mapping[int, tuple[int, ...]] = {
    _RAW_DATA: (BYTES,),
    _FLOAT_DATA: (BYTES, FIXED32),
    _DOUBLE_DATA: (BYTES, FIXED64),
    _INT32_DATA: (BYTES, VARINT),
    _INT64_DATA: (BYTES, VARINT),
    _UINT64_DATA: (BYTES, VARINT),
}
"""Data fields of a tensor with their wire types; with another type a field is unknown."""

_LIST: Mapping[int, tuple[int, ...]] = {2: (FIXED32,), 7: (BYTES, FIXED32)}
"""Data fields of an attribute that is a float or a list of floats."""


_LARGE = 4096
"""Bytes from which raw data is not part of the template; the caller keeps it."""


class _Raw(NamedTuple):
    """Raw data of an initializer outside the template: index of the initializer, offset, number of bytes."""

    position: int
    begin: int
    size: int


class _Field(NamedTuple):
    """A field with (part of) a tensor's data: header and payload."""

    number: int
    wire_type: int
    header: bytes
    payload: bytes | _Raw
    tag: bytes = b""
    numbers: int = 1

    @property
    def size(self) -> int:
        return len(self.payload) if isinstance(self.payload, bytes) else self.payload.size


@dataclass(eq=False)
class _Message:
    """A message whose parts may change: tag and length as written, and the parts."""

    header: bytes
    size: int
    parts: list[bytes | _Field | _Message] = field(default_factory=list)


class _Source(NamedTuple):
    """A serialized model: a view, and the object to search for bytes."""

    view: memoryview
    data: bytes | mmap.mmap


Chunk = bytes | memoryview | _Raw

Path = tuple[tuple[int, int], ...]
"""Path from a model to a message inside it: field numbers, each with the index among fields of that number."""


class Template:
    """The bytes of a model, cut at its initializers."""

    def __init__(self, data: bytes | mmap.mmap, inner: Sequence[Path] = ()) -> None:
        self._tensors: list[_Message] = []
        self._inner: dict[Path, _Message] = {}
        self._ways = {path[:length] for path in inner for length in range(1, len(path) + 1)}
        self._ends = set(inner)
        self._locations: list[tuple[_Message, int]] = []  # entries with the position of the value in each
        self._budget = Budget(_MOST_FIELDS)
        with memoryview(data) as view:
            self._model = self._cut(_Source(view, data), Slice(0, BYTES, 0, 0, len(data)), "model", 0, ())

    def _cut(self, source: _Source, whole: Slice, kind: str, depth: int, path: Path) -> _Message:
        """Split a message into parts that may change and bytes between them."""
        holds_data = kind == "initializer" or path in self._ends
        types = _LIST if kind == "attribute" else _DATA
        counts: dict[int, int] = {}  # fields seen so far, by number
        self._budget.left -= _COST_OF_A_MESSAGE
        message = _Message(bytes(source.view[whole.start : whole.payload]), whole.end - whole.payload)
        once = False
        if kind == "initializer":
            self._tensors.append(message)
            # of several raw data fields, the parsed model has the last one only
            inside = read_fields(source.view, whole.payload, whole.end, Budget(self._budget.left))
            once = sum(part.number == _RAW_DATA for part in inside) == 1
        elif holds_data:
            self._inner[path] = message
        begin = whole.payload
        inside = read_fields(source.view, whole.payload, whole.end, self._budget)
        for part, end, count in _runs(inside) if holds_data else ((item, item.end, 1) for item in inside):
            made: _Field | _Message | None
            if holds_data and part.wire_type in types.get(part.number, ()):
                number = _FLOAT_DATA if types is _LIST else part.number
                made = self._cut_data(source, part._replace(number=number), end, count, once)
            else:
                index = counts.get(part.number, 0)
                counts[part.number] = index + 1
                made = self._cut_inside(source, part, kind, depth, (*path, (part.number, index)))
            if made is None:
                continue
            if begin < part.start:
                message.parts.append(bytes(source.view[begin : part.start]))
            message.parts.append(made)
            begin = end
        if begin < whole.end:
            message.parts.append(bytes(source.view[begin : whole.end]))
        return message

    def _cut_inside(self, source: _Source, part: Slice, kind: str, depth: int, path: Path) -> _Message | None:
        """Cut a field that may contain changing parts; ``None`` if it has none."""
        child = _CHILDREN.get(kind, {}).get(part.number)
        if child is None or part.wire_type != BYTES or depth > _DEEPEST:
            return None
        if child == "entry":
            return self._cut_entry(source, part)
        always = child in _ALWAYS_CUT or path in self._ways
        if not always and source.data.find(_LOCATION, part.payload, part.end) < 0:
            return None
        message = self._cut(source, part, child, depth + 1, path)
        changes = always or any(not isinstance(item, bytes) for item in message.parts)
        return message if changes else None

    def _cut_entry(self, source: _Source, whole: Slice) -> _Message | None:
        """Cut an entry of external data if it is the location."""
        view = source.view
        texts = [part for part in read_fields(view, whole.payload, whole.end, self._budget) if part.wire_type == BYTES]
        keys = [view[part.payload : part.end] for part in texts if part.number == _ENTRY_KEY]
        if not keys or keys[-1] != _LOCATION:
            return None
        message = _Message(bytes(view[whole.start : whole.payload]), whole.end - whole.payload)
        begin = whole.payload
        for part in texts:
            if part.number == _ENTRY_VALUE:
                header, value = bytes(view[part.start : part.payload]), bytes(view[part.payload : part.end])
                message.parts += [bytes(view[begin : part.start]), _Field(part.number, BYTES, header, value)]
                self._locations.append((message, len(message.parts) - 1))
                begin = part.end
        message.parts.append(bytes(view[begin : whole.end]))
        return message

    def _cut_data(self, source: _Source, part: Slice, end: int, count: int, once: bool) -> _Field:
        """Cut a data field, or values that are stored one by one up to ``end``."""
        if part.wire_type != BYTES:
            tag = bytes(source.view[part.start : part.payload])
            return _Field(part.number, part.wire_type, b"", bytes(source.view[part.start : end]), tag, count)
        header = bytes(source.view[part.start : part.payload])
        size = part.end - part.payload
        if part.number == _RAW_DATA and once and size >= _LARGE:
            # its tensor is the last one so far
            return _Field(part.number, part.wire_type, header, _Raw(len(self._tensors) - 1, part.payload, size))
        return _Field(part.number, part.wire_type, header, bytes(source.view[part.payload : part.end]))

    def stored_elements(self, index: int) -> tuple[str, int]:
        """Return the storage of an initializer: "raw" and its bytes, or "typed" and the number of elements."""
        fields = _data_fields(self._tensors[index])
        raw = [item for item in fields if item.number == _RAW_DATA]
        if raw:
            return "raw", raw[-1].size
        return "typed", sum(_element_count(item) for item in fields)

    def holds(self, path: Path) -> bool:
        """Return whether a path leads to a tensor with data that can be replaced."""
        return path in self._inner and bool(_data_fields(self._inner[path]))

    def locations(self) -> set[str]:
        """Return the locations of external data anywhere in the model."""
        return {_location(message, position) for message, position in self._locations}

    def large(self) -> dict[int, slice]:
        """Return the byte ranges of large initializers' raw data in the serialized model, by initializer index."""
        found = {}
        for message in self._tensors:
            for _, raw in _large_fields(message):
                found[raw.position] = slice(raw.begin, raw.begin + raw.size)
        return found

    def light(self) -> bytes:
        """Return the model's bytes without the raw data of large initializers."""
        dropped: _Payloads = {
            id(message): {position: None for position, _ in _large_fields(message)} for message in self._tensors
        }
        _, chunks = _render(self._model, dropped)
        return b"".join(chunk for chunk in chunks if not isinstance(chunk, _Raw))

    def render(
        self,
        tensors: list[TensorProto],
        arrays: Mapping[int, npt.NDArray[np.generic]],
        raw_data: Callable[[int], bytes | memoryview],
        locations: Mapping[str, str] | None = None,
        inner: Mapping[Path, tuple[TensorProto, npt.NDArray[np.generic]]] | None = None,
    ) -> Iterator[bytes | memoryview]:
        """Yield the model's bytes with new data."""
        replaced: _Payloads = {
            id(self._tensors[index]): _replace(self._tensors[index], tensors[index], array)
            for index, array in arrays.items()
        }
        for path, (tensor, array) in (inner or {}).items():
            replaced[id(self._inner[path])] = _replace(self._inner[path], tensor, array)
        for message, position in self._locations:
            new = (locations or {}).get(_location(message, position))
            if new is not None:
                replaced.setdefault(id(message), {})[position] = new.encode()
        _, chunks = _render(self._model, replaced)
        for chunk in chunks:
            yield raw_data(chunk.position) if isinstance(chunk, _Raw) else chunk


def _runs(parts: Iterable[Slice]) -> Iterator[tuple[Slice, int, int]]:
    """Yield fields with their ends and counts; values that are stored one by one are one item."""
    first: Slice | None = None
    end = count = 0
    for part in parts:
        if first is not None and _continues(first, part):
            end, count = part.end, count + 1
            continue
        if first is not None:
            yield first, end, count
        first, end, count = part, part.end, 1
    if first is not None:
        yield first, end, count


def _continues(first: Slice, part: Slice) -> bool:
    same_tag = part.payload - part.start == first.payload - first.start
    return part.wire_type != BYTES and (part.number, part.wire_type) == (first.number, first.wire_type) and same_tag


_Payloads = dict[int, dict[int, bytes | memoryview | None]]
"""New payloads by message identity and field position; ``None`` omits the field."""


def _render(message: _Message, replaced: _Payloads) -> tuple[int, list[Chunk]]:
    """Return the size of a message's payload and its chunks."""
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
            grown = part.wire_type == BYTES and length != part.size
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
    """Return a header with the same tag and another length."""
    _, end = read_varint(memoryview(header), 0, len(header))
    return header[:end] + varints(np.array([length], np.uint64))


def _location(entry: _Message, position: int) -> str:
    value = entry.parts[position]
    assert isinstance(value, _Field)
    assert isinstance(value.payload, bytes)
    return value.payload.decode(errors="surrogateescape")


def _large_fields(tensor: _Message) -> list[tuple[int, _Raw]]:
    """Return the raw data fields outside the template, with their positions in the message."""
    return [
        (position, part.payload)
        for position, part in enumerate(tensor.parts)
        if isinstance(part, _Field) and isinstance(part.payload, _Raw)
    ]


def _data_fields(tensor: _Message) -> list[_Field]:
    return [part for part in tensor.parts if isinstance(part, _Field)]


def _element_count(item: _Field) -> int:
    """Return the number of values in a field, packed or stored one by one."""
    if item.wire_type != BYTES:
        return item.numbers
    if item.number in (_FLOAT_DATA, _DOUBLE_DATA):
        return item.size // (4 if item.number == _FLOAT_DATA else 8)
    assert isinstance(item.payload, bytes)
    return int(np.count_nonzero(np.frombuffer(item.payload, np.uint8) < 0x80))


def _replace(
    message: _Message, tensor: TensorProto, array: npt.NDArray[np.generic]
) -> dict[int, bytes | memoryview | None]:
    """Return new payloads of a tensor's data fields, by position in the message."""
    fields = {position: part for position, part in enumerate(message.parts) if isinstance(part, _Field)}
    raw = [position for position, part in fields.items() if part.number == _RAW_DATA]
    if raw:
        return {raw[-1]: raw_bytes(array, tensor.data_type)}  # of several, the last one counts
    elements = typed_elements(tensor, array)
    payloads: dict[int, bytes | memoryview | None] = {}
    begin = 0
    for position, part in fields.items():
        count = _element_count(part)
        some = elements[begin : begin + count]
        if some.dtype.kind != "f":
            payloads[position] = varints(some.astype(np.uint64), part.tag)
        elif not part.tag:
            payloads[position] = some.tobytes()
        else:
            tags = np.broadcast_to(np.frombuffer(part.tag, np.uint8), (count, len(part.tag)))
            payloads[position] = np.hstack([tags, some.view(np.uint8).reshape(count, -1)]).tobytes()
        begin += count
    return payloads
