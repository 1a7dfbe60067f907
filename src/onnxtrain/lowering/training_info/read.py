"""Read the states, bindings and entries of a training model.

The functions work on protos (workarounds: dropped training_info).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import onnx

from onnxtrain.errors import TrainingInfoError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.proto import sort_nodes


def joined_model(model: onnx.ModelProto, index: int) -> onnx.ModelProto:
    """Join the main graph and the algorithm of an entry; all initializers become graph inputs."""
    algorithm = model.training_info[index].algorithm
    joined = onnx.ModelProto(
        ir_version=max(8, model.ir_version), opset_import=model.opset_import, functions=model.functions
    )
    joined.graph.name = algorithm.name or model.graph.name or "training"
    initializers = entry_initializers(model, index)
    for graph in (model.graph, algorithm):
        joined.graph.node.extend(graph.node)
        joined.graph.value_info.extend(graph.value_info)
        joined.graph.input.extend(info for info in graph.input if info.name not in initializers)
    joined.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in initializers.values()
    )
    joined.graph.output.extend(algorithm.output)
    names = {info.name for info in algorithm.output}
    joined.graph.output.extend(info for info in model.graph.output if info.name not in names)
    sort_nodes("The training model", joined)
    return joined


def entry_initializers(model: onnx.ModelProto, index: int) -> dict[str, onnx.TensorProto]:
    """Return the initializers of the main graph and of an entry's algorithm, by name."""
    algorithm = model.training_info[index].algorithm
    return {tensor.name: tensor for graph in (model.graph, algorithm) for tensor in graph.initializer}


def state_tensors(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Return the initializers that training changes: those named by binding keys of all entries."""
    found: dict[str, onnx.TensorProto] = {}
    everywhere: dict[str, onnx.TensorProto] = {tensor.name: tensor for tensor in model.graph.initializer}
    for entry in model.training_info:
        everywhere.update((tensor.name, tensor) for tensor in entry.algorithm.initializer)
    for index, entry in enumerate(model.training_info):
        for field in ("initialization_binding", "update_binding"):
            for key in bindings(entry, field):
                if key not in everywhere:
                    raise TrainingInfoError(
                        f"training_info[{index}].{field} has the key {key!r}, which is not an initializer of the main "
                        "graph or of the algorithm; only initializers hold state."
                    )
                found[key] = everywhere[key]
    return found


def bindings(entry: onnx.TrainingInfoProto, field: str) -> Mapping[str, str]:
    """Return a binding field of an entry as a mapping."""
    return {pair.key: pair.value for pair in getattr(entry, field)}


def read_training_model(given: onnx.ModelProto | str | os.PathLike[str]) -> tuple[onnx.ModelProto, str]:
    """Return a training model and the folder of its external data, from a proto or a path."""
    if isinstance(given, onnx.ModelProto):
        return given, ""
    return ModelFile.load(given).whole(), str(Path(given).parent)
