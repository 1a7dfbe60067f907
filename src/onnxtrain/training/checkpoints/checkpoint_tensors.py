"""Arrays of any name and numeric type in a safetensors file, which takes not every name and not every type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import CheckpointError

# What safetensors reads back into NumPy. Everything else is stored as its bits, its type in the JSON.
_NATIVE_TYPES: Final = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
# safetensors keeps one name for itself; names that could be taken for it get one more underscore in the file.
_RESERVED_NAME: Final = re.compile(r"_*__metadata__")


def encode(tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays that safetensors can store, by names that it accepts, and the types that it cannot store."""
    encoded: dict[str, Array] = {}
    types: dict[str, str] = {}
    for name, tensor in tensors.items():
        array = np.asarray(tensor)
        if array.dtype.hasobject or array.dtype.kind in "USTMm" or array.dtype.fields is not None:
            raise CheckpointError(f"tensor '{name}' has type {array.dtype}; a checkpoint holds numbers only.")
        # safetensors writes the memory as it lies, so the order must be C and the byte order little-endian.
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if array.dtype.name not in _NATIVE_TYPES:
            types[name] = array.dtype.name
            array = array.reshape(*array.shape, 1).view(np.uint8)
        encoded[f"_{name}" if _RESERVED_NAME.fullmatch(name) else name] = array
    return encoded, types


def decode(encoded: Mapping[str, Array], types: Mapping[str, str]) -> dict[str, Array]:
    """The arrays by their own names and of their own types; the opposite of `encode`."""
    tensors: dict[str, Array] = {}
    for stored_name, array in encoded.items():
        name = stored_name[1:] if _RESERVED_NAME.fullmatch(stored_name) else stored_name
        if name in types:
            array = array.view(_type_by_name(types[name])).reshape(array.shape[:-1])
        tensors[name] = array
    return tensors


def _type_by_name(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # onnx brings it along; only bfloat16 and its like need it

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
