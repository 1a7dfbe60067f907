"""Optimizers by name: ``"adamw"``, ``"sgd(lr=0.1, momentum=0.9)"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import suggestion
from onnxtrain.operators import OPTIMIZERS, Adam
from onnxtrain.operators.call_text import name_of, read_call, read_literal
from onnxtrain.operators.optimizer import Optimizer


def choose_optimizer(optimizer: Optimizer | str | None) -> Optimizer:
    """Return the given optimizer, the one written as text, or ``Adam()`` for ``None``."""
    if optimizer is None:
        return Adam()
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
