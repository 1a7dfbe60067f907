"""Adapters of layers that the checkpoint has in another form than the ONNX model: packed with others, or renamed.

PEFT leaves out adapters of modules that the checkpoint lacks, in silence. onnxruntime-genai's builder splits the packed
layers of Phi 3, and packs those of Llama.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.adapters.layers import Layer, LayerPart, Part
from onnxtrain.adapters.values import norms
from onnxtrain.model_file.small_files import read_json

_ATTENTION, _GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")

_PACKED: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "phi3": {"self_attn.qkv_proj": ("self_attn", _ATTENTION), "mlp.gate_up_proj": ("mlp", _GATED)},
    "granitemoehybrid": {"shared_mlp.input_linear": ("mlp", _GATED)},
}
"""Packed layers of checkpoints, by the model's type in genai_config.json: the module and the layers in the model."""

_LANGUAGE_MODEL = (re.compile(r"^model\.(?=embed_tokens$|layers\.)"), "model.language_model.")

_RENAMED = {
    "phi": (re.compile(r"self_attn\.o_proj$"), "self_attn.dense"),
    "granitemoehybrid": (re.compile(r"(?<=\.)mlp\.down_proj$"), "shared_mlp.output_linear"),
    "gemma3_vl_text": _LANGUAGE_MODEL,
    "mistral3_text": _LANGUAGE_MODEL,
}
"""The end or the beginning of a layer's name in the model, and in the checkpoint, by the type."""


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


def in_checkpoint(adapter: Adapter, layers: Sequence[Layer], folder: Path | None) -> Adapter:
    """Return an adapter of a model as one of its checkpoint, for PEFT.

    The adapters of packed layers become one: their A side by side, and their B in blocks; adapters with a common A, as
    they are read from PEFT, keep it.

    Args:
        adapter: The adapter.
        layers: The layers of the model.
        folder: The folder of the model.
    """
    kind = _kind(folder)
    entries = dict(adapter.entries)
    for packed in _packed(layers, kind):
        if any(name in entries for name in packed.parts):
            joined = _joined(packed, entries)
            entries = {name: entry for name, entry in entries.items() if name not in packed.parts}
            entries[packed.name] = joined
    renamed = _RENAMED.get(kind)
    if renamed is not None:
        entries = {name: replace(entry, alias=renamed[0].sub(renamed[1], name)) for name, entry in entries.items()}
    return replace(adapter, entries=entries)


def in_model(adapter: Adapter, layers: Sequence[Layer], folder: Path | None) -> Adapter:
    """Return an adapter of a checkpoint as one of the model, whose layers may be the parts of a packed layer."""
    kind = _kind(folder)
    own = {layer.name for layer in layers}
    entries = dict(adapter.entries)
    if kind in _RENAMED:
        pattern, replacement = _RENAMED[kind]
        inner = [name for layer in layers for name in (layer.name, *(part.name for part in layer.parts))]
        names = {pattern.sub(replacement, name): name for name in inner}
        entries = {names.get(name, name): entry for name, entry in entries.items()}
    for packed in _packed(layers, kind):
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


def _kind(folder: Path | None) -> str:
    """Return the model's type by onnxruntime-genai's settings beside it; "" without them."""
    try:
        found = {} if folder is None else read_json(folder / "genai_config.json", finite=False)
    except (OSError, ValueError):
        return ""
    model = found.get("model") if isinstance(found, dict) else None
    kind = model.get("type") if isinstance(model, dict) else None
    return kind if isinstance(kind, str) else ""


def _packed(layers: Sequence[Layer], kind: str) -> list[Packed]:
    """Return the layers that the checkpoint packs."""
    found: dict[str, Packed] = {}
    parts: dict[str, LayerPart] = {}
    for layer in layers:
        own: dict[str, LayerPart] = {part.name: (layer, part) for part in layer.parts}
        parts |= own or {layer.name: (layer, None)}
    for name, (module, lasts) in _PACKED.get(kind, {}).items():
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
