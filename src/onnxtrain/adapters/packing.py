"""Adapters of layers that the checkpoint has in another form than the ONNX model: packed with others, or renamed.

PEFT leaves out adapters of modules that the checkpoint lacks, in silence. onnxruntime-genai's builder splits the packed
layers of Phi 3, and packs those of Llama.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.adapters.architectures import Architecture
from onnxtrain.adapters.layers import Layer, LayerPart, Part
from onnxtrain.adapters.values import norms


@dataclass(frozen=True)
class Packed:
    """A layer of the checkpoint, and the layers of the model, or their parts, that are packed in it, in order."""

    name: str
    parts: dict[str, LayerPart]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name of each part with the first and last of its outputs."""
        start = 0
        for name, (layer, part) in self.parts.items():
            size = layer.outputs if part is None else part.size
            yield name, start, start + size
            start += size


def in_checkpoint(adapter: Adapter, layers: Sequence[Layer], architecture: Architecture) -> Adapter:
    """Return an adapter of a model as one of its checkpoint, for PEFT."""
    entries = dict(adapter.entries)
    for packed in _packed(layers, architecture):
        if any(name in entries for name in packed.parts):
            joined = _joined(packed, entries)
            entries = {name: entry for name, entry in entries.items() if name not in packed.parts}
            entries[packed.name] = joined
    if architecture.renames:
        entries = {name: replace(entry, alias=architecture.in_checkpoint(name)) for name, entry in entries.items()}
    return replace(adapter, entries=entries)


def in_model(adapter: Adapter, layers: Sequence[Layer], architecture: Architecture) -> Adapter:
    """Return an adapter of a checkpoint as one of the model, whose layers may be the parts of a packed layer."""
    own = {layer.name for layer in layers}
    entries = dict(adapter.entries)
    if architecture.renames:
        inner = [name for layer in layers for name in (layer.name, *(part.name for part in layer.parts))]
        names = {architecture.in_checkpoint(name): name for name in inner}
        entries = {names.get(name, name): entry for name, entry in entries.items()}
    for packed in _packed(layers, architecture):
        whole = entries.get(packed.name)
        if whole is None or whole.outputs != max(end for _, _, end in packed.spans()):  # fitting says so
            continue
        blocks = {name: np.any(whole.b[:, start:end] != 0, axis=1) for name, start, end in packed.spans()}
        ones = sum(rows.astype(int) for rows in blocks.values())
        if whole.magnitude is not None and not all(rows.any() for rows in blocks.values()):
            ones = np.zeros(1, int)
        if np.all(ones == 1):  # as they are joined
            del entries[packed.name]
            entries |= {
                name: _part(whole, start, end, blocks[name])
                for name, start, end in packed.spans()
                if blocks[name].any()
            }
        elif packed.name not in own:
            del entries[packed.name]
            entries |= {name: _part(whole, start, end, slice(None)) for name, start, end in packed.spans()}
    return replace(adapter, entries=entries)


def _part(whole: Entry, start: int, end: int, rows: Array | slice) -> Entry:
    """Return the adapter of some outputs, with some rows of B and columns of A."""
    magnitude = None if whole.magnitude is None else whole.magnitude[start:end]
    b = np.ascontiguousarray(whole.b[rows, start:end])
    return Entry(np.ascontiguousarray(whole.a[:, rows]), b, whole.scale, magnitude)


def _packed(layers: Sequence[Layer], architecture: Architecture) -> list[Packed]:
    """Return the layers that the checkpoint packs."""
    found: dict[str, Packed] = {}
    parts: dict[str, LayerPart] = {}
    for layer in layers:
        own: dict[str, LayerPart] = {part.name: (layer, part) for part in layer.parts}
        parts |= own or {layer.name: (layer, None)}
    for name, (module, lasts) in architecture.packed.items():
        first = f".{module}.{lasts[0]}"
        for path in [one.removesuffix(first) for one in parts if one.endswith(first)]:
            names = [f"{path}.{module}.{last}" for last in lasts]
            if all(each in parts for each in names):
                found[f"{path}.{name}"] = Packed(f"{path}.{name}", {each: parts[each] for each in names})
    return list(found.values())


def _joined(packed: Packed, entries: dict[str, Entry]) -> Entry:
    """Return the adapter of a packed layer from those of its parts, some of which may have none."""
    given = {name: entries[name] for name in packed.parts if name in entries}
    first = next(iter(given.values()))
    spans = list(packed.spans())
    shared = len(given) == len(packed.parts) and all(
        np.array_equal(entry.a, first.a) and entry.scale == first.scale for entry in given.values()
    )
    rank = first.rank if shared else sum(entry.rank for entry in given.values())
    b = np.zeros((rank, spans[-1][2]), first.b.dtype)
    row = 0
    for name, start, end in spans:
        if name in given:
            entry = given[name]
            b[row : row + entry.rank, start:end] = entry.b * entry.b.dtype.type(entry.scale / first.scale)
            row += 0 if shared else entry.rank
    a = first.a if shared else np.concatenate([entry.a for entry in given.values()], axis=1)
    magnitude: Array | None = None
    if any(entry.magnitude is not None for entry in given.values()):
        magnitude = np.concatenate([_magnitude(given.get(name), *packed.parts[name]) for name, _, _ in spans])
        magnitude = magnitude.astype(first.b.dtype)
    return Entry(a, b, first.scale, magnitude)


def _magnitude(entry: Entry | None, layer: Layer, part: Part | None) -> Array:
    """Return the magnitudes of a part; without DoRA they are the norms of the columns, with which it computes alike."""
    return norms(layer, entry, part) if entry is None or entry.magnitude is None else entry.magnitude
