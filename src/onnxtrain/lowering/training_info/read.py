"""Read the states, bindings and entries of a training model, and check it: ONNX's own checker ignores them.

The functions work on protos (workarounds: dropped training_info).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import onnx

from onnxtrain.errors import TrainingInfoError
from onnxtrain.graph.bounded_inference import infer_within_bounds
from onnxtrain.model_file.checks import first_line
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.proto import hide_runtime_operators, skeleton, sort_nodes


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


Type = tuple[int, tuple[int | str | None, ...] | None]


def check_training_model(model: onnx.ModelProto) -> None:
    """Check every entry of ``training_info``."""
    if not model.training_info:
        raise TrainingInfoError(
            "The model has no training_info; write one with onnxtrain.training_model(model, loss=..., optimizer=...)."
        )
    states = state_tensors(model)
    for index, entry in enumerate(model.training_info):
        label = f"training_info[{index}]"
        _check_unique_keys(label, entry)
        _check_unique_names(label, model, entry)
        _check_initialization(label, entry, states)
        _check_updates(label, model, index, states)


def _check_unique_keys(label: str, entry: onnx.TrainingInfoProto) -> None:
    for field in ("initialization_binding", "update_binding"):
        seen: set[str] = set()
        for pair in getattr(entry, field):
            if pair.key in seen:
                raise TrainingInfoError(f"{label}.{field} has the key {pair.key!r} twice; a state takes one value.")
            seen.add(pair.key)


def _check_unique_names(label: str, model: onnx.ModelProto, entry: onnx.TrainingInfoProto) -> None:
    own, seen = _defined(entry.algorithm), set(_defined(model.graph))
    for name in own:
        if name in seen:
            raise TrainingInfoError(
                f"{label}.algorithm defines {name!r}, which the main graph or the algorithm defines already; "
                "names are unique across both."
            )
        seen.add(name)
    algorithm_names = set(own)
    for node in model.graph.node:
        for name in node.input:
            if name in algorithm_names:
                raise TrainingInfoError(
                    f"The main graph's {node.op_type} node {node.name!r} reads {name!r} of {label}.algorithm; "
                    "an algorithm may read the main graph, never the reverse."
                )


def _defined(graph: onnx.GraphProto) -> list[str]:
    """Return the names that a graph defines; an initializer that is also an input counts once."""
    names = dict.fromkeys([tensor.name for tensor in graph.initializer])
    names.update(dict.fromkeys(info.name for info in graph.input))
    return [*names, *(name for node in graph.node for name in node.output if name)]


def _check_initialization(label: str, entry: onnx.TrainingInfoProto, states: dict[str, onnx.TensorProto]) -> None:
    if not entry.HasField("initialization"):
        if entry.initialization_binding:
            raise TrainingInfoError(f"{label} has an initialization_binding but no initialization graph.")
        return
    graph = entry.initialization
    if graph.input:
        names = ", ".join(repr(info.name) for info in graph.input)
        raise TrainingInfoError(f"{label}.initialization has the inputs {names}; it must have none.")
    outputs = {info.name: info for info in graph.output}
    for key, value in bindings(entry, "initialization_binding").items():
        if value not in outputs:
            raise TrainingInfoError(
                f"{label}.initialization_binding gives {key!r} the value {value!r}, which is not an output of the "
                "initialization graph."
            )
        _check_agreement(f"{label}.initialization_binding", key, states[key], value, _declared(outputs[value]))


def _check_updates(label: str, model: onnx.ModelProto, index: int, states: dict[str, onnx.TensorProto]) -> None:
    joined = joined_model(model, index)
    hide_runtime_operators(joined)
    try:
        onnx.checker.check_model(skeleton(joined))  # the checker would search external data in the working folder
        inferred = infer_within_bounds(joined)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = first_line(error)
        raise TrainingInfoError(f"{label}: main graph and algorithm together are not valid ONNX: {reason}") from error
    outputs = {info.name: info for info in inferred.graph.output}
    for key, value in bindings(model.training_info[index], "update_binding").items():
        if value not in outputs:
            raise TrainingInfoError(
                f"{label}.update_binding gives {key!r} the value {value!r}, which is not an output of the algorithm "
                "or of the main graph."
            )
        _check_agreement(f"{label}.update_binding", key, states[key], value, _declared(outputs[value]))


def _declared(info: onnx.ValueInfoProto) -> Type:
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    sizes = (
        d.dim_value if d.HasField("dim_value") else d.dim_param if d.HasField("dim_param") else None
        for d in tensor.shape.dim
    )
    return tensor.elem_type, tuple(sizes)


def _check_agreement(field: str, key: str, state: onnx.TensorProto, value: str, declared: Type) -> None:
    kind, shape = declared
    wanted = tuple(state.dims)
    if kind and kind != state.data_type:
        raise TrainingInfoError(
            f"{field} gives {key!r} of type {_name(state.data_type)} the value {value!r} of type {_name(kind)}; "
            "they must agree."
        )
    if shape is not None and (
        len(shape) != len(wanted) or any(isinstance(a, int) and a != b for a, b in zip(shape, wanted, strict=True))
    ):
        raise TrainingInfoError(
            f"{field} gives {key!r} of shape {list(wanted)} the value {value!r} of shape {list(shape)}; "
            "they must agree."
        )


def _name(kind: int) -> str:
    return str(onnx.TensorProto.DataType.Name(kind)).lower()
