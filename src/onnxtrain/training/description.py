"""What makes a training the one that it is, in words, numbers and hashes: its settings, model, weights and data."""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto

from onnxtrain.config import TrainingConfig
from onnxtrain.data import Dataset
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.small_files import RefusedFileError, read_small
from onnxtrain.training.objective import Objective
from onnxtrain.training_info.recipe import UpdateRule

JSON = None | bool | int | float | str | list[Any] | dict[str, Any]


def describe_settings(config: TrainingConfig, objective: Objective) -> dict[str, JSON]:
    """What the trainer was given, apart from the model."""
    optimizer, loss, form = config.optimizer, objective.loss, objective.form
    sparsified = sorted(objective.sparsified(config.sparsify))
    groups = {name: _describe_rule(rule) for name, rule in objective.rules(config).items()}
    return {
        **({"groups": groups} if groups else {}),
        **({} if config.ema is None else {"ema": describe(config.ema)}),
        "loss": describe(loss) if loss is not None else f"output:{objective.prediction.name}",
        "output": str(objective.prediction.name),
        "targets": [each.kind for each in form] if isinstance(form, tuple) else None if form is None else form.kind,
        "optimizer": type(optimizer).__name__,
        "attributes": dict(optimizer.node_attributes()),
        "sparsity": describe(optimizer.sparsity_modifier),
        "sparsify": list(sparsified) if optimizer.promotes_sparsity else None,
        "parameters": {name: list(shape) for name, shape in objective.shapes.items()},
        "batch_norm": config.batch_norm,
        "dropout": config.dropout,
        "clip_value": config.clip_value,
        "clip_norm": config.clip_norm,
        "accumulate": config.accumulate,
        "straight_through": config.straight_through,
        **({} if config.state_dtype is None else {"state_dtype": config.state_dtype}),
        **({} if config.compute == "float32" else {"compute": config.compute}),
        **({} if config.master_weights else {"master_weights": False}),
        **({"qat": True} if config.qat else {}),
        "seed": config.seed,
    }


def _describe_rule(rule: UpdateRule) -> dict[str, JSON]:
    """What of a parameter's update a group says."""
    return {"learning_rate": rule.rate_scale, **rule.optimizer.node_attributes()}


def describe_masks(masks: Mapping[str, np.ndarray]) -> dict[str, JSON]:
    """Hashes of masks."""
    return {name: zlib.crc32(np.packbits(mask).tobytes()) for name, mask in masks.items()}


def describe_data(dataset: Dataset | None) -> JSON:
    """How many examples, and a hash of them; an iterable's cannot be known before they are read."""
    return None if dataset is None else {"examples": dataset.size, "content": dataset.fingerprint()}


def describe_model(file: ModelFile) -> dict[str, JSON]:
    """Hashes of the graph and of the initial values, which are not known if the file has changed since it was read."""
    return {"model": describe_graph(file), "weights": describe_weights(file)}


def describe_graph(file: ModelFile) -> str:
    """A hash of the graph, without the values of its initializers."""
    graph = GraphProto()
    graph.CopyFrom(file.proto.graph)
    for tensor in graph.initializer:
        name, dims, kind = tensor.name, list(tensor.dims), tensor.data_type
        tensor.Clear()
        tensor.name, tensor.data_type = name, kind
        tensor.dims.extend(dims)
    del graph.sparse_initializer[:]
    structure = Fingerprint()
    for part in (graph, *file.proto.functions, *file.proto.opset_import):
        structure.add_bytes(part.SerializeToString(deterministic=True))
    return structure.digest()


def describe_weights(file: ModelFile, *, without: Collection[str] = ()) -> JSON:
    """A hash of the initial values, apart from some; ``None`` if the file has changed since it was read."""
    weights = Fingerprint()
    try:
        for name in file.names():
            if name not in without:
                weights.add_text(name)
                weights.add_large_array(file.value(name))
        for sparse in file.proto.graph.sparse_initializer:
            weights.add_bytes(sparse.SerializeToString(deterministic=True))
    except ModelError:
        return None
    return weights.digest()


def describe(value: object) -> JSON:
    """A setting of any kind: data classes by their fields, functions by their names (what they do is not looked at)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return describe(value.item())
    if isinstance(value, np.ndarray):
        content = Fingerprint()
        content.add_large_array(value)
        return {"array": content.digest()}
    if isinstance(value, os.PathLike):
        return _describe_file(Path(value))
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, functools.partial):
        return {"function": describe(value.func), "given": [describe(value.args), describe(value.keywords)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": _name(type(value)), **fields}
    return _name(value if hasattr(value, "__qualname__") else type(value))


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}"


_LARGEST_FILE = (1 << 31) - 1
"""Bytes of a file that is compared by its content: the limit of ONNX files."""


def _describe_file(path: Path) -> JSON:
    content = Fingerprint()
    try:
        content.add_bytes(read_small(path, _LARGEST_FILE))
    except (OSError, RefusedFileError):
        return str(path)
    return {"file": content.digest()}
