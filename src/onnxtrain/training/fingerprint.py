"""What makes a training the one that it is: all that changes its numbers, as a checkpoint keeps and compares it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import GraphProto

from onnxtrain.errors import ModelError, OptionError
from onnxtrain.model.file import ModelFile
from onnxtrain.training.callback import settings_of
from onnxtrain.training.data import Dataset
from onnxtrain.training.data.hashing import Fingerprint
from onnxtrain.training.objective import Objective
from onnxtrain.training.schedules import Schedule, resolve_schedule
from onnxtrain.training.specification import Specification
from onnxtrain.training_info.recipe import UpdateRule

JSON = None | bool | int | float | str | list[Any] | dict[str, Any]

CHANGEABLE: Final = (
    "accumulate",
    "attributes",
    "augment",
    "batch_norm",
    "batch_size",
    "clip_norm",
    "clip_value",
    "data",
    "dropout",
    "early_stopping",
    "epochs",
    "groups",
    "learning_rate",
    "loss",
    "masks",
    "model",
    "optimizer",
    "output",
    "reduce_on_plateau",
    "schedule",
    "seed",
    "shuffle",
    "sparsify",
    "sparsity",
    "straight_through",
    "targets",
    "validation",
    "weights",
)
"""What a resumed training may have otherwise than its checkpoint, where that is said by name."""


def describe_settings(specification: Specification, objective: Objective) -> dict[str, JSON]:
    """What the trainer was given, apart from the model."""
    optimizer, loss, form = specification.optimizer, objective.loss, objective.form
    sparsified = sorted(objective.sparsified(specification.sparsify))
    groups = {name: _describe_rule(rule) for name, rule in objective.rules(specification).items()}
    return {
        **({"groups": groups} if groups else {}),
        **({} if specification.ema is None else {"ema": describe(specification.ema)}),
        "loss": describe(loss) if loss is not None else f"output:{objective.prediction.name}",
        "output": str(objective.prediction.name),
        "targets": [each.kind for each in form] if isinstance(form, tuple) else None if form is None else form.kind,
        "optimizer": type(optimizer).__name__,
        "attributes": dict(optimizer.node_attributes()),
        "sparsity": describe(optimizer.sparsity_modifier),
        "sparsify": list(sparsified) if optimizer.promotes_sparsity else None,
        "parameters": {name: list(shape) for name, shape in objective.shapes.items()},
        "batch_norm": specification.batch_norm,
        "dropout": specification.dropout,
        "clip_value": specification.clip_value,
        "clip_norm": specification.clip_norm,
        "accumulate": specification.accumulate,
        "straight_through": specification.straight_through,
        **({"qat": True} if specification.qat else {}),
        "seed": specification.seed,
    }


def _describe_rule(rule: UpdateRule) -> dict[str, JSON]:
    """What of a parameter's update a group says."""
    return {"learning_rate": rule.rate_scale, **rule.optimizer.node_attributes()}


def describe_masks(masks: Mapping[str, np.ndarray]) -> dict[str, JSON]:
    """Hashes of masks."""
    return {name: zlib.crc32(np.packbits(mask).tobytes()) for name, mask in masks.items()}


def describe_course(
    base: float,
    *,
    schedule: str | Schedule | None,
    epochs: int,
    per_epoch: int | None,
    batch_size: int,
    shuffle: bool,
    callbacks: Sequence[Any],
    augment: object = None,
) -> dict[str, JSON]:
    """How the training goes.

    A learning rate is part of it where the schedule starts from it, the number of epochs where the schedule ends with
    it.

    Args:
        base: The learning rate that it starts from.
        schedule: The rate by step.
        epochs: How many are planned.
        per_epoch: How many steps one has, where that is known.
        batch_size: Examples per step.
        shuffle: Whether the order is new in every epoch.
        callbacks: Those of which some change the numbers of the training.
        augment: What changes the inputs, where something does.
    """
    of_text = schedule is None or isinstance(schedule, str)
    return {
        "schedule": "".join((schedule or "constant").split()) if of_text else describe(schedule),  # type: ignore[union-attr]
        "learning_rate": base if of_text else None,
        "epochs": epochs if _ends_with_the_epochs(schedule, base, epochs, per_epoch) else None,
        "batch_size": batch_size,
        "shuffle": shuffle,
        **({} if augment is None else {"augment": describe(augment)}),
        **{
            setting: [describe(settings) for settings in settings_of(callbacks, setting)] or None
            for setting in ("early_stopping", "reduce_on_plateau")
        },
    }


def _ends_with_the_epochs(schedule: str | Schedule | None, base: float, epochs: int, per_epoch: int | None) -> bool:
    if not isinstance(schedule, str) or per_epoch is None:
        return False
    shorter, longer = (
        resolve_schedule(schedule, base, total_steps=per_epoch * count, steps_per_epoch=per_epoch)
        for count in (epochs, epochs + 1)
    )
    return shorter != longer


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


def _describe_file(path: Path) -> JSON:
    content = Fingerprint()
    try:
        content.add_bytes(path.read_bytes())
    except OSError:
        return str(path)
    return {"file": content.digest()}


def names_to_change(change: str | Sequence[str]) -> frozenset[str]:
    """The names in ``change``: a list, or a text with commas.

    Raises:
        OptionError: There is no such thing, or it cannot change.

    >>> sorted(names_to_change("epochs, learning-rate"))
    ['epochs', 'learning_rate']
    """
    parts = change.split(",") if isinstance(change, str) else [str(part) for part in change]
    names = [part.strip().replace("-", "_") for part in parts]
    names = [{"prediction": "output"}.get(name, name) for name in names if name]
    for name in names:
        if name not in CHANGEABLE:
            raise OptionError(
                f"change has {name!r}, which a resumed training cannot have otherwise; it takes "
                f"{', '.join(CHANGEABLE)}."
            )
    return frozenset(names)


def differences(found: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """What differs between two records, by name, in words.

    Weights that are not known on one side, since their file was changed after it was read, do not differ.
    """
    result = {}
    for key in sorted(found.keys() | here.keys()):
        left, right = found.get(key, _MISSING), here.get(key, _MISSING)
        if left == right or (key == "weights" and None in (left, right)):
            continue
        if isinstance(left, dict) and isinstance(right, dict):  # what they have in common says nothing
            left, right = _without_common(left, right), _without_common(right, left)
        result[key] = f"{key} is {_shown(left)} there and {_shown(right)} here"
    return result


_MISSING: Final = object()


def _without_common(record: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if other.get(key, _MISSING) != value}


def _shown(value: object) -> str:
    if value is _MISSING:
        return "missing"
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:200]}..."


def how_to_change(names: Collection[str]) -> str:
    """How an error ends that names differences: what is to be done about them."""
    if not set(names) <= set(CHANGEABLE):
        return "resume with the same model, data and settings, or start anew in another folder"
    return f'resume with the same, or accept what differs by its name: change="{",".join(names)}"'
