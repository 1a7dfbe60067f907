"""The form of images that a model reads: their size and their normalization, as JSON data records them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt


class Pixels(NamedTuple):
    """Normalization of images: (pixel / 255 - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    reason: str = ""
    orient: bool = True

    def record(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        return {"mean": list(self.mean), "std": list(self.std), **({} if self.orient else {"orient": False})}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Pixels:
        """Read the settings from JSON data."""
        mean, std = _by_channel(record.get("mean")), _by_channel(record.get("std"))
        orient = record.get("orient", True)
        if min(std) <= 0 or not isinstance(orient, bool):
            raise ValueError("the data has another form")
        return cls(mean, std, orient=orient)

    def is_same(self, other: Pixels) -> bool:
        """Return whether two normalizations compute the same."""
        return bool(np.array_equal(self._numbers(), other._numbers()))

    def _numbers(self) -> npt.NDArray[Any]:
        return np.array([np.broadcast_to(self.mean, 3), np.broadcast_to(self.std, 3)])


BYTES: Final = Pixels((0.0,), (1 / 255,), "since the model scales images of 0 to 255 itself")
"""Images as pixels of 0 to 255."""


RESAMPLING: Final = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's filters, by number."""


class Resizing(NamedTuple):
    """Size of images: resized, then cut in the middle."""

    edges: tuple[int, ...]
    crop: tuple[int, int] | None = None
    resample: str = "bilinear"

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of all results; None where they differ."""
        if self.crop is not None or len(self.edges) != 2:
            return self.crop
        return self.edges[0], self.edges[1]

    def record(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        return {
            "resize": list(self.edges),
            **({} if self.crop is None else {"crop": list(self.crop)}),
            "resample": self.resample,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Resizing:
        """Read settings from JSON data."""
        edges, crop, resample = record["resize"], record.get("crop"), record.get("resample", "bilinear")
        lists = [edges] if crop is None else [edges, crop]
        right = all(isinstance(sides, list) and all(map(is_edge, sides)) for sides in lists)
        if not right or len(edges) > 2 or (crop is not None and len(crop) != 2) or resample not in RESAMPLING:
            raise ValueError("the data has another form")
        return cls(tuple(edges), None if crop is None else (crop[0], crop[1]), resample)


def _by_channel(values: object) -> tuple[float, ...]:
    """Return one number, or one per channel."""
    if not isinstance(values, list) or len(values) not in (1, 3) or not all(map(is_number, values)):
        raise ValueError("the data has another form")
    return tuple(map(float, values))


def is_number(value: object) -> bool:
    """Return whether a value of JSON data is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_edge(value: object) -> TypeGuard[int]:
    """Return whether a value of JSON data is an edge of an image, in pixels."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LONGEST_EDGE


_LONGEST_EDGE: Final = 2**13
