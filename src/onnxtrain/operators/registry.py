"""The optimizers: every class of settings in the modules of ``operators/rules``; by operator, and by text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final, NamedTuple

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.errors._internal import classes_in
from onnxtrain.errors.spelling import suggestion
from onnxtrain.operators.call_text import name_of, read_call, read_literal
from onnxtrain.operators.evaluation import operator_over_arrays
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.schema import OptimizerSchema


class Entry(NamedTuple):
    """One optimizer."""

    schema: OptimizerSchema
    settings: type[Optimizer]
    reference: Callable[..., tuple[np.ndarray, ...]]


def optimizers_in(package: str) -> dict[str, Entry]:
    """Return the optimizers that the modules of a package define, by operator name."""
    found = classes_in(package, Optimizer)
    return {name: Entry(each.schema, each, operator_over_arrays(each.schema)) for name, each in found.items()}


OPTIMIZERS: Final[Mapping[str, Entry]] = optimizers_in(f"{__name__.rpartition('.')[0]}.rules")
"""All optimizers."""


def find(domain: str, name: str) -> OptimizerSchema | None:
    """Return the schema of an optimizer operator, or ``None`` for any other operator."""
    entry = OPTIMIZERS.get(name)
    return entry.schema if entry is not None and entry.schema.domain == domain else None


def choose_optimizer(optimizer: Optimizer | str | None) -> Optimizer:
    """Return the given optimizer, the one written as text, or ``Adam()`` for ``None``."""
    if optimizer is None:
        return OPTIMIZERS["Adam"].settings()
    if isinstance(optimizer, Optimizer):
        return optimizer
    settings, given = read_optimizer(optimizer)
    return settings(**given)


def read_optimizer(text: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """Parse an optimizer written as text into its class and settings."""
    names = optimizers_by_name()
    call = read_call(text.lower()) if isinstance(text, str) else None
    if call is None or call.name not in names:
        raise OptionError(
            f"optimizer={text!r} is not an optimizer; give one such as onnxtrain.Adam(lr=0.001), or text such as "
            f"'adam(lr=0.001)', with one of the names {', '.join(sorted(names))}.{suggestion(name_of(text), names)}"
        )
    settings = names[call.name]
    own = [field.name for field in fields(settings)]
    if len(call.positional) > len(own):
        raise OptionError(f"optimizer is {text!r}, but {settings.__name__} has {len(own)} settings: {', '.join(own)}.")
    given = {name: _value(value) for name, value in zip(own, call.positional, strict=False)}
    for name, value in call.named.items():
        if name in given:
            raise OptionError(f"{settings.__name__}: {name} is given twice in {text!r}.")
        given[name] = _value(value)
    return settings, given


def optimizers_by_name() -> Mapping[str, type[Optimizer]]:
    """Return the optimizer classes by operator name in lower case."""
    return {name.lower(): entry.settings for name, entry in OPTIMIZERS.items()}


def _value(text: str) -> Any:
    try:
        return read_literal({"true": "True", "false": "False"}.get(text, text))
    except ValueError:
        return text
