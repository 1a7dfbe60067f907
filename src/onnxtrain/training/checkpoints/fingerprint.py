"""Fingerprint of a training in its checkpoints: the settings that a resumed training must share."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from onnxtrain.errors import OptionError
from onnxtrain.training.callbacks.base import settings_of
from onnxtrain.training.description import JSON, describe
from onnxtrain.training.schedules import Schedule, resolve_schedule

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
    return {
        "schedule": "".join((schedule or "constant").split()) if of_text else describe(schedule),  # type: ignore[union-attr]
        "learning_rate": base if of_text else None,
        "epochs": epochs if _ends_with_the_epochs(schedule, base, epochs, per_epoch) else None,
        "batch_size": batch_size,
        "shuffle": shuffle,
        **({} if augment is None else {"augment": describe(augment)}),
        **{
            setting: [describe(settings) for settings in settings_of(callbacks, setting)] or None
            for setting in _WATCHING
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


def counts_epochs(schedule: str | Schedule | None, base: float, epochs: int, per_epoch: int) -> bool:
    """Return whether the rate of a schedule depends on the number of steps of an epoch."""
    if not isinstance(schedule, str):
        return False
    short, long = (
        resolve_schedule(schedule, base, total_steps=size * epochs, steps_per_epoch=size)
        for size in (per_epoch, 2 * per_epoch)
    )
    return short != long


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
    """Describe the differences between two records in words, by key.

    Weights that are unknown on one side, since their file changed after it was read, count as equal.
    """
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
