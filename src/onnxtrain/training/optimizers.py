"""Optimizers by name: ``"adamw"``, ``"sgd(lr=0.1, momentum=0.9)"``."""

from __future__ import annotations

import ast
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.operators import OPTIMIZERS, Adam
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.spelling import suggestion
from onnxtrain.training.call_text import name_of, read_call


def choose_optimizer(optimizer: Optimizer | str | None) -> Optimizer:
    """The optimizer that is meant: itself, one by its name, with settings as in Python, or ``Adam()``.

    Raises:
        OptionError: There is none of this name, or a setting is not one of its own.

    >>> choose_optimizer("adamw(lr=3e-4, weight_decay=0.1)")
    AdamW(learning_rate=0.0003, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1)
    """
    if optimizer is None:
        return Adam()
    if isinstance(optimizer, Optimizer):
        return optimizer
    names = {name.lower(): entry.settings for name, entry in OPTIMIZERS.items()}
    call = read_call(optimizer.lower()) if isinstance(optimizer, str) else None
    if call is None or call.name not in names:
        raise OptionError(
            f"optimizer is {optimizer!r}, but must be an optimizer such as onnxtrain.Adam(), or the name of one: "
            f"{', '.join(sorted(names))}.{suggestion(name_of(optimizer), names)}"
        )
    return names[call.name](*map(_value, call.positional), **{name: _value(text) for name, text in call.named.items()})


def _value(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
