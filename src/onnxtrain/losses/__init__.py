"""Losses, built as graphs of standard operators from a prediction and a target.

A loss is a class derived from :class:`Loss` with a ``name``, in a module of this folder. The package finds it by
reflection; ``__init__.pyi`` lists the classes for type checkers.
"""

from __future__ import annotations

from typing import Any, Final

from onnxtrain.errors._internal import classes_in, public_names
from onnxtrain.errors.registries import ClassRegistry
from onnxtrain.losses.base import Loss, ReducedLoss, TargetForm, TargetKind, examples, mean_over, node_rank
from onnxtrain.losses.custom_loss import CustomLoss

_found = {name: each for name, each in classes_in(__name__, Loss).items() if each.has_text and "name" in vars(each)}
globals().update(_found)

__all__ = [
    "LOSSES",
    "CustomLoss",
    "Loss",
    "ReducedLoss",
    "TargetForm",
    "TargetKind",
    "examples",
    "mean_over",
    "node_rank",
    *_found,
]


_USUAL = ("softmax_cross_entropy", "next_token", "binary_cross_entropy", "mean_squared_error")
"""Lists begin with these."""


_named = {each.name: each for each in _found.values()}
LOSSES: Final[ClassRegistry[Loss]] = ClassRegistry(
    "loss", Loss, {name: _named[name] for name in dict.fromkeys([*_USUAL, *sorted(_named)])}
)
"""Losses by their names on the command line, with those of plugins."""

__dir__ = public_names(__name__, LOSSES.class_names)


def __getattr__(name: str) -> Any:
    return LOSSES.of_class(name, __name__)
