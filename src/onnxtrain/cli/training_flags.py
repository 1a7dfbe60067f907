"""Flags of the options of a training, made from the fields that document them, of losses, adapters and optimizers."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, Token

from onnxtrain.cli.flags import (
    ADAPTERS,
    LOSS,
    MEMORY,
    OPTIMIZER,
    RENAMED,
    annotated,
    flag,
    flag_of,
    given,
    group_of,
    grouped,
    options_of,
    read_numbers,
    read_pairs,
)
from onnxtrain.errors import OptionError
from onnxtrain.operators.optimizer import Optimizer, as_fields, setting_names
from onnxtrain.operators.registry import optimizers_by_name, read_optimizer
from onnxtrain.parameters.groups import read_group
from onnxtrain.training.config import TrainingConfig, choose_precision
from onnxtrain.training.fit_options import FitOptions

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Lora


class TrainingFlags:
    """Flags of the options of :class:`onnxtrain.Trainer`."""

    prediction: str | None
    seed: int
    tie: bool
    precision: str | None

    def arguments(self) -> dict[str, Any]:
        """Return these flags as arguments of :class:`onnxtrain.Trainer`."""
        found = given(self, TrainingConfig)
        return found | {
            "precision": choose_precision(self.precision),
            "groups": tuple(map(read_group, found["groups"])),
        }


class LoopFlags:
    """Flags of the options of :meth:`onnxtrain.Trainer.fit`."""

    validation: str | None
    sample_weight: str | None
    checkpoint: str | None
    save_best: str | None
    resume: bool

    def arguments(self) -> dict[str, Any]:
        """Return these flags as arguments of :meth:`onnxtrain.Trainer.fit`."""
        found = given(self, FitOptions)
        return found | {"change": ",".join(found["change"])}


def _kind(hint: Any) -> Any:
    """Return the type of the flag of an option: patterns are texts, of which there may be several."""
    kinds = {*typing.get_args(hint), hint}
    if tuple[int, int] in kinds:
        return IntegerPair
    return bool if bool in kinds else list[str] | None if tuple[str, ...] in kinds else hint


def flags_class(source: type, base: type) -> Any:
    """Return the class of the flags of a class of options: an option becomes one by the ``flag`` of its field."""
    options = options_of(source)
    # Flags alone: the types of other options are imported for type checkers only.
    untold = SimpleNamespace(
        __annotations__={name: field.type for name, (field, form) in options.items() if not form.kind}
    )
    hints = typing.get_type_hints(untold, vars(sys.modules[source.__module__]))
    fields: list[tuple[str, Any, Any]] = []
    for name, (field, form) in options.items():
        kind = form.kind or _kind(hints[name])
        default = field.default if isinstance(field.default, bool | int | float | str) else None
        metavar = form.metavar or ("PATTERN" if list[str] in typing.get_args(kind) else None)
        made = annotated(kind, default, form.help, group=group_of(form), common=form.common, metavar=metavar)
        fields.append((RENAMED.get(name, name), made, dataclasses.field(default=default)))
    result = dataclasses.make_dataclass(base.__name__, fields, bases=(base,), frozen=True)
    result.__module__ = __name__  # Python 3.11 says "types", where cyclopts would look for the annotations
    return Parameter(name="*")(result)


@grouped(LOSS)
@dataclass(frozen=True)
class LossFlags:
    """Flags for arguments of the loss."""

    axis: int | None = flag(
        None, "Class axis of the logits, for softmax_cross_entropy.  [default: by the labels' shape]"
    )
    ignore_index: int | None = flag(None, "Label that the loss ignores, for softmax_cross_entropy.  [default: -100]")
    class_weights: str | None = flag(None, "One weight per class, for softmax_cross_entropy: 1,1,3.", metavar="NUMBERS")
    label_smoothing: float | None = flag(
        None, "Share of every label to spread over all classes, in [0, 1).  [default: 0]"
    )
    chunk: int | None = flag(
        None,
        "Rows (tokens) of logits to compute at a time, for softmax_cross_entropy, next_token and losses "
        "of preferences: saves memory with large vocabularies.  [default: all]",
        metavar="ROWS",
        group=MEMORY,
    )
    check_targets: bool = flag(True, "Refuse targets outside 0 to 1, and distributions that do not sum to 1.")

    def of(self, loss: str) -> Any:
        """Return the loss with these arguments."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        given = {name: value for name, (value, default) in values.items() if value != default}
        if self.class_weights is not None:
            wanted = "numbers with commas between them: 1,1,3"
            given["class_weights"] = tuple(read_numbers("--class-weights", self.class_weights, wanted))
        if not given:
            return loss
        from onnxtrain.losses.loss_choice import resolve_loss

        return resolve_loss(loss, **given)


@grouped(ADAPTERS)
@dataclass(frozen=True)
class LoraFlags:
    """Adapters to train beside frozen weights."""

    lora: int | None = flag(
        None,
        "Train adapters of this rank beside frozen weights. The output is then an adapter (.onnx_adapter, or "
        "a folder for PEFT), or a model (.onnx) into which it is merged.",
        metavar="RANK",
        common=True,
    )
    lora_alpha: float | None = flag(None, "Adapters are scaled by alpha / rank.  [default: 16]")
    lora_targets: list[str] | None = flag(
        None,
        "The layers to adapt: names that 'inspect --adaptable' lists, or all-linear. May be "
        "repeated.  [default: attention's, else all-linear]",
        metavar="PATTERN",
    )
    lora_dropout: float | None = flag(None, "Dropout of the adapters' inputs.  [default: 0]")
    lora_init: Literal["kaiming", "gaussian", "pissa", "loftq"] | None = flag(
        None,
        "Initial values of adapters: random, the weight's principal singular values (pissa), or the error of "
        "quantization (loftq).  [default: kaiming]",
    )
    lora_original: Path | None = flag(
        None, "For loftq: the float model that the quantized MODEL was made from.", metavar="PATH"
    )
    lora_rank_pattern: list[str] | None = flag(
        None,
        "Another rank for the layers that match, such as '*.v_proj=16'. May be repeated; the first applies.",
        metavar="PATTERN=RANK",
    )
    lora_alpha_pattern: list[str] | None = flag(
        None, "Another alpha for the layers that match, likewise.", metavar="PATTERN=ALPHA"
    )
    lora_lr_ratio: float | None = flag(
        None, "The learning rate of B divided by that of A (LoRA+), such as 16.  [default: 1]"
    )
    lora_adapter: Path | None = flag(
        None, "Continue with this .onnx_adapter file or PEFT folder, instead of --lora.", metavar="PATH"
    )
    dora: bool = flag(False, "Train the magnitudes of columns, too (DoRA).")
    rslora: bool = flag(False, "Scale adapters by alpha / sqrt(rank) (rsLoRA).")

    def build(self) -> Lora | None:
        """Return the settings of the adapters, if any."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "lora"}
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        if self.lora is None and self.lora_adapter is None:
            if given:
                first = flag_of(next(iter(given)))
                raise OptionError(f"{first} is for adapters, but there are none; give their rank: --lora 8.")
            return None
        from onnxtrain.adapters.lora import Lora

        if self.lora is not None and self.lora_adapter is not None:
            raise OptionError(
                f"--lora {self.lora} begins new adapters of this rank, but --lora-adapter {self.lora_adapter} "
                "continues with those of a file and their ranks; leave one of the two out."
            )
        settings: dict[str, Any] = {name.removeprefix("lora_"): value for name, value in given.items()}
        if self.lora is not None:
            settings["rank"] = self.lora
        settings["rank_pattern"] = read_pairs(
            "--lora-rank-pattern", self.lora_rank_pattern, int, "PATTERN=RANK, such as '*.v_proj=16'"
        )
        settings["alpha_pattern"] = read_pairs(
            "--lora-alpha-pattern", self.lora_alpha_pattern, float, "PATTERN=ALPHA, such as '*.v_proj=16'"
        )
        return Lora(**settings)


class OptimizerFlags:
    """Flags of the optimizers: the name, and every setting under each of its names."""

    optimizer: str

    def build(self, default: Optimizer | None = None) -> Optimizer:
        """Return the optimizer that the flags describe."""
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


def _numbers_of(number: type[int] | type[float], wanted: str) -> Callable[[Any, Sequence[Token]], tuple[Any, ...]]:
    """Return a converter of texts such as ``4,1``, and of arrays of TOML."""

    def convert(_: Any, tokens: Sequence[Token]) -> tuple[Any, ...]:
        text = ",".join(token.value for token in tokens)
        try:
            return tuple(number(part) for part in text.strip("()").split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not {wanted}") from None

    return convert


_integers = _numbers_of(int, "a pair of integers such as 4,1")
_pair = _numbers_of(float, "a pair of numbers such as 0.9,0.999")

IntegerPair = Annotated[tuple[int, ...] | None, Parameter(negative=(), n_tokens=1, converter=_integers)]
NumberPair = Annotated[tuple[float, ...] | None, Parameter(negative=(), n_tokens=1, converter=_pair)]

_KINDS: Mapping[str, tuple[Any, str | None]] = {
    "betas": (NumberPair, "A,B"),
    "block": (IntegerPair, "OUT,IN"),
    "nesterov": (bool, None),
}
"""Types of the settings that are no single number or text, and what help shows for their values."""


def _optimizer_flags(default: str) -> type[OptimizerFlags]:
    """Return the class of all flags: an optimizer adds its settings by being registered."""
    optimizers = optimizers_by_name()
    rates = ", ".join(f"{name}: {settings().learning_rate:g}" for name, settings in optimizers.items())
    names: dict[str, Any] = {
        "optimizer": annotated(
            Literal[tuple(optimizers)] | str,
            default,
            "The update rule. Its settings are flags, or as in 'adam(lr=1e-3)'.",
            group=OPTIMIZER,
            common=True,
            metavar="NAME",
        ),
        "learning_rate": annotated(
            float | None,
            None,
            f"Learning rate, the highest one of a schedule. [{rates}]",
            group=OPTIMIZER,
            common=True,
            name=["--learning-rate", "--lr"],
        ),
    }
    kinds = {attribute.name: attribute.kind for each in optimizers.values() for attribute in each.schema.attributes}
    for settings in optimizers.values():
        for name in setting_names(settings):
            if name in ("lr", "sparsity") or name in names or (name == "block" and default == "ssgd"):
                continue  # prune has a --block of its own
            kind, metavar = _KINDS.get(name, (kinds.get(name, float) | None, None))
            names[name] = annotated(kind, None, _setting_help(name), group=OPTIMIZER, metavar=metavar)
    fields: list[tuple[str, Any, Any]] = [
        (name, kind, dataclasses.field(default=default if name == "optimizer" else None))
        for name, kind in names.items()
    ]
    made = dataclasses.make_dataclass("OptimizerSettings", fields, bases=(OptimizerFlags,), frozen=True)
    made.__module__ = __name__
    result: type[OptimizerFlags] = Parameter(name="*")(made)
    return result


if TYPE_CHECKING:
    Training = TrainingFlags
    Loop = LoopFlags
    OptimizerSettings = OptimizerFlags
    PruningOptimizer = OptimizerFlags
else:
    Training, Loop = flags_class(TrainingConfig, TrainingFlags), flags_class(FitOptions, LoopFlags)
    OptimizerSettings, PruningOptimizer = _optimizer_flags("adam"), _optimizer_flags("ssgd")
