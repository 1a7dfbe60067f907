"""Describe a training as JSON: settings, hashes of model, weights and data; compare two descriptions."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.data.hashing import Fingerprint, describe_graph
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.small_files import RefusedFileError, read_small
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.objective import Objective
from onnxtrain.training.schedules import Schedule, resolve_schedule

JSON = None | bool | int | float | str | list[Any] | dict[str, Any]


def describe_settings(config: TrainingConfig, objective: Objective) -> dict[str, JSON]:
    """Describe the settings of a trainer, without its model."""
    optimizer, loss, kinds = config.optimizer, objective.loss, [form.kind for form in objective.forms]
    sparsified = sorted(objective.sparsified(config.sparsify))
    groups = {
        name: {"learning_rate": rule.rate_scale, **_describe_attributes(rule.optimizer)}
        for name, rule in objective.rules(config).items()
    }
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


def describe_masks(masks: Mapping[str, np.ndarray]) -> dict[str, JSON]:
    """Hash masks."""
    return {name: zlib.crc32(np.packbits(mask).tobytes()) for name, mask in masks.items()}


def describe_model(file: ModelFile) -> dict[str, JSON]:
    """Hash the graph and the initial values; see :func:`describe_weights` for a file that has changed."""
    return {"model": describe_graph(file), "weights": describe_weights(file)}


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


_WATCHING: Final = ("early_stopping", "reduce_on_plateau")

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
"""Settings of a resumed training that may differ from its checkpoint if ``change`` names them."""


def describe_loop(
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
    """Describe the settings of the training loop."""
    of_text = schedule is None or isinstance(schedule, str)
    ends = per_epoch is not None and _differs(schedule, base, (epochs, per_epoch), (epochs + 1, per_epoch))
    return {
        "schedule": "".join((schedule or "constant").split()) if of_text else describe(schedule),  # type: ignore[union-attr]
        "learning_rate": base if of_text else None,
        "epochs": epochs if ends else None,
        "batch_size": batch_size,
        "shuffle": shuffle,
        **({} if augment is None else {"augment": describe(augment)}),
        **{
            setting: [describe(each.settings()) for each in callbacks if getattr(each, "setting", None) == setting]
            or None
            for setting in _WATCHING
        },
    }


def counts_epochs(schedule: str | Schedule | None, base: float, epochs: int, per_epoch: int) -> bool:
    """Return whether the rate of a schedule depends on the number of steps of an epoch."""
    return _differs(schedule, base, (epochs, per_epoch), (epochs, 2 * per_epoch))


def _differs(schedule: str | Schedule | None, base: float, *lengths: tuple[int, int]) -> bool:
    """Return whether a schedule given as text differs between numbers of epochs and of steps in each."""
    if not isinstance(schedule, str):
        return False
    one, other = (
        resolve_schedule(schedule, base, total_steps=epochs * steps, steps_per_epoch=steps) for epochs, steps in lengths
    )
    return one != other


def names_to_change(change: str | Sequence[str]) -> frozenset[str]:
    """Parse the argument ``change``: a list of names, or text with commas."""
    parts = change.split(",") if isinstance(change, str) else [str(part) for part in change]
    names = [part.strip().replace("-", "_") for part in parts]
    names = [{"prediction": "output"}.get(name, name) for name in names if name]
    for name in names:
        if name not in CHANGEABLE:
            raise OptionError(
                f"change has {name!r}, which cannot differ from the checkpoint; it takes {', '.join(CHANGEABLE)}."
            ).about("change", got=name, wanted=CHANGEABLE)
    return frozenset(names)


def differences(found: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """Describe the differences between two records in words, by key; weights unknown on one side count as equal."""
    result = {}
    for key in sorted(found.keys() | here.keys()):
        left, right = found.get(key, _MISSING), here.get(key, _MISSING)
        if left == right or (key == "weights" and None in (left, right)):
            continue
        if key == "columns" and not all(isinstance(side, dict) and side for side in (left, right)):
            continue  # arrays have no column names
        if isinstance(left, dict) and isinstance(right, dict):  # show only the entries that differ
            left, right = _without_common(left, right), _without_common(right, left)
        there, now = _shown(left), _shown(right)
        changed = f"the content of {key} has changed"  # hashes would tell a reader nothing
        result[key] = changed if there == now else f"{key} is {there} there and {now} here"
    return result


_MISSING: Final = object()

_HASH: Final = re.compile(r'"[0-9a-f]{32}"')
"""A hash in JSON."""


def _without_common(record: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if _shown(other.get(key, _MISSING)) != _shown(value)}


def _shown(value: object) -> str:
    if value is _MISSING:
        return "missing"
    text = _HASH.sub('"(content)"', json.dumps(value, sort_keys=True))
    return text if len(text) <= 200 else f"{text[:200]}..."


def how_to_change(names: Collection[str]) -> str:
    """Return the end of an error about differences: the next step for the user."""
    if not set(names) <= set(CHANGEABLE):
        return "resume with the same model, data and settings, or start anew in another folder"
    return f'resume with the same, or accept what differs by its name: change="{",".join(names)}"'
