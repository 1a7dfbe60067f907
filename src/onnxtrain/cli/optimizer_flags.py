"""Flags of optimizers, made from the settings of those that are registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, Token

from onnxtrain.cli.flags import OPTIMIZER, flag_of
from onnxtrain.errors import OptionError
from onnxtrain.operators.choice import optimizers_by_name, read_optimizer
from onnxtrain.operators.optimizer import Optimizer, as_fields, setting_names


class OptimizerFlags:
    """Flags of the optimizers: the name, and every setting under each of its names."""

    optimizer: str

    def build(self, default: Optimizer | None = None) -> Optimizer:
        """Return the optimizer that the flags describe.

        Args:
            default: Settings that no flag gives, where the optimizer is of the same class.

        Raises:
            OptionError: The optimizer has no such setting, or the value is outside its range.
        """
        settings, given = read_optimizer(self.optimizer)
        known = setting_names(settings)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name == "optimizer" or value is None:
                continue
            if field.name not in known:
                flags = ", ".join(flag_of(name) for name in known if name not in ("lr", "sparsity"))
                raise OptionError(
                    f"{flag_of(field.name)} is {value}, but {settings.__name__.lower()} has no such setting; it has "
                    f"{flags}."
                )
            if field.name in given:
                raise OptionError(f"{flag_of(field.name)} is given twice, by the flag and in {self.optimizer!r}.")
            given[field.name] = value
        if isinstance(default, settings):
            return dataclasses.replace(default, **as_fields(default, given))
        return settings(**given)

    def resolved(self) -> dict[str, Any]:
        """Return values of these flags that give the same optimizer, also where defaults change."""
        optimizer = self.build()
        none = dict.fromkeys(field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        given = {"optimizer": type(optimizer).__name__.lower(), "learning_rate": optimizer.learning_rate}
        return {**none, **given, **optimizer.node_attributes()}


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return "1,1"  # of blocks of one weight
    return value if isinstance(value, str) else f"{value:g}"


def _setting_help(name: str) -> str:
    """Return the help of a setting, with the optimizers that have it and their defaults."""
    texts: dict[str, list[str]] = {}
    for optimizer, settings in optimizers_by_name().items():
        defaults = settings().node_attributes()
        for attribute in settings.schema.attributes:
            field, _, index = attribute.familiar.partition("[")
            default = f"{optimizer}: {_show(defaults[attribute.name])}"
            if name == attribute.name and (not field or index or attribute.kind is str):
                texts.setdefault(attribute.doc, []).append(default)
            elif name == attribute.name:
                also = field.replace("1 - ", "1 - --") if " " in field else flag_of(field)
                texts.setdefault(f"ONNX's name of {also}.", []).append(default)
            elif name == field and index == "0]":
                texts.setdefault("--alpha and --beta as a pair, 0.9,0.999.", []).append(optimizer)
            elif name == field and not index and attribute.kind is str:
                texts.setdefault(f"{flag_of(attribute.name)} {attribute.choices[1]}.", []).append(optimizer)
            elif name == field and not index:
                texts.setdefault(attribute.doc, []).append(default)
            elif field == f"1 - {name}":
                texts.setdefault(f"1 - {flag_of(attribute.name)}.", []).append(optimizer)
    return " ".join(f"{doc} [{', '.join(who)}]" for doc, who in texts.items())


def _integers(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Convert ``4,1``, or an array of TOML."""
    text = ",".join(token.value for token in tokens)
    try:
        return tuple(int(part) for part in text.strip("()").split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a pair of integers such as 4,1") from None


IntegerPair = Annotated[tuple[int, ...] | None, Parameter(negative=(), n_tokens=1, converter=_integers, metavar="A,B")]


def _pair(_: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    """Convert ``0.9,0.999``, or an array of TOML."""
    text = ",".join(token.value for token in tokens)
    try:
        return tuple(float(part) for part in text.strip("()").split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a pair of numbers such as 0.9,0.999") from None


def _optimizer_flags(default: str) -> type[OptimizerFlags]:
    """Return the class of all flags: an optimizer adds its settings by being registered."""
    optimizers = optimizers_by_name()
    rates = ", ".join(f"{name}: {settings().learning_rate:g}" for name, settings in optimizers.items())
    names: dict[str, Any] = {
        "optimizer": Annotated[
            Literal[tuple(optimizers)] | str,
            Parameter(metavar="NAME", help="The update rule, with settings as in 'adam(lr=1e-3)', or by flags."),
        ],
        "learning_rate": Annotated[
            float | None,
            Parameter(
                name=["--learning-rate", "--lr"],
                help=f"Learning rate, the highest one of a schedule. [{rates}]",
            ),
        ],
    }
    kinds = {attribute.name: attribute.kind for each in optimizers.values() for attribute in each.schema.attributes}
    for settings in optimizers.values():
        for name in setting_names(settings):
            if name in ("lr", "sparsity") or name in names or (name == "block" and default == "ssgd"):
                continue  # prune has a --block of its own
            if name == "betas":
                pair = Parameter(negative=(), n_tokens=1, converter=_pair, metavar="A,B", help=_setting_help(name))
                names[name] = Annotated[tuple[float, ...] | None, pair]
            elif name == "block":
                names[name] = Annotated[IntegerPair, Parameter(metavar="OUT,IN", help=_setting_help(name))]
            elif name == "nesterov":
                names[name] = Annotated[bool | None, Parameter(negative=(), help=_setting_help(name))]
            else:
                kind = kinds.get(name, float)
                names[name] = Annotated[kind | None, Parameter(help=_setting_help(name))]
    fields: list[tuple[str, Any, Any]] = [
        (name, kind, dataclasses.field(default=default if name == "optimizer" else None))
        for name, kind in names.items()
    ]
    made = dataclasses.make_dataclass("OptimizerSettings", fields, bases=(OptimizerFlags,), frozen=True)
    made.__module__ = __name__  # Python 3.11 says "types", where cyclopts would look for the annotations
    result: type[OptimizerFlags] = Parameter(name="*", group=OPTIMIZER)(made)
    return result


if TYPE_CHECKING:
    OptimizerSettings = OptimizerFlags
    PruningOptimizer = OptimizerFlags
else:
    OptimizerSettings, PruningOptimizer = _optimizer_flags("adam"), _optimizer_flags("ssgd")
