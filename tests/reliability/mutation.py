"""Mutations of models: of any field of any message, of the meaning of fields in ONNX, and of bytes."""

from __future__ import annotations

import random

from google.protobuf.message import DecodeError
from onnx import ModelProto

from reliability.mutation_of_fields import any_field
from reliability.mutation_of_meanings import MEANT

NOTHING_TO_CHANGE = (ValueError, IndexError, TypeError, DecodeError)
"""A model has nothing of the kind that a mutation wants, or is too deep already."""


def mutate(model: ModelProto, generator: random.Random) -> bytes:
    """Change a model in place; return its bytes."""
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        mutation = any_field if generator.random() < 0.45 else generator.choice(MEANT)
        for _ in range(5):
            try:
                mutation(model, generator)
                break
            except NOTHING_TO_CHANGE:  # try elsewhere
                mutation = generator.choice(MEANT)
    data = model.SerializeToString()
    return damage(data, generator) if generator.random() < 0.15 else data


def damage(data: bytes, generator: random.Random) -> bytes:
    """Change, remove, add or move bytes."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 5))):
        at = generator.randrange(len(changed) + 1)
        length = generator.choice((1, 1, 2, 4, 8, 64))
        match generator.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << generator.randrange(8)
            case 1 if at < len(changed):
                changed[at] = generator.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = generator.randbytes(length)
            case 4:
                del changed[at:]
            case 5:
                other = generator.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + length]
    return bytes(changed)
