"""The encoding of protocol buffers: fields with a number and a wire type, numbers of 7 bits a byte.

See https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
