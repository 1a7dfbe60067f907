"""In-memory adapter: low-rank matrices by layer name, and the checks of one that was read from a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxtrain.adapters.checkpoint import Checkpoint
from onnxtrain.errors import ModelError

Array = npt.NDArray[Any]

A, B, GAIN = ".lora_A.weight", ".lora_B.weight", ".lora_gain"
"""Suffixes of an adapter's tensor names."""


@dataclass(frozen=True, eq=False)
class Entry:
    """The adapter of one layer: x W becomes x (W + scale A B)."""

    a: Array
    b: Array
    scale: float = 1.0
    magnitude: Array | None = None
    gain: Array | None = None
    embedding: bool = False
    alias: str = ""

    @property
    def is_convolution(self) -> bool:
        """Return whether the layer is a convolution."""
        return self.a.ndim > 2

    @property
    def rank(self) -> int:
        """The number of columns of A and rows of B."""
        return len(self.a) if self.is_convolution else int(self.a.shape[1])

    @property
    def inputs(self) -> int:
        """Number of input features."""
        return int(self.a.shape[1]) if self.is_convolution else len(self.a)

    @property
    def outputs(self) -> int:
        """Number of output features."""
        return len(self.b) if self.is_convolution else int(self.b.shape[1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the weight: inputs, outputs, the kernel of a convolution."""
        return (self.inputs, self.outputs, *(self.a.shape[2:] if self.is_convolution else ()))

    @property
    def size(self) -> int:
        """Number of elements of all its arrays."""
        return sum(array.size for array in (self.a, self.b, self.magnitude, self.gain) if array is not None)

    def delta(self) -> Array:
        """Compute scale A B in float32 or wider: [inputs, outputs]; [outputs, inputs, *window] for a convolution."""
        a, b = (array.astype(np.promote_types(array.dtype, np.float32)) for array in (self.a, self.b))
        if not self.is_convolution:
            return np.asarray((a @ b) * a.dtype.type(self.scale))
        rank = self.rank
        product = b.reshape(-1, rank) @ a.reshape(rank, -1)
        return np.asarray(product.reshape(self.outputs, *a.shape[1:]) * a.dtype.type(self.scale))


def concatenated(terms: Sequence[tuple[Entry, float]], scale: float) -> Entry:
    """Return the adapter that adds the sum of factor x scale A B of several adapters of one layer: ranks add up."""
    first = terms[0][0]
    a = np.concatenate([entry.a for entry, _ in terms], axis=0 if first.is_convolution else 1)
    scaled = [entry.b * entry.b.dtype.type(factor * entry.scale / scale) for entry, factor in terms]
    return replace(first, a=a, b=np.concatenate(scaled, axis=1 if first.is_convolution else 0), scale=scale)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapters of a model's layers."""

    entries: Mapping[str, Entry]
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    base: Mapping[str, Any] | None = None
    folded: bool = False
    tensors: Mapping[str, Array] = field(default_factory=dict)
    of_modules: Mapping[str, Array] = field(default_factory=dict)
    trained: tuple[str, ...] | None = None
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @property
    def dora(self) -> bool:
        """Return whether any layer has a DoRA magnitude vector."""
        return any(entry.magnitude is not None or entry.gain is not None for entry in self.entries.values())

    def patterns(self) -> dict[str, dict[str, float]]:
        """Return the ranks and alphas of the layers that differ from the usual ones: PEFT's rank and alpha patterns."""
        root = math.sqrt if self.rslora else float
        ranks, alphas = dict[str, float](), dict[str, float]()
        for name, entry in self.entries.items():
            alpha = entry.scale * root(entry.rank)
            if entry.rank != self.rank:
                ranks[entry.alias or name] = entry.rank
            if abs(alpha - self.alpha) > 1e-6 * abs(self.alpha):
                alphas[entry.alias or name] = integral(alpha)
        return {"rank_pattern": ranks, "alpha_pattern": alphas}


def integral(number: float) -> float:
    """Convert a number that is an integer up to rounding to int."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-6 * max(1.0, abs(number)) else number


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


def check_float(array: Array, what: str, label: str) -> None:
    """Check that an array of a file is of floating point."""
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise ModelError(f"{label!r} has {what} in the type {array.dtype}; it needs floating point.")


def _check_values(array: Array, what: str, label: str) -> None:
    check_float(array, what, label)
    if not np.isfinite(array.astype(np.float64) if array.dtype.name == "bfloat16" else array).all():
        raise ModelError(f"{label!r} has values in {what} that are not finite; the training went astray.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
