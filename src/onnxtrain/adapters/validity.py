"""Validation of an adapter that was read: types of settings, shapes of matrices, finite values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.errors import ModelError

_LARGEST_RANK = 1 << 24
_LARGEST_SCALE = 1e30
"""Far below the largest float32, 3e38: adapters are added in float32."""


def rank_in(value: Any, name: str, label: str) -> int:
    """Check a rank in a file."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_RANK:
        raise ModelError(f"{label!r} has {name!r} = {_shown(value)}; a rank is an integer of at least 1.")
    return value


def number_in(value: Any, name: str, label: str, *, least: float | None = None, below: float | None = None) -> float:
    """Check a number in a file: finite, and within the bounds ``least`` and ``below`` if given."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = number and abs(value) <= _LARGEST_SCALE and math.isfinite(value)  # false for NaN
    if not fits or (least is not None and value < least) or (below is not None and value >= below):
        bounds = "" if least is None else f" of at least {least:g}"
        bounds += "" if below is None else f" and below {below:g}"
        raise ModelError(f"{label!r} has {name!r} = {_shown(value)}; it needs a finite number{bounds}.")
    return float(value)


def flag_in(value: Any, name: str, label: str) -> bool:
    """Check a Boolean in a file; ``None`` is false."""
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{label!r} has {name!r} = {_shown(value)}; it needs true or false.")
    return bool(value)


def text_in(value: Any, name: str, label: str) -> str:
    """Check a text in a file; ``None`` is empty."""
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{label!r} has {name!r} = {_shown(value)}; it needs a text.")
    return value or ""


def mapping_in(value: Any, name: str, label: str) -> Mapping[str, Any]:
    """Check a mapping in a file; ``None`` is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"{label!r} has {name!r} = {_shown(value)}; it needs an object.")
    return value or {}


def checked(adapter: Adapter, label: str) -> Adapter:
    """Validate an adapter and return it."""
    for name, entry in adapter.entries.items():
        _check_shapes(name, entry, label)
        number_in(entry.scale, f"the scale of {name}", label)
        if entry.scale == 0:
            raise ModelError(f"{label!r} has the scale 0 for {name!r}, so its adapter has no effect; train it again.")
        parts = {"A": entry.a, "B": entry.b, "magnitude": entry.magnitude, "gain": entry.gain}
        for part, array in parts.items():
            if array is not None:
                _check_values(array, f"{part} of {name!r}", label)
    for name, array in (*adapter.tensors.items(), *adapter.of_modules.items()):
        _check_values(array, repr(name), label)
    return adapter


def _check_shapes(name: str, entry: Entry, label: str) -> None:
    a, b = entry.a, entry.b
    if a.ndim < 2 or a.ndim != b.ndim or (entry.is_convolution and a.ndim > 5):
        fits = False
    else:
        rank = b.shape[1] if entry.is_convolution else b.shape[0]
        fits = a.size > 0 and b.size > 0 and entry.rank == rank
        fits = fits and (not entry.is_convolution or all(size == 1 for size in b.shape[2:]))
    vectors = [array for array in (entry.magnitude, entry.gain) if array is not None]
    fits = fits and all(array.shape == (entry.outputs,) for array in vectors)
    if not fits:
        shapes = " and ".join(str(tuple(array.shape)) for array in (a, b, *vectors))
        raise ModelError(
            f"{label!r} has matrices of the shapes {shapes} for {name!r}, which are no pair of one rank; convert or "
            "train it again."
        )


def _check_values(array: Array, what: str, label: str) -> None:
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ModelError(f"{label!r} has {what} in the type {array.dtype}; it needs floating point.")
    if not np.isfinite(array.astype(np.float64) if array.dtype.name == "bfloat16" else array).all():
        raise ModelError(f"{label!r} has values in {what} that are not finite; the training went astray.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
