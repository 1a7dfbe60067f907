"""Flags of adapters: arguments of :class:`onnxtrain.Lora`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from onnxtrain.cli.flags import SWITCH
from onnxtrain.errors import OptionError

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Lora
    from onnxtrain.trainer import Trainer

ADAPTERS = Group("Adapters", sort_key=3)


@Parameter(name="*", group=ADAPTERS)
@dataclass(frozen=True)
class LoraFlags:
    """Adapters to train beside frozen weights."""

    lora: Annotated[
        int | None,
        Parameter(
            metavar="RANK",
            help="Train adapters of this rank beside frozen weights. The output is then an adapter (.onnx_adapter, or "
            "a folder for PEFT), or a model (.onnx) into which it is merged.",
        ),
    ] = None
    lora_alpha: Annotated[float | None, Parameter(help="Weight of the adapters.  [default: 16]")] = None
    lora_targets: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            metavar="PATTERN",
            help="The layers that get adapters: their names as 'inspect --adaptable' lists them, or all-linear. May be "
            "repeated.  [default: attention's, else all-linear]",
        ),
    ] = None
    lora_dropout: Annotated[
        float | None, Parameter(help="Probability to drop what an adapter reads.  [default: 0]")
    ] = None
    lora_init: Annotated[
        Literal["kaiming", "gaussian"] | None, Parameter(help="First values of adapters.  [default: kaiming]")
    ] = None
    lora_adapter: Annotated[
        Path | None,
        Parameter(metavar="PATH", help="Go on with this .onnx_adapter file or folder of PEFT, in the place of --lora."),
    ] = None
    dora: Annotated[bool, SWITCH, Parameter(help="Train the magnitudes of columns, too (DoRA).")] = False
    rslora: Annotated[bool, SWITCH, Parameter(help="Scale adapters by alpha / sqrt(rank) (rsLoRA).")] = False

    @property
    def given(self) -> bool:
        """Return whether any flag asks for adapters."""
        return self.lora is not None or self.lora_adapter is not None

    def build(self) -> Lora | None:
        """The settings of the adapters; ``None`` where there are to be none.

        Raises:
            OptionError: A setting is given without adapters, or is one that cannot be.
        """
        named: dict[str, Any] = {"alpha": self.lora_alpha, "targets": self.lora_targets, "dropout": self.lora_dropout}
        named |= {"init": self.lora_init, "adapter": self.lora_adapter}
        settings = {name: value for name, value in named.items() if value is not None}
        if not self.given:
            flags = [f"--lora-{name}" for name in settings]
            flags += [f"--{name}" for name in ("dora", "rslora") if getattr(self, name)]
            if flags:
                raise OptionError(f"{flags[0]} is for adapters, which nothing asks for; give their rank: --lora 8.")
            return None
        from onnxtrain.adapters.lora import Lora

        if self.lora is not None:
            settings["rank"] = self.lora
        return Lora(**settings, dora=self.dora, rslora=self.rslora)


def check_output(trainer: Trainer, output: Path) -> None:
    """Find out before training whether adapters can be written as the output asks for.

    Raises:
        ModelError: It cannot be written.
        OptionError: They cannot be merged into the model.
    """
    from onnxtrain.data.data_names import names_file
    from onnxtrain.model_file.file import check_writable

    adapted = trainer._objective.adapted
    if adapted is None or not adapted.writes(output):
        if adapted is not None:
            adapted.check_mergeable()
        trainer._file.check_writable(output)
        if (labels := names_file(output)).exists():
            check_writable(labels)
