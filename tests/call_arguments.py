"""The arguments of a public function, with those that a TypedDict names."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable

from onnxtrain.training.config import TrainingConfig


def arguments_of(function: Callable[..., object]) -> dict[str, object]:
    """The default of each argument; ``inspect.Parameter.empty`` or ``dataclasses.MISSING`` where there is none."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            fields = {field.name: field.default for field in dataclasses.fields(TrainingConfig)}
            (unpacked,) = typing.get_args(typing.get_type_hints(function, include_extras=True)[name])
            found |= {each: fields[each] for each in typing.get_type_hints(unpacked)}
        elif name != "self":
            found[name] = parameter.default
    return found
