"""Read IDX files, the format of MNIST and related data sets."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np

# The third byte of the file names the element type; all numbers are big-endian.
_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path) -> np.ndarray:
    """Read the array of an IDX file, gzipped or not, in native byte order.

    Raises:
        ValueError: The file is not an IDX file, or its size does not match its header.
    """
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES or len(data) < 4 + 4 * data[3]:
        raise ValueError(f"{path} is not an IDX file: it begins with {data[:4].hex()}.")
    dtype, rank = np.dtype(_TYPES[data[2]]), data[3]
    shape = tuple(int(size) for size in np.frombuffer(data, ">i4", rank, offset=4))
    expected, found = math.prod(shape) * dtype.itemsize, len(data) - 4 - 4 * rank
    if found != expected:
        raise ValueError(f"{path} has {found} bytes of data, but its shape {shape} needs {expected}.")
    return np.frombuffer(data, dtype, offset=4 + 4 * rank).reshape(shape).astype(dtype.newbyteorder("="))


def read_digits(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 1, 28, 28] as float32 in [0, 1] and labels [N] as int64; ``part`` is "train" or "t10k"."""
    images = read_idx(_find(folder, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"))
    return images[:, None].astype(np.float32) / 255, labels.astype(np.int64)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"{folder} has neither {name}.gz nor {name}.")
