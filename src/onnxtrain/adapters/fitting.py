"""Matching the entries of an adapter to the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.adapters.architectures import Architecture, in_checkpoints
from onnxtrain.adapters.full_tensors import fit_tensors
from onnxtrain.adapters.layers import Layer, LayerPart, Part, refuse_magnitudes
from onnxtrain.adapters.packing import in_model
from onnxtrain.adapters.values import norms
from onnxtrain.errors import ModelError


def fit(
    adapter: Adapter, graph: ir.Graph, layers: Sequence[Layer], label: str, folder: Path | None
) -> tuple[Adapter, list[LayerPart]]:
    """Return the adapter with its entries renamed to the model's layer names, and the layer of each entry.

    An entry matches the layer whose adapter has this name, the only layer that is also called so, or the only one whose
    path ends with the entry's name or the reverse: exporters wrap models into others.

    Args:
        adapter: The adapter as read.
        graph: The model's main graph.
        layers: The layers of the model.
        label: Name of the adapter in errors.
        folder: The folder of the model.

    Raises:
        ModelError: An entry matches no layer, or a layer of another size; a tensor that was trained in full matches no
            initializer, or one of another shape.
    """
    architecture = Architecture.of(graph.initializers, folder, adapter.checkpoint)
    adapter = in_model(fit_tensors(adapter, graph, layers, architecture, label), layers, architecture)
    own_names: dict[str, LayerPart] = {layer.name: (layer, None) for layer in layers}
    own_names |= {part.name: (layer, part) for layer in layers for part in layer.parts}
    by_name: dict[str, list[LayerPart]] = {}
    for layer in layers:
        for name in layer.names:
            by_name.setdefault(name, []).append((layer, None))
        for part in layer.parts:
            by_name.setdefault(part.name, []).append((layer, part))
    found: dict[str, tuple[Entry, LayerPart]] = {}
    for name, entry in adapter.entries.items():
        layer_part = own_names.get(name) or _match(by_name, name)
        if layer_part is None:
            if any(f".lora_{matrix}." in str(value.name) for value in graph.inputs for matrix in "AB"):
                raise ModelError(
                    f"{label!r} has an adapter for {name!r}, but the model has slots for adapters already; give the "
                    "model without slots."
                ).about(label, got=name)
            shown = ", ".join(layer.name for layer in layers[:4]) + (", ..." if len(layers) > 4 else "")
            raise ModelError(
                f"{label!r} has an adapter for {name!r}, but the model has no such layer; its layers: "
                f"{shown or 'none'}."
            ).about(label, got=name, wanted=[*layers])
        _check_sizes(label, name, entry, *layer_part)
        own = name_of(*layer_part)
        if own in found:
            raise ModelError(f"{label!r} has two adapters for {own!r}; remove one of them.")
        found[own] = replace(entry, alias=entry.alias or (name if name != own else "")), layer_part
    order = {id(layer.node): index for index, layer in enumerate(layers)}
    names = sorted(found, key=lambda own: (order[id(found[own][1][0].node)], _start(found[own][1])))
    ordered = [found[own][1] for own in names]
    return _with_magnitudes(replace(adapter, entries={own: found[own][0] for own in names}), ordered), ordered


def _start(layer_part: LayerPart) -> int:
    part = layer_part[1]
    return 0 if part is None else part.start


def name_of(layer: Layer, part: Part | None) -> str:
    """Return the adapter name of a layer or of one of its parts."""
    return layer.name if part is None else part.name


def _match(by_name: dict[str, list[LayerPart]], name: str) -> LayerPart | None:
    for wanted in (name, in_checkpoints(name)):
        exact = by_name.get(wanted, [])
        if len(exact) == 1:
            return exact[0]
        ends = [one for other in by_name if _ends_alike(other, wanted) for one in by_name[other]]
        different = {(id(layer.node), part) for layer, part in ends}
        if len(different) == 1:
            return ends[0]
    return None


def _ends_alike(one: str, other: str) -> bool:
    """Return whether one path ends with the other."""
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def _check_sizes(label: str, name: str, entry: Entry, layer: Layer, part: Part | None) -> None:
    outputs = layer.outputs if part is None else part.size
    wanted = (layer.inputs, outputs, *layer.window)
    got = (entry.inputs, entry.outputs, *(entry.a.shape[2:] if entry.is_convolution else ()))
    if got != wanted:
        raise ModelError(
            f"{label!r} has an adapter of {_shown(got)} for {name!r}, whose weight is {_shown(wanted)}; it was made "
            "for another model."
        ).about(name, got=got, wanted=wanted)


def _shown(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def chosen_layers(layers: Sequence[Layer], layer_parts: Sequence[LayerPart], label: str) -> list[Layer]:
    """Return the layers of ``layer_parts`` in the model's order, packed ones with these parts only."""
    found = []
    for layer in layers:
        parts = [part for other, part in layer_parts if other is layer]
        if not parts:
            continue
        if None in parts and len(parts) > 1:
            raise ModelError(f"{label!r} has an adapter for {layer.name!r} and another for a part of it.")
        found.append(replace(layer, parts=tuple(part for part in layer.parts if part in parts)))
    return found


def _with_magnitudes(adapter: Adapter, layer_parts: Sequence[LayerPart]) -> Adapter:
    """Convert gains to magnitudes: m = gain ‖W + scale A B‖."""
    entries = dict(adapter.entries)
    for (name, entry), (layer, part) in zip(adapter.entries.items(), layer_parts, strict=True):
        if entry.gain is not None and entry.magnitude is None:
            refuse_magnitudes([layer])
            magnitude = (entry.gain * norms(layer, entry, part)).astype(entry.gain.dtype)
            entries[name] = replace(entry, magnitude=magnitude, gain=None)
    return replace(adapter, entries=entries)


def gains(layer_parts: Sequence[LayerPart], adapter: Adapter) -> dict[str, Array]:
    """Return DoRA's gain of each column of the adapted weight, by layer: m / ‖W + scale A B‖."""
    found = {}
    for (name, entry), (layer, part) in zip(adapter.entries.items(), layer_parts, strict=True):
        if entry.magnitude is not None:
            found[name] = (entry.magnitude / norms(layer, entry, part)).astype(entry.magnitude.dtype)
    return found
