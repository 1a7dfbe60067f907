"""An adapter and the layers of a model: which belongs where, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.adapters.layers import Layer, Part
from onnxtrain.adapters.names import in_checkpoints
from onnxtrain.adapters.values import norms
from onnxtrain.errors import ModelError

Place = tuple[Layer, Part | None]
"""A layer, or a part of a packed one."""


def find_places(layers: Sequence[Layer], adapter: Adapter, label: str) -> dict[str, Place]:
    """Where each entry of an adapter belongs: by the names of layers, or by the one path that ends so.

    Args:
        layers: The layers of the model.
        adapter: The adapter.
        label: What errors call it.

    Raises:
        ModelError: The model has no such layer, or one of another size.
    """
    places: dict[str, list[Place]] = {}
    for layer in layers:
        for name in layer.names:
            places.setdefault(name, []).append((layer, None))
        for part in layer.parts:
            places.setdefault(part.name, []).append((layer, part))
    found = {}
    for name, entry in adapter.entries.items():
        place = _place(places, name)
        if place is None:
            shown = ", ".join(layer.name for layer in layers[:4]) + (", ..." if len(layers) > 4 else "")
            raise ModelError(
                f"{label!r} has an adapter for {name!r}, which the model has no layer for; it has {shown or 'none'}."
            )
        _check_sizes(label, name, entry, *place)
        found[name] = place
    return found


def _place(places: dict[str, list[Place]], name: str) -> Place | None:
    for wanted in (name, in_checkpoints(name)):
        exact = places.get(wanted, [])
        if len(exact) == 1:
            return exact[0]
        ends = [place for other in places if _ends_alike(other, wanted) for place in places[other]]
        different = {(id(layer.node), part) for layer, part in ends}
        if len(different) == 1:
            return ends[0]
    return None


def _ends_alike(one: str, other: str) -> bool:
    """Whether one path is the end of the other: exporters wrap models into others."""
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def _check_sizes(label: str, name: str, entry: Entry, layer: Layer, part: Part | None) -> None:
    outputs = layer.outputs if part is None else part.size
    wanted = (layer.inputs, outputs, *layer.window)
    got = (entry.inputs, entry.outputs, *(entry.a.shape[2:] if entry.is_convolution else ()))
    if got != wanted:
        raise ModelError(
            f"{label!r} has an adapter of {_shown(got)} for {name!r}, whose weight is {_shown(wanted)}; it was made "
            "for another model."
        )


def _shown(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def chosen_layers(layers: Sequence[Layer], places: dict[str, Place]) -> list[tuple[Layer, dict[str, str]]]:
    """The layers of some places, packed ones with the parts that are named, and the entries of each by part.

    Raises:
        ModelError: A packed layer has an adapter of its own beside one of a part.
    """
    found = []
    for layer in layers:
        names = {"" if part is None else part.name: name for name, (other, part) in places.items() if other is layer}
        if "" in names and len(names) > 1:
            raise ModelError(f"{layer.name!r} has an adapter of its own beside those of its parts.")
        if names:
            parts = tuple(part for part in layer.parts if part.name in names)
            found.append((replace(layer, parts=parts), names))
    return found


def with_magnitudes(adapter: Adapter, places: dict[str, Place]) -> Adapter:
    """The same with magnitudes where a file has gains: m = gain ‖W + scale A B‖."""
    entries = dict(adapter.entries)
    for name, entry in entries.items():
        if entry.gain is not None and entry.magnitude is None:
            layer, part = places[name]
            magnitude = (entry.gain * norms(layer, entry, part)).astype(entry.gain.dtype)
            entries[name] = replace(entry, magnitude=magnitude, gain=None)
    return replace(adapter, entries=entries)


def gains(places: Sequence[Place], adapter: Adapter) -> dict[str, Array]:
    """Of DoRA, what each column of the adapted weight is multiplied with, by layer: m / ‖W + scale A B‖."""
    found = {}
    for (name, entry), (layer, part) in zip(adapter.entries.items(), places, strict=True):
        if entry.magnitude is not None:
            found[name] = (entry.magnitude / norms(layer, entry, part)).astype(entry.magnitude.dtype)
    return found
