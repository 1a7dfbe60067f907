"""Models with adapters in their graph: rewrite the file's graph, and add adapters beside its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Array, Entry
from onnxtrain.adapters.emit import Emitter, Pair
from onnxtrain.adapters.files import GAIN, A, B
from onnxtrain.adapters.fitting import name_of
from onnxtrain.adapters.layers import Layer, Part, find_layers
from onnxtrain.adapters.values import norms
from onnxtrain.errors import OptionError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.operands import Value
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.external import set_folder
from onnxtrain.model_file.file import ModelFile


def rewritten(file: ModelFile, edit: Callable[[ir.Model, list[Layer]], None]) -> ModelFile:
    """Return a file with a changed graph; values that the file did not declare stay undeclared."""
    file = file.dense()
    working = ir.from_proto(file.whole())
    graph = working.graph
    set_folder(working, str(file.folder or ""))
    declared = {value for value in _computed(graph) if value.shape is not None}
    infer_shapes(working)
    edit(working, find_layers(working))
    for value in _computed(graph):
        if value not in declared and not value.is_graph_output():
            value.type = value.shape = None
    return file.changed(ir.to_proto(working))


def _computed(graph: ir.Graph) -> list[ir.Value]:
    return [value for node in graph for value in node.outputs]


def with_adapters(file: ModelFile, entries: Mapping[str, Entry], names: Collection[str]) -> ModelFile:
    """Return a file in which some layers have their adapters beside them, as initializers and nodes."""

    def edit(working: ir.Model, layers: list[Layer]) -> None:
        emitter = Emitter(working.graph, working.graph.opset_imports[""])
        for layer in layers:
            if layer.name not in names:
                continue
            op = emitter.builder(layer)
            parts: Sequence[Part | None] = layer.parts or (None,)
            own = [(part, entries[name_of(layer, part)]) for part in parts if name_of(layer, part) in entries]
            emitter.add(op, layer, [_pair(op, layer, part, entry) for part, entry in own])

    return rewritten(file, edit)


def _pair(op: Builder, layer: Layer, part: Part | None, entry: Entry) -> Pair:
    name, dtype = name_of(layer, part), layer.y.dtype or ir.DataType.FLOAT
    gain = None
    if entry.magnitude is not None:
        gain = _initializer(op, name + GAIN, entry.magnitude / norms(layer, entry, part), dtype)
    a, b = _initializer(op, name + A, entry.a, dtype), _initializer(op, name + B, entry.b, dtype)
    return Pair(a, b, entry.scale, part, gain)


def _initializer(op: Builder, name: str, array: Array, dtype: ir.DataType) -> Value:
    graph = op.graph
    if name in graph.initializers or any(value.name == name for value in graph.inputs):
        raise OptionError(f"The model has a tensor {name!r} already, so that it has adapters; give the model without.")
    tensor = ir.tensor(np.ascontiguousarray(array.astype(dtype.numpy())), dtype=dtype, name=name)
    shape = ir.Shape(array.shape)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return op.wrap(value)
