"""The names that other tools have for the optimizers' settings, where the meaning is the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from onnxtrain.errors import ArgumentError, OptionError
from onnxtrain.spelling import suggestion

T = TypeVar("T")

LEARNING_RATE: Final = "lr"

ALIASES: Final[Mapping[str, Mapping[str, str]]] = {
    "Adagrad": {"lr_decay": "decay_factor", "eps": "epsilon", "weight_decay": "norm_coefficient"},
    "Adam": {"betas": "alpha, beta", "eps": "epsilon", "weight_decay": "norm_coefficient"},
    "Momentum": {"momentum": "alpha", "nesterov": "mode", "weight_decay": "norm_coefficient"},
    "SSGD": {"momentum": "alpha", "weight_decay": "norm_coefficient"},
}
"""By the optimizer: the other name, and the setting. ``lr`` is the learning rate of all."""

_KINDS: Final = {"betas": "tuple[float, float]", "nesterov": "bool"}
"""Types of those that are no float."""

OTHERWISE: Final[Mapping[tuple[str, str], str]] = {
    ("Momentum", "dampening"): "beta, which is 1 - dampening",
    ("AdamW", "alpha"): "betas",
    ("AdamW", "beta"): "betas",
    ("AdamW", "epsilon"): "eps",
    ("LAMB", "alpha"): "betas",
    ("LAMB", "beta"): "betas",
    ("LAMB", "epsilon"): "eps",
    ("Lion", "alpha"): "betas",
    ("Lion", "beta"): "betas",
    ("RMSprop", "epsilon"): "eps",
    ("SGD", "mode"): "nesterov",
}
"""What is meant by names that are not taken, since their meaning is not the same."""


def accept_aliases(settings: type[T]) -> type[T]:
    """Let the class of an optimizer's settings take the names of the table, which its signature shows."""
    plain = settings.__init__
    if hasattr(plain, "__signature__"):  # it takes them
        return settings
    signature = inspect.signature(plain)
    others = [LEARNING_RATE, *ALIASES.get(settings.__name__, {})]
    kinds = {name: f"{_KINDS.get(name, 'float')} | None" for name in others}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in kinds.items()
    ]

    @functools.wraps(plain)
    def construct(self: Any, *args: Any, **given: Any) -> None:
        plain(self, *args, **translated(settings, given, len(args)))

    construct.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *added]
    )
    construct.__annotations__ = {**plain.__annotations__, **kinds}
    settings.__init__ = construct  # type: ignore[method-assign]
    return settings


def translated(settings: Any, given: Mapping[str, Any], positional: int = 0) -> dict[str, Any]:
    """Arguments under the settings' own names.

    Args:
        settings: The class of the settings.
        given: Arguments by name.
        positional: How many come before them.

    Raises:
        OptionError: There is no such setting, or one is given twice.
    """
    name = settings.__name__
    known = [field.name for field in fields(settings)]
    result: dict[str, Any] = {}
    taken = dict.fromkeys(known[:positional], "the arguments before")
    for argument, value in given.items():
        for setting, part in _own(name, known, argument, value).items():
            if setting in taken:
                raise OptionError(f"{name}: {setting} is given twice, by {taken[setting]} and by {argument}.")
            taken[setting] = argument
            result[setting] = part
    return result


def _own(name: str, known: list[str], argument: str, value: Any) -> dict[str, Any]:
    if argument in known:
        return {argument: value}
    setting = "learning_rate" if argument == LEARNING_RATE else ALIASES.get(name, {}).get(argument)
    if setting is None:
        instead = OTHERWISE.get((name, argument))
        names = [LEARNING_RATE, *ALIASES.get(name, {}), *known]
        hint = (
            f": give {instead}." if instead else f"; its settings are {', '.join(known)}.{suggestion(argument, names)}"
        )
        raise ArgumentError(f"{name} has no setting {argument!r}{hint}")
    if setting == "mode":
        return {setting: "nesterov" if value else "standard"}
    names = setting.split(", ")
    if len(names) == 1:
        return {setting: value}
    if not isinstance(value, (tuple, list)) or len(value) != len(names):
        raise OptionError(f"{name}: {argument} is {value!r}, but must be a pair of numbers.")
    return dict(zip(names, value, strict=True))
