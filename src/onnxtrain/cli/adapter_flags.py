"""Flags of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from onnxtrain.cli.flags import ADAPTERS, COMMON, SWITCH
from onnxtrain.errors import OptionError

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Lora


def _by_pattern(
    flag: str, unit: str, given: list[str] | None, number: type[int] | type[float]
) -> dict[str, float] | None:
    """Parse PATTERN=NUMBER; the last equals sign separates, since names may have some."""
    found = {}
    for text in given or ():
        pattern, equals, value = text.rpartition("=")
        try:
            found[pattern] = number(value)
        except ValueError:
            equals = ""
        if not equals or not pattern:
            raise OptionError(f"{flag} is {text!r}; it needs PATTERN={unit}, such as '*.v_proj=16'.")
    return found or None


@Parameter(name="*", group=ADAPTERS)
@dataclass(frozen=True)
class LoraFlags:
    """Adapters to train beside frozen weights."""

    lora: Annotated[
        int | None,
        Parameter(
            group=(ADAPTERS, COMMON),
            metavar="RANK",
            help="Train adapters of this rank beside frozen weights. The output is then an adapter (.onnx_adapter, or "
            "a folder for PEFT), or a model (.onnx) into which it is merged.",
        ),
    ] = None
    lora_alpha: Annotated[float | None, Parameter(help="Adapters are scaled by alpha / rank.  [default: 16]")] = None
    lora_targets: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            metavar="PATTERN",
            help="The layers to adapt: names that 'inspect --adaptable' lists, or all-linear. May be "
            "repeated.  [default: attention's, else all-linear]",
        ),
    ] = None
    lora_dropout: Annotated[float | None, Parameter(help="Dropout of the adapters' inputs.  [default: 0]")] = None
    lora_init: Annotated[
        Literal["kaiming", "gaussian", "pissa", "loftq"] | None,
        Parameter(
            help="Initial values of adapters: random, the weight's principal singular values (pissa), or the error of "
            "quantization (loftq).  [default: kaiming]"
        ),
    ] = None
    lora_original: Annotated[
        Path | None,
        Parameter(metavar="PATH", help="For loftq: the float model that the quantized MODEL was made from."),
    ] = None
    lora_rank_pattern: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            metavar="PATTERN=RANK",
            help="Another rank for the layers that match, such as '*.v_proj=16'. May be repeated; the first applies.",
        ),
    ] = None
    lora_alpha_pattern: Annotated[
        list[str] | None,
        Parameter(negative=(), metavar="PATTERN=ALPHA", help="Another alpha for the layers that match, likewise."),
    ] = None
    lora_lr_ratio: Annotated[
        float | None,
        Parameter(help="The learning rate of B divided by that of A (LoRA+), such as 16.  [default: 1]"),
    ] = None
    lora_adapter: Annotated[
        Path | None,
        Parameter(metavar="PATH", help="Continue with this .onnx_adapter file or PEFT folder, instead of --lora."),
    ] = None
    dora: Annotated[bool, SWITCH, Parameter(help="Train the magnitudes of columns, too (DoRA).")] = False
    rslora: Annotated[bool, SWITCH, Parameter(help="Scale adapters by alpha / sqrt(rank) (rsLoRA).")] = False

    @property
    def given(self) -> bool:
        """Return whether any flag asks for adapters."""
        return self.lora is not None or self.lora_adapter is not None

    def build(self) -> Lora | None:
        """Return the settings of the adapters, if any."""
        named: dict[str, Any] = {"alpha": self.lora_alpha, "targets": self.lora_targets, "dropout": self.lora_dropout}
        named |= {"init": self.lora_init, "adapter": self.lora_adapter, "original": self.lora_original}
        named |= {"rank_pattern": _by_pattern("--lora-rank-pattern", "RANK", self.lora_rank_pattern, int)}
        named |= {"alpha_pattern": _by_pattern("--lora-alpha-pattern", "ALPHA", self.lora_alpha_pattern, float)}
        named |= {"lr_ratio": self.lora_lr_ratio}
        settings = {name: value for name, value in named.items() if value is not None}
        if not self.given:
            flags = [f"--lora-{name.replace('_', '-')}" for name in settings]
            flags += [f"--{name}" for name in ("dora", "rslora") if getattr(self, name)]
            if flags:
                raise OptionError(f"{flags[0]} is for adapters, but there are none; give their rank: --lora 8.")
            return None
        from onnxtrain.adapters.lora import Lora

        if self.lora is not None and self.lora_adapter is not None:
            raise OptionError(
                f"--lora {self.lora} begins new adapters of this rank, but --lora-adapter {self.lora_adapter} "
                "continues with those of a file and their ranks; leave one of the two out."
            )
        if self.lora is not None:
            settings["rank"] = self.lora
        return Lora(**settings, dora=self.dora, rslora=self.rslora)


def adapter_of(path: Path | None) -> Lora | None:
    """Return the adapter to compute with; ``None`` without a path."""
    if path is None:
        return None
    from onnxtrain.adapters.lora import Lora

    return Lora(adapter=path)
