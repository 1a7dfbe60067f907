"""Describe a training as JSON: settings, and hashes of model, weights and data."""

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

from onnxtrain.data.hashing import Fingerprint
from onnxtrain.errors import ModelError
from onnxtrain.lowering.training_info.recipe import UpdateRule
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.small_files import RefusedFileError, read_small
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.objective import Objective

JSON = None | bool | int | float | str | list[Any] | dict[str, Any]


def describe_settings(config: TrainingConfig, objective: Objective) -> dict[str, JSON]:
    """Describe the settings of a trainer, without its model."""
    optimizer, loss, kinds = config.optimizer, objective.loss, [form.kind for form in objective.forms]
    sparsified = sorted(objective.sparsified(config.sparsify))
    groups = {name: _describe_rule(rule) for name, rule in objective.rules(config).items()}
    return {
        **({"groups": groups} if groups else {}),
        **({} if config.ema is None else {"ema": describe(config.ema)}),
        "loss": describe(loss) if loss is not None else f"output:{objective.prediction.name}",
        "output": str(objective.prediction.name),
        "targets": kinds if objective.several else next(iter(kinds), None),
        "optimizer": type(optimizer).__name__,
        "attributes": _describe_attributes(optimizer),
        "sparsity": describe(optimizer.sparsity_modifier),
        "sparsify": list(sparsified) if optimizer.promotes_sparsity else None,
        "parameters": {name: list(shape) for name, shape in objective.shapes.items()},
        "batch_norm": config.batch_norm,
        "dropout": config.dropout,
        "clip_value": config.clip_value,
        "clip_norm": config.clip_norm,
        "accumulate": config.accumulate,
        "straight_through": config.straight_through,
        **({} if config.precision.states is None else {"state_dtype": config.precision.states}),
        **({} if config.precision.compute == "float32" else {"compute": config.precision.compute}),
        **({} if config.precision.master_weights else {"master_weights": False}),
        **({"qat": True} if config.qat else {}),
        "seed": config.seed,
    }


def _describe_attributes(optimizer: Optimizer) -> dict[str, JSON]:
    """Describe the attributes of an optimizer's node, with its blocks of weights if it has any."""
    attributes = {name: value for name, value in optimizer.node_attributes().items() if name != "block"}
    return attributes | ({} if optimizer.promoted_block == (1, 1) else {"block": list(optimizer.promoted_block)})


def _describe_rule(rule: UpdateRule) -> dict[str, JSON]:
    """Describe the update rule of a parameter group."""
    return {"learning_rate": rule.rate_scale, **_describe_attributes(rule.optimizer)}


def describe_masks(masks: Mapping[str, np.ndarray]) -> dict[str, JSON]:
    """Hash masks."""
    return {name: zlib.crc32(np.packbits(mask).tobytes()) for name, mask in masks.items()}


def describe_model(file: ModelFile) -> dict[str, JSON]:
    """Hash the graph and the initial values; see :func:`describe_weights` for a file that has changed."""
    return {"model": describe_graph(file), "weights": describe_weights(file)}


def describe_graph(file: ModelFile) -> str:
    """Hash the graph, without the values of its initializers."""
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
    """Hash the initial values except some; return ``None`` if the file has changed since it was read."""
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
    """Describe a setting of any type: dataclasses by their fields, functions by their names, not their code."""
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
"""Bytes of the largest file that is compared by content, the size limit of ONNX files; others are compared by path."""


def _describe_file(path: Path) -> JSON:
    content = Fingerprint()
    try:
        content.add_bytes(read_small(path, _LARGEST_FILE))
    except (OSError, RefusedFileError):
        return str(path)
    return {"file": content.digest()}
