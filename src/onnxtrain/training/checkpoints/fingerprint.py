"""What a checkpoint keeps of its training, and whether the one that goes on is the same."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from onnxtrain.callbacks.base import settings_of
from onnxtrain.callbacks.watching import RENAMED
from onnxtrain.errors import OptionError
from onnxtrain.renamed import todays_metric
from onnxtrain.schedules import Schedule, resolve_schedule
from onnxtrain.training.description import JSON, describe

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
"""What a resumed training may have otherwise than its checkpoint, where that is said by name."""


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
        if key in _WATCHING:
            left = _under_todays_names(left)
        if left == right or (key == "weights" and None in (left, right)):
            continue
        if key == "columns" and not all(isinstance(side, dict) and side for side in (left, right)):
            continue  # an array has no names, and an earlier version wrote none
        if isinstance(left, dict) and isinstance(right, dict):  # what they have in common says nothing
            left, right = _without_common(left, right), _without_common(right, left)
        result[key] = f"{key} is {_shown(left)} there and {_shown(right)} here"
    return result


_MISSING: Final = object()


def _under_todays_names(settings: Any) -> Any:
    """Settings of callbacks in a checkpoint, which an earlier version may have written under its own names."""
    if not isinstance(settings, list):
        return settings
    renamed = [dict(each) if isinstance(each, dict) else each for each in settings]
    for each in renamed:
        if isinstance(each, dict):
            for old, new in RENAMED.items():
                if old in each:
                    each[new] = each.pop(old)
            each |= {"monitor": todays_metric(each["monitor"])} if isinstance(each.get("monitor"), str) else {}
    return renamed


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
