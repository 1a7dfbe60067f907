"""``preprocessor_config.json``, which Hugging Face writes beside a model of images: their size and normalization."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from onnxtrain.data.image_form import RESAMPLING, Pixels, Resizing, is_edge, is_number
from onnxtrain.model_file.hub import places_of_settings
from onnxtrain.model_file.small_files import read_json

_FILE: Final = "preprocessor_config.json"

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
