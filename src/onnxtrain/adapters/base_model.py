"""The model that adapters belong to: find the layers of an adapter in it, check that it is the one, write adapters.

The checkpoint may have a layer in another form than the ONNX model: packed with others, or under another name. PEFT
leaves out adapters of modules that the checkpoint lacks, in silence. onnxruntime-genai's builder splits the packed
layers of Phi 3, and packs those of Llama.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.adapters.checkpoint import Architecture, Checkpoint, in_checkpoints
from onnxtrain.adapters.files import SUFFIX, read_adapter, write_file
from onnxtrain.adapters.full_tensors import fit_tensors, for_peft
from onnxtrain.adapters.layers import Layer, Target, find_layers, refuse_magnitudes
from onnxtrain.adapters.peft import write_folder
from onnxtrain.adapters.values import norms
from onnxtrain.data.hashing import Fingerprint, describe_graph
from onnxtrain.editing.working_copy.kv_cache import remove_cache_inputs
from onnxtrain.errors import ModelError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.exporters import optimum
from onnxtrain.model_file.file import ModelFile


@dataclass(frozen=True)
class BaseModel:
    """A model's file, its graph with inferred shapes, and the layers that can have adapters."""

    file: ModelFile
    graph: ir.Graph
    layers: Sequence[Layer]

    @classmethod
    def of(cls, file: ModelFile) -> BaseModel:
        """Return the model of a file."""
        model = file.training_model()
        if any(value.name == optimum.BRANCH for value in model.graph.inputs):
            remove_cache_inputs(model)  # layers are in the branch without a cache
        model = infer_shapes(model)
        return cls(file, model.graph, find_layers(model))

    def read(self, path: str | os.PathLike[str]) -> tuple[Adapter, list[Target]]:
        """Read an adapter of this model; see :meth:`fit`."""
        return self.fit(read_adapter(path), str(path))

    def fit(self, adapter: Adapter, label: str) -> tuple[Adapter, list[Target]]:
        """Return the adapter with its entries under the names of the model's layers, and the target of each entry.

        An entry matches the layer whose adapter has this name, the only layer that is also called so, or the only one
        whose path ends with the entry's name or the reverse: exporters wrap models into others.
        """
        architecture = self.architecture(adapter.checkpoint)
        adapter = fit_tensors(adapter, self.graph, self.layers, architecture, label)
        adapter = _in_model(adapter, self.layers, architecture)
        targets = [*map(Target, self.layers), *(Target(layer, part) for layer in self.layers for part in layer.parts)]
        own_names = {target.name: target for target in targets}
        by_name: dict[str, list[Target]] = {}
        for target in targets:
            for name in target.names if target.part is None else (target.name,):
                by_name.setdefault(name, []).append(target)
        found: dict[str, tuple[Entry, Target]] = {}
        for name, entry in adapter.entries.items():
            match = own_names.get(name) or _match(by_name, name)
            if match is None:
                raise self._no_layer(name, label)
            _check_sizes(label, name, entry, match)
            own = match.name
            if own in found:
                raise ModelError(f"{label!r} has two adapters for {own!r}; remove one of them.")
            found[own] = replace(entry, alias=entry.alias or (name if name != own else "")), match
        order = {id(layer.node): index for index, layer in enumerate(self.layers)}
        ordered = sorted(found.values(), key=lambda item: (order[id(item[1].layer.node)], item[1].start))
        entries = {target.name: _with_magnitude(entry, target) for entry, target in ordered}
        targets = [target for _, target in ordered]
        self._check(adapter.base, targets, label)
        return replace(adapter, entries=entries), targets

    def write(
        self,
        path: Path,
        adapter: Adapter,
        targets: Sequence[Target],
        base_model: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write an adapter of some targets: an ``.onnx_adapter`` file, in their layers' types, or a PEFT folder."""
        checkpoint = adapter.checkpoint.completed(self.file.folder, base_model)
        base = {"graph": describe_graph(self.file), "weights": self._weights(targets)}
        adapter = replace(adapter, checkpoint=checkpoint, base=base)
        if path.suffix != SUFFIX:
            adapter = _in_checkpoint(adapter, self.layers, self.architecture(checkpoint))
            write_folder(path, adapter, self.in_modules(adapter, str(path), checkpoint))
            return
        types = {layer.name: layer.y.dtype or ir.DataType.FLOAT for layer in self.layers}
        dtypes, gains = dict[str, ir.DataType](), dict[str, Array]()
        for (name, entry), target in zip(adapter.entries.items(), targets, strict=True):
            dtypes[name] = types.get(target.layer.name, ir.DataType.FLOAT)
            if entry.magnitude is not None:
                gains[name] = (entry.magnitude / norms(target, entry)).astype(entry.magnitude.dtype)
        write_file(path, adapter, dtypes, gains)

    def in_modules(self, adapter: Adapter, label: str, checkpoint: Checkpoint) -> dict[str, Array]:
        """Return the tensors that were trained in full, as a PEFT folder of a checkpoint holds them."""
        return for_peft(adapter, self.graph, self.layers, self.architecture(checkpoint), label)

    def architecture(self, checkpoint: Checkpoint) -> Architecture:
        """Return the names and values of its checkpoint."""
        return Architecture.of(self.graph.initializers, self.file.folder, checkpoint)

    def _no_layer(self, name: str, label: str) -> ModelError:
        if any(f".lora_{matrix}." in str(value.name) for value in self.graph.inputs for matrix in "AB"):
            return ModelError(
                f"{label!r} has an adapter for {name!r}, but the model has slots for adapters already; give the "
                "model without slots."
            ).about(label, got=name)
        shown = ", ".join(layer.name for layer in self.layers[:4]) + (", ..." if len(self.layers) > 4 else "")
        return ModelError(
            f"{label!r} has an adapter for {name!r}, but the model has no such layer; its layers: {shown or 'none'}."
        ).about(label, got=name, wanted=[layer.name for layer in self.layers])

    def _weights(self, targets: Iterable[Target]) -> dict[str, str]:
        """Hash the weights of some targets."""
        found = {}
        for name in dict.fromkeys(str(target.layer.weight.name) for target in targets):
            content = Fingerprint()
            content.add_large_array(self.file.value(name))
            found[name] = content.digest()
        return found

    def _check(self, base: Mapping[str, Any] | None, targets: Iterable[Target], label: str) -> None:
        """Check that an adapter was made for this model; an adapter without a manifest passes."""
        if base is None:
            return
        advice = "give the model that it was trained on"
        if base.get("graph") != describe_graph(self.file):
            raise ModelError(f"{label!r} was made for another model: this one has another graph; {advice}.").about(
                label
            )
        known = base.get("weights")
        for name, digest in self._weights(targets).items():
            if not isinstance(known, Mapping) or known.get(name) != digest:
                raise ModelError(f"{label!r} was made for another model: the weight {name!r} differs; {advice}.").about(
                    name
                )


def _match(by_name: Mapping[str, list[Target]], name: str) -> Target | None:
    for wanted in (name, in_checkpoints(name)):
        exact = by_name.get(wanted, [])
        if len(exact) == 1:
            return exact[0]
        ends = [one for other in by_name if _ends_alike(other, wanted) for one in by_name[other]]
        if len({(id(target.layer.node), target.part) for target in ends}) == 1:
            return ends[0]
    return None


def _ends_alike(one: str, other: str) -> bool:
    """Return whether one path ends with the other."""
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def _check_sizes(label: str, name: str, entry: Entry, target: Target) -> None:
    wanted = (target.layer.inputs, target.outputs, *target.layer.window)
    if entry.sizes != wanted:
        got, needed = (" x ".join(map(str, sizes)) for sizes in (entry.sizes, wanted))
        raise ModelError(
            f"{label!r} has an adapter of {got} for {name!r}, whose weight is {needed}; it was made for another model."
        ).about(name, got=entry.sizes, wanted=wanted)


def _with_magnitude(entry: Entry, target: Target) -> Entry:
    """Convert DoRA's gains, if it has some, to magnitudes: m = gain ‖W + scale A B‖."""
    if entry.gain is None or entry.magnitude is not None:
        return entry
    refuse_magnitudes([target.layer])
    return replace(entry, magnitude=(entry.gain * norms(target, entry)).astype(entry.gain.dtype), gain=None)


def chosen_layers(layers: Sequence[Layer], targets: Sequence[Target], label: str) -> list[Layer]:
    """Return the layers of some targets in the model's order, packed ones with these parts only."""
    found = []
    for layer in layers:
        parts = [target.part for target in targets if target.layer is layer]
        if not parts:
            continue
        if None in parts and len(parts) > 1:
            raise ModelError(f"{label!r} has an adapter for {layer.name!r} and another for a part of it.")
        found.append(replace(layer, parts=tuple(part for part in layer.parts if part in parts)))
    return found


@dataclass(frozen=True)
class _Packed:
    """A layer of the checkpoint, and the targets of the model that are packed in it, in order."""

    name: str
    targets: dict[str, Target]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name of each target with the first and last of its outputs."""
        start = 0
        for name, target in self.targets.items():
            yield name, start, start + target.outputs
            start += target.outputs


def _in_checkpoint(adapter: Adapter, layers: Sequence[Layer], architecture: Architecture) -> Adapter:
    """Return an adapter of a model as one of its checkpoint, for PEFT."""
    entries = dict(adapter.entries)
    for packed in packed_layers(layers, architecture):
        if any(name in entries for name in packed.targets):
            joined = _joined(packed, entries)
            entries = {name: entry for name, entry in entries.items() if name not in packed.targets}
            entries[packed.name] = joined
    if architecture.renames:
        entries = {name: replace(entry, alias=architecture.in_checkpoint(name)) for name, entry in entries.items()}
    return replace(adapter, entries=entries)


def _in_model(adapter: Adapter, layers: Sequence[Layer], architecture: Architecture) -> Adapter:
    """Return an adapter of a checkpoint as one of the model, whose layers may be the parts of a packed layer."""
    own = {layer.name for layer in layers}
    entries = dict(adapter.entries)
    if architecture.renames:
        inner = [name for layer in layers for name in (layer.name, *(part.name for part in layer.parts))]
        names = {architecture.in_checkpoint(name): name for name in inner}
        entries = {names.get(name, name): entry for name, entry in entries.items()}
    for packed in packed_layers(layers, architecture):
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


def packed_layers(layers: Sequence[Layer], architecture: Architecture) -> list[_Packed]:
    """Return the layers that the checkpoint packs."""
    found: dict[str, _Packed] = {}
    targets = {target.name: target for layer in layers for target in layer.targets}
    for name, (module, lasts) in architecture.packed.items():
        first = f".{module}.{lasts[0]}"
        for path in [one.removesuffix(first) for one in targets if one.endswith(first)]:
            names = [f"{path}.{module}.{last}" for last in lasts]
            if all(each in targets for each in names):
                found[f"{path}.{name}"] = _Packed(f"{path}.{name}", {each: targets[each] for each in names})
    return list(found.values())


def _joined(packed: _Packed, entries: Mapping[str, Entry]) -> Entry:
    """Return the adapter of a packed layer from those of its parts, some of which may have none."""
    given = {name: entries[name] for name in packed.targets if name in entries}
    first = next(iter(given.values()))
    spans = list(packed.spans())
    shared = len(given) == len(packed.targets) and all(
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
        magnitude = np.concatenate([_magnitude(given.get(name), packed.targets[name]) for name, _, _ in spans])
        magnitude = magnitude.astype(first.b.dtype)
    return Entry(a, b, first.scale, magnitude)


def _magnitude(entry: Entry | None, target: Target) -> Array:
    """Return the magnitudes of a part; without DoRA they are the norms of the columns, with which it computes alike."""
    return norms(target, entry) if entry is None or entry.magnitude is None else entry.magnitude
