"""Files in MNIST's format with digits that are easy to tell apart."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np


def write_idx(path: Path, array: np.ndarray) -> None:
    """An array of bytes or of float32, compressed where the name says so."""
    code = {"uint8": 8, "float32": 13}[array.dtype.name]
    header = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    data = header + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_digits(folder: Path, train: int, test: int) -> None:
    """Return images whose bright region tells the label."""
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = random.integers(0, 10, count).astype(np.uint8)
        images = random.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 8, 4:24] = 255
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels)
