"""Safetensors files as data: arrays by name, memory-mapped."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array, check_possible
from onnxtrain.errors import DataError
from onnxtrain.model_file.small_files import check_regular_file, parse_json

SAFETENSORS_SUFFIX: Final = ".safetensors"

_TYPES: Final[dict[str, Any]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def _type(name: str) -> np.dtype[Any]:
    if name == "BF16":
        import ml_dtypes  # onnx brings it along

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    dtype: np.dtype[Any] = np.dtype(_TYPES[name])
    return dtype


def map_safetensors(path: Path, *, may_be_empty: bool = False) -> dict[str, Array]:
    """The arrays of a safetensors file, by name: read-only, and read when a batch needs them.

    Raises:
        DataError: it is none, or has a type that NumPy lacks.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_regular_file(path)
        with safe_open(path, "np"):  # which checks lengths, offsets and overlaps
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
        raise DataError(f"'{path}' cannot be read as a safetensors file: {reason}.") from error
    header.pop("__metadata__", None)
    if not header and not may_be_empty:
        raise DataError(f"'{path}' holds no arrays.")
    found = {}
    for name, entry in header.items():
        stored = entry["dtype"]
        if stored not in (*_TYPES, "BF16"):
            raise DataError(f"'{name}' in '{path}' has the type {stored}, which no data can have; convert it.")
        dtype, shape = _type(stored), tuple(entry["shape"])
        check_possible(shape, dtype, f"'{name}' in '{path}'")
        offset = 8 + length + entry["data_offsets"][0]
        found[name] = np.memmap(path, dtype, "r", offset, shape) if 0 not in shape else np.empty(shape, dtype)
    return found
