"""The form of images that a model reads: size and normalization, as its file of names or Hugging Face records them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from onnxtrain.model_file.hub import places_of_settings
from onnxtrain.model_file.small_files import read_json


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


_FILE: Final = "preprocessor_config.json"
"""A file that Hugging Face writes beside a model of images."""

_FOLLOWED: Final = {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb", "do_reduce_labels"}
"""Steps that are followed, or that change nothing of the images that are read."""

_BY_SHORTEST_EDGE: Final = ("Bit", "CLIP", "ChineseCLIP", "ConvNext", "Levit", "MobileNet", "MobileViT", "PoolFormer")
"""Beginnings of the types whose size, where it is one number, is that of the shorter edge."""

_WHOLE_EDGE: Final = 384
"""From this size on, ConvNext's images are resized without a crop."""


_LEAST_SHARE: Final = 0.1
"""Of an image, which a crop keeps; those of models are from 0.85 to 1."""


def read_settings(folder: Path | None, name: str) -> dict[str, Any]:
    """Return the settings in a JSON file of a model's folder; {} without one that can be read."""
    for place in [] if folder is None else places_of_settings(folder):
        with contextlib.suppress(OSError, ValueError):
            found = read_json(place / name, finite=False)
            if isinstance(found, dict):
                return found
    return {}


def read_preprocessor(folder: Path | None) -> tuple[Pixels | None, Resizing | None]:
    """Return the normalization and the size of images that the file says; ``None`` where it leaves them open."""
    config = read_settings(folder, _FILE)
    if not config.keys() & {"image_mean", "image_processor_type", "size", "crop_size"}:
        return None, None
    others = sorted(key for key, value in config.items() if key.startswith("do_") and value and key not in _FOLLOWED)
    if config.get("rescale_offset"):
        others.append("rescale_offset")
    besides = f", except {', '.join(others)}, which is not followed" if others else ""
    return _normalization(config, f"as {_FILE} beside the model says{besides}"), _resizing(config)


def _normalization(config: Mapping[str, Any], reason: str) -> Pixels | None:
    if "do_normalize" not in config:
        return None
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    if not is_number(factor) or factor <= 0:
        return None
    scale = 1 / (255 * factor)  # of the numbers that mean and deviation are in
    record: dict[str, Any] = {"mean": [0.0], "std": [1.0]}
    if config["do_normalize"]:
        record = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    with contextlib.suppress(ValueError):
        found = Pixels.of_record(record)
        mean, std = tuple(each * scale for each in found.mean), tuple(each * scale for each in found.std)
        return Pixels(mean, std, reason)
    return None


def _resizing(config: Mapping[str, Any]) -> Resizing | None:
    edges, crop = None, _sides(config.get("crop_size")) if config.get("do_center_crop") else None
    if config.get("do_resize"):
        kind = config.get("image_processor_type") or config.get("feature_extractor_type") or ""
        edges, crop = _edges(str(kind), config, crop)
        if edges is None:
            return None
    if edges is None and crop is None:
        return None
    number = config.get("resample", 2)
    if not isinstance(number, int) or not 0 <= number < len(RESAMPLING):
        return None
    return Resizing(edges or (), crop, RESAMPLING[number])


def _edges(
    kind: str, config: Mapping[str, Any], crop: tuple[int, int] | None
) -> tuple[tuple[int, ...] | None, tuple[int, int] | None]:
    """Return the edges after resizing, the shorter one alone where the ratio is kept, and the crop."""
    size, share = config.get("size"), config.get("crop_pct")
    if is_edge(size) and kind.startswith(_BY_SHORTEST_EDGE):
        size = {"shortest_edge": size}
    if isinstance(size, dict) and size.keys() == {"shortest_edge"}:
        edge = size["shortest_edge"]
        if not is_edge(edge):
            return None, crop
        if kind.startswith("ConvNext"):
            if edge >= _WHOLE_EDGE:
                return (edge, edge), None
            share, crop = share or 224 / 256, (edge, edge)
        elif kind.startswith("Levit"):
            share = 224 / 256
        if share is not None:
            edge = int(edge / share) if is_number(share) and _LEAST_SHARE <= share <= 1 else None
        return (None if edge is None else (edge,)), crop
    return (None if share else _sides(size)), crop


def _sides(size: object) -> tuple[int, int] | None:
    """Return height and width of a size; ``None`` where it has another form."""
    height, width = (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
    return (height, width) if is_edge(height) and is_edge(width) else None
