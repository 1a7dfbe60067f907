"""A serialized model with replaceable initializers: every other byte stays what it was.

Parsing a model and serializing it again is not the identity. Fields in another order than their numbers', fields that
this version of ONNX does not know, lists that are packed (.NET, Java) or not (C++, Python), lengths that are not
written the shortest way: protocol buffers allow all of these, and a serializer normalizes them. So a model is not
serialized again. Its bytes are cut at the data of the initializers and joined again with new data, and with new lengths
of the enclosing messages where those changed (only where integers of variable length did).

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
    """A field is longer than what is left."""


class TooManyFieldsError(WireError):
    """There are more fields than a model has."""


class Budget:
    """Limit on the number of fields that are read in a message and its submessages.

    Args:
        most: The number.
    """

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
    """The fields of a message, one after the other.

    Raises:
        CutOffError: One is longer than the message.
        TooManyFieldsError: The budget is used up.
        WireError: This is no sequence of fields.
    """
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
    """A number, and where it ends."""
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


def varints(values: npt.NDArray[np.uint64], tag: bytes = b"") -> bytes:
    """Numbers of 7 bits a byte, the lowest first; the high bit says that more follow. Each behind a tag."""
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
"""Element types of which several share a byte."""


def raw_bytes(array: npt.NDArray[np.generic], data_type: int) -> bytes | memoryview:
    """An array as ONNX's raw data: little-endian, rows first, small numbers packed."""
    if data_type in _PACKED:
        return numpy_helper.from_array(array).raw_data
    dtype = array.dtype.newbyteorder("<") if array.dtype.kind in "fciu" else array.dtype
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def typed_elements(tensor: TensorProto, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
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
"""The fields through which a model leads to initializers, and to the locations of external data wherever they are."""

_ALWAYS_CUT = ("main graph", "initializer")
"""Messages that are cut in any model; others only where a data file's name may be inside."""

_COST_OF_A_MESSAGE = 8
"""Cost of cutting a message, beyond that of reading a field."""

_MOST_FIELDS = 1 << 21
"""Fields of a model, but those inside of nodes; each takes two microseconds or three."""

_DEEPEST = 100
"""Messages within messages; protocol buffers read no more."""

_DATA: Mapping[int, tuple[int, ...]] = {
    _RAW_DATA: (BYTES,),
    _FLOAT_DATA: (BYTES, FIXED32),
    _DOUBLE_DATA: (BYTES, FIXED64),
    _INT32_DATA: (BYTES, VARINT),
    _INT64_DATA: (BYTES, VARINT),
    _UINT64_DATA: (BYTES, VARINT),
}
"""The fields of a tensor's data with the wire types that they may have; under another one a field is unknown."""

_LIST: Mapping[int, tuple[int, ...]] = {7: (BYTES, FIXED32)}
"""The same of an attribute that is a list of floats."""


_LARGE = 4096
"""Raw data from this size on is not part of the template: whoever has the model keeps it, once."""


class _Raw(NamedTuple):
    """The raw data of an initializer, which is kept elsewhere: its position, where it began, and its bytes."""

    position: int
    begin: int
    size: int


class _Field(NamedTuple):
    """A field that holds (part of) a tensor's data: what precedes the payload, and the payload.

    Numbers that are stored one by one, each behind a tag, are one field here: with all tags in the payload.
    """

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
    """A message whose parts may change: its tag and length as written, and the parts."""

    header: bytes
    size: int
    parts: list[bytes | _Field | _Message] = field(default_factory=list)


class _Source(NamedTuple):
    """A serialised model while it is cut: a view of it, and the object that finds bytes in it."""

    view: memoryview
    data: bytes | mmap.mmap


Chunk = bytes | memoryview | _Raw

Path = tuple[tuple[int, int], ...]
"""The way from a model to a message inside it: numbers of fields, each with the place among those of its number."""


class Template:
    """The bytes of a model, cut at its initializers.

    Args:
        data: The serialised model; not kept.
        inner: Ways to further tensors, and to attributes that are lists of floats, whose data may change: numbers of
            fields, and places among those of one number.

    Raises:
        CutOffError: The data ends inside a field.
        WireError: The data is not what protocol buffers write.
    """

    def __init__(self, data: bytes | mmap.mmap, inner: Sequence[Path] = ()) -> None:
        self._tensors: list[_Message] = []
        self._inner: dict[Path, _Message] = {}
        self._ways = {way[:length] for way in inner for length in range(1, len(way) + 1)}
        self._ends = set(inner)
        self._locations: list[tuple[_Message, int]] = []  # entries, and the position of the value in each
        self._budget = Budget(_MOST_FIELDS)
        with memoryview(data) as view:
            self._model = self._cut(_Source(view, data), Slice(0, BYTES, 0, 0, len(data)), "model", 0, ())

    def _cut(self, source: _Source, whole: Slice, kind: str, depth: int, way: Path) -> _Message:
        """Split a message: what may change becomes a part of its own, what lies between stays bytes."""
        holds_data = kind == "initializer" or way in self._ends
        types = _LIST if kind == "attribute" else _DATA
        places: dict[int, int] = {}  # how many fields of a number were passed
        self._budget.left -= _COST_OF_A_MESSAGE
        message = _Message(bytes(source.view[whole.start : whole.payload]), whole.end - whole.payload)
        once = False
        if kind == "initializer":
            self._tensors.append(message)
            # Where raw data is given twice, the parsed model has the last of them only.
            inside = read_fields(source.view, whole.payload, whole.end, Budget(self._budget.left))
            once = sum(part.number == _RAW_DATA for part in inside) == 1
        elif holds_data:
            self._inner[way] = message
        begin = whole.payload
        inside = read_fields(source.view, whole.payload, whole.end, self._budget)
        for part, end, count in _runs(inside) if holds_data else ((item, item.end, 1) for item in inside):
            made: _Field | _Message | None
            if holds_data and part.wire_type in types.get(part.number, ()):
                number = _FLOAT_DATA if types is _LIST else part.number
                made = self._cut_data(source, part._replace(number=number), end, count, once)
            else:
                place = places.get(part.number, 0)
                places[part.number] = place + 1
                made = self._cut_inside(source, part, kind, depth, (*way, (part.number, place)))
            if made is None:
                continue
            if begin < part.start:
                message.parts.append(bytes(source.view[begin : part.start]))
            message.parts.append(made)
            begin = end
        if begin < whole.end:
            message.parts.append(bytes(source.view[begin : whole.end]))
        return message

    def _cut_inside(self, source: _Source, part: Slice, kind: str, depth: int, way: Path) -> _Message | None:
        """A field that may hold what changes; ``None`` where it holds none of it."""
        child = _CHILDREN.get(kind, {}).get(part.number)
        if child is None or part.wire_type != BYTES or depth > _DEEPEST:
            return None
        if child == "entry":
            return self._cut_entry(source, part)
        always = child in _ALWAYS_CUT or way in self._ways
        if not always and source.data.find(_LOCATION, part.payload, part.end) < 0:
            return None
        message = self._cut(source, part, child, depth + 1, way)
        changes = always or any(not isinstance(item, bytes) for item in message.parts)
        return message if changes else None

    def _cut_entry(self, source: _Source, whole: Slice) -> _Message | None:
        """An entry of external data, where it is the location."""
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
        """A field of data, or numbers that are stored one by one up to ``end``."""
        if part.wire_type != BYTES:
            tag = bytes(source.view[part.start : part.payload])
            return _Field(part.number, part.wire_type, b"", bytes(source.view[part.start : end]), tag, count)
        header = bytes(source.view[part.start : part.payload])
        size = part.end - part.payload
        if part.number == _RAW_DATA and once and size >= _LARGE:
            # Its tensor is the last one that was begun.
            return _Field(part.number, part.wire_type, header, _Raw(len(self._tensors) - 1, part.payload, size))
        return _Field(part.number, part.wire_type, header, bytes(source.view[part.payload : part.end]))

    def stored_elements(self, index: int) -> tuple[str, int]:
        """Return the storage of an initializer: "raw" and its bytes, or "typed" and the number of elements."""
        fields = _data_fields(self._tensors[index])
        raw = [item for item in fields if item.number == _RAW_DATA]
        if raw:
            return "raw", raw[-1].size
        return "typed", sum(_element_count(item) for item in fields)

    def holds(self, way: Path) -> bool:
        """Return whether a path leads to a tensor with data that can be replaced."""
        return way in self._inner and bool(_data_fields(self._inner[way]))

    def locations(self) -> set[str]:
        """The data files that tensors of the model lie in, wherever in it these are."""
        return {_location(message, position) for message, position in self._locations}

    def large(self) -> dict[int, slice]:
        """Return the byte ranges of large initializers' raw data in the serialized model, by initializer index."""
        found = {}
        for message in self._tensors:
            for _, raw in _large_fields(message):
                found[raw.position] = slice(raw.begin, raw.begin + raw.size)
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
        raw_data: Callable[[int], bytes | memoryview],
        locations: Mapping[str, str] | None = None,
        inner: Mapping[Path, tuple[TensorProto, npt.NDArray[np.generic]]] | None = None,
    ) -> Iterator[bytes | memoryview]:
        """The model's bytes with new data.

        Args:
            tensors: The initializers, in order; their types and shapes are read.
            arrays: New values by position; of the tensors' types and shapes.
            raw_data: The raw data of a large initializer that is not among these, by its position: as long as it was.
            locations: New names of data files by those that the model has.
            inner: Tensors and their new values by the ways to them, or to the attributes that hold their numbers.
        """
        replaced: _Payloads = {
            id(self._tensors[index]): _replace(self._tensors[index], tensors[index], array)
            for index, array in arrays.items()
        }
        for way, (tensor, array) in (inner or {}).items():
            replaced[id(self._inner[way])] = _replace(self._inner[way], tensor, array)
        for message, position in self._locations:
            new = (locations or {}).get(_location(message, position))
            if new is not None:
                replaced.setdefault(id(message), {})[position] = new.encode()
        _, chunks = _render(self._model, replaced)
        for chunk in chunks:
            yield raw_data(chunk.position) if isinstance(chunk, _Raw) else chunk


def _runs(parts: Iterable[Slice]) -> Iterator[tuple[Slice, int, int]]:
    """Fields, where each ends, and 1; for numbers that are stored one by one the first, their end and their number."""
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
    """A tag as it was, with another length."""
    _, end = read_varint(memoryview(header), 0, len(header))
    return header[:end] + varints(np.array([length], np.uint64))


def _location(entry: _Message, position: int) -> str:
    value = entry.parts[position]
    assert isinstance(value, _Field)
    assert isinstance(value.payload, bytes)
    return value.payload.decode(errors="surrogateescape")


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
    """The numbers in a field: as many as are packed, or stored one by one."""
    if item.wire_type != BYTES:
        return item.numbers
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
