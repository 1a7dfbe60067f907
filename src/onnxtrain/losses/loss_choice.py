"""Resolve a loss given as a name, a text with arguments, a path, a function or an object."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxtrain import losses
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import ALIASES, suggestion
from onnxtrain.graph import Builder, Value
from onnxtrain.losses.base import JointLoss, Loss
from onnxtrain.operators.call_text import Call, name_of, read_call, read_literal

OneLoss = str | Loss | Callable[[Builder, Value, Value], Value] | os.PathLike[str]
LossLike = OneLoss | Mapping[str, OneLoss]

_LONGEST = 100
"""Characters of an unknown loss that its error shows."""


def resolve_losses(loss: LossLike) -> Loss | JointLoss | str:
    """Resolve the loss option; a mapping from outputs to losses gives their sum."""
    if not isinstance(loss, Mapping):
        return resolve_loss(loss)
    parts = []
    for output, given in loss.items():
        found = resolve_loss(given)
        if isinstance(found, str):
            raise OptionError(
                f"The loss of {output!r} is {given!r}: an output that is the loss must be the only one; give a loss of "
                f"{output!r} and its targets."
            )
        parts.append((str(output), found))
    if not parts:
        raise OptionError("loss is an empty mapping; give outputs of the model with a loss each.")
    return JointLoss(tuple(parts))


def resolve_loss(loss: OneLoss, **options: Any) -> Loss | str:
    """Resolve a single loss; ``"output:NAME"`` gives the name of the output."""
    resolved = _resolve(loss)
    if not options:
        return resolved
    known = [] if isinstance(resolved, str) else _arguments(type(resolved))
    for name, value in options.items():
        if name not in known:
            shown = loss if isinstance(loss, str) else type(resolved).__name__
            raise OptionError(
                f"{name}={value!r} is given, but the loss {shown} has no such argument; it has {_listed(known)}"
                f".{suggestion(name, known)}"
            ).about(name, got=value, wanted=known)
    return dataclasses.replace(resolved, **options)  # type: ignore[type-var]


def _resolve(loss: OneLoss) -> Loss | str:
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, (str, os.PathLike)):
        return _from_text(str(loss))
    if isinstance(loss, type):
        raise OptionError(f"The loss is the class {loss.__name__}; give an object: {loss.__name__}().").about(
            "loss", got=loss.__name__
        )
    if callable(loss):
        from onnxtrain.losses.custom_loss import CustomLoss

        return CustomLoss(loss)
    raise OptionError(
        f"A loss is a name, a Loss, a path or a function, or a mapping from outputs to such, not a "
        f"{type(loss).__name__}."
    )


def _from_text(text: str) -> Loss | str:
    if text.startswith("output:"):
        return text.removeprefix("output:")
    call = read_call(text)
    if call is not None and ALIASES.get(call.name, call.name) in losses.LOSSES:
        return _called(losses.LOSSES[ALIASES.get(call.name, call.name)], call, text)
    if text.endswith(".onnx"):
        from onnxtrain.losses.custom_loss import ModelLoss

        return ModelLoss(Path(text))
    raise OptionError(
        f"There is no loss {text[:_LONGEST]!r}; use {', '.join(losses.LOSSES)}, each with arguments as in "
        "'huber(delta=0.5)', "
        "output:NAME for a scalar output of the model, or the path of an ONNX model of (prediction, target)"
        f".{suggestion(name_of(text), [*losses.LOSSES, *ALIASES])}"
    )


def _called(loss: type[Loss], call: Call, text: str) -> Loss:
    names = _arguments(loss)
    if not call.fits(loss):
        wrong = next((name for name in call.named if name not in names), "")
        near = suggestion(wrong, names)
        raise OptionError(f"{text!r} gives {call.name} unknown arguments; it has {_listed(names)}.{near}")
    positional = [field.name for field in dataclasses.fields(loss) if not field.kw_only]  # type: ignore[arg-type]
    given = dict(zip(positional, call.positional, strict=False)) | call.named
    types = {field.name: str(field.type) for field in dataclasses.fields(loss)}  # type: ignore[arg-type]
    values = {name: _value(name, value, types[name], text) for name, value in given.items()}
    return loss(**{**loss.text_defaults, **values})


_KINDS = {"int": "an integer", "float": "a number", "bool": "true or false"}
_KINDS["Sequence"] = "numbers such as (1, 2.5) or {3: 2.5}"


def _value(name: str, text: str, annotation: str, whole: str) -> Any:
    kind = annotation.split("[")[0].split(" ")[0]
    try:
        value = read_literal({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except ValueError:
        value = text
    if value is None and "None" in annotation:
        return None
    if kind == "str":
        return value if isinstance(value, str) else text  # checked by the loss itself
    if "Sequence" in annotation and isinstance(value, (tuple, list)) and all(map(_is_number, value)):
        return tuple(float(item) for item in value)
    if kind == "Sequence" and isinstance(value, dict) and all(map(_is_number, (*value, *value.values()))):
        return value
    if kind == "float" and _is_number(value):
        return float(value)
    if type(value).__name__ == kind and kind in ("int", "bool"):
        return value
    raise OptionError(f"{name} is {text!r} in {whole!r}; it needs {_KINDS[kind]}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _arguments(loss: type[Loss]) -> list[str]:
    found = dataclasses.fields(loss)  # type: ignore[arg-type]
    return [field.name for field in sorted(found, key=lambda field: bool(field.kw_only))]


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
