"""Adapters in a working copy: saving them, and merging them into the weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter, Array, Entry, concatenated
from onnxtrain.adapters.architectures import Architecture
from onnxtrain.adapters.files import SUFFIX, is_adapter_path, write_adapter
from onnxtrain.adapters.fitting import gains, name_of
from onnxtrain.adapters.full_tensors import for_peft
from onnxtrain.adapters.layers import Layer, LayerPart, Part, find_layers
from onnxtrain.adapters.manifest import describe_base
from onnxtrain.adapters.merging import check_mergeable, merged_weights
from onnxtrain.adapters.packing import in_checkpoint
from onnxtrain.errors import ModelError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.large_data import MadeArrays


@dataclass(frozen=True)
class Slot:
    """One adapter in a graph: its layer, or a part of a packed layer."""

    layer: Layer
    part: Part | None
    scale: float
    alias: str
    magnitude: bool
    start: Entry | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The name of the layer or part."""
        return name_of(self.layer, self.part)

    @property
    def a(self) -> str:
        """The name of A."""
        return f"{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        """The name of B."""
        return f"{self.name}.lora_B.weight"

    @property
    def m(self) -> str:
        """The name of the magnitudes."""
        return f"{self.name}.lora_magnitude_vector"

    @property
    def layer_part(self) -> LayerPart:
        """The layer and the part."""
        return self.layer, self.part

    @property
    def names(self) -> list[str]:
        """Names of all its tensors."""
        return [self.a, self.b, *([self.m] if self.magnitude else [])]

    def entry(self, values: Mapping[str, np.ndarray]) -> Entry:
        """Return the adapter with its current values; what is subtracted becomes further columns of A and rows of B."""
        m = np.array(values[self.m]) if self.magnitude else None
        a, b = np.array(values[self.a]), np.array(values[self.b])
        entry = Entry(a, b, self.scale, m, embedding=self.layer.is_embedding, alias=self.alias)
        return entry if self.start is None else concatenated([(entry, 1.0), (self.start, -1.0)], self.scale)


@dataclass(frozen=True)
class Attached:
    """The adapters of a working copy."""

    slots: tuple[Slot, ...]
    settings: Adapter
    resumed: tuple[str, ...] = ()
    lr_ratio: float = 1.0

    @property
    def initial(self) -> dict[str, np.ndarray]:
        """Values of the file's initializers that differ from the file."""
        return dict(self.settings.tensors)

    @property
    def weights(self) -> Sequence[str]:
        """Names of the weights that have adapters."""
        return [str(slot.layer.weight.name) for slot in self.slots]

    @property
    def parameters(self) -> Sequence[str]:
        """The names of A, B and magnitudes."""
        return [name for slot in self.slots for name in slot.names]

    @property
    def rate_scales(self) -> Mapping[str, float]:
        """Multipliers of the learning rate by name; embeddings have none."""
        slots = [slot for slot in self.slots if not slot.layer.is_embedding and self.lr_ratio != 1]
        return {name: float(self.lr_ratio) for slot in slots for name in slot.names if name != slot.a}

    def adapter(self, values: Mapping[str, np.ndarray], file: ModelFile | None = None) -> Adapter:
        """Return the adapters with their current values."""
        entries = {slot.name: slot.entry(values) for slot in self.slots}
        base = None if file is None else describe_base(file, [slot.layer for slot in self.slots])
        full = {name: array for name, array in values.items() if name not in self.parameters}
        return replace(self.settings, entries=entries, base=base, tensors={**self.initial, **full})

    def writes(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path names an adapter: an ``.onnx_adapter`` file or a folder."""
        return is_adapter_path(Path(path))

    def check_writes(self, path: str | os.PathLike[str], file: ModelFile, trained: Iterable[str]) -> None:
        """Raise ModelError for a PEFT folder that cannot hold the tensors that are trained in full."""
        names = {*self.initial, *trained}.difference(self.parameters)
        if Path(path).suffix != SUFFIX:
            model = infer_shapes(file.training_model())
            adapter = replace(self.settings, tensors={name: file.value(name) for name in names})
            checkpoint = adapter.checkpoint.completed(file.folder, None)
            architecture = Architecture.of(model.graph.initializers, file.folder, checkpoint)
            for_peft(adapter, model.graph, find_layers(model), architecture, str(path))

    def hints(self, file: ModelFile, trained: Iterable[str]) -> list[str]:
        """Say what a PEFT folder cannot hold, for a model of onnxruntime-genai's builder."""
        checkpoint = self.settings.checkpoint.completed(file.folder, None)
        architecture = Architecture.of(file.names(), file.folder, checkpoint)
        full = {*self.initial, *trained}.difference(self.parameters)
        if not architecture.built or (architecture.known and not full):
            return []
        try:
            self.check_writes("a PEFT folder", file, trained)
        except ModelError as error:
            return [str(error)]
        return []

    def write(
        self,
        path: str | os.PathLike[str],
        file: ModelFile,
        values: Mapping[str, np.ndarray],
        base_model: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write an ``.onnx_adapter`` file, in the element types of the model's layers, or a PEFT folder."""
        adapter = self.adapter(values, file)
        adapter = replace(adapter, checkpoint=adapter.checkpoint.completed(file.folder, base_model))
        model = infer_shapes(file.training_model())
        layers = find_layers(model)
        in_file = {layer.name: layer.y.dtype for layer in layers}
        dtypes = {slot.name: in_file.get(slot.layer.name) or ir.DataType.FLOAT for slot in self.slots}
        multiples = gains([slot.layer_part for slot in self.slots], adapter)
        architecture = Architecture.of(model.graph.initializers, file.folder, adapter.checkpoint)
        if Path(path).suffix != SUFFIX:
            adapter = in_checkpoint(adapter, layers, architecture)

        def in_modules() -> Mapping[str, Array]:
            return for_peft(adapter, model.graph, layers, architecture, str(path))

        write_adapter(Path(path), adapter, dtypes, multiples, in_modules)

    def check_mergeable(self) -> None:
        """Raise OptionError for an adapter that cannot be merged into its weight."""
        for slot in self.slots:
            check_mergeable(slot.layer, requantize=False)

    def merged(self, file: ModelFile, values: Mapping[str, np.ndarray]) -> MadeArrays:
        """Return the weights with the adapters merged into them."""
        entries = self.adapter({name: values[name] for name in self.parameters}).entries
        return merged_weights([(slot.layer, slot.part, entries[slot.name]) for slot in self.slots])
