"""Flags of the options of a training, made from the fields of its configuration."""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from onnxtrain.cli.flags import LOSS, TRAINED, Prediction
from onnxtrain.parameters.groups import read_group
from onnxtrain.training.config import Options, TrainingConfig, choose_precision


class TrainingFlags:
    """Flags of the options of a training: those fields of the configuration that document one."""

    prediction: str | None
    seed: int
    tie: bool
    precision: str | None

    def arguments(self) -> dict[str, Any]:
        """Return these flags as arguments of :class:`onnxtrain.Trainer`."""
        given = {name: getattr(self, name) for name in _training_options() if name != "output"}
        given |= {
            "output": self.prediction,
            "precision": choose_precision(self.precision),
            "recompute": given["recompute"] or (),
        }
        given["groups"] = tuple(map(read_group, given["groups"] or ()))
        return given


def _training_options() -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of the configuration that have flags."""
    return {field.name: field for field in dataclasses.fields(TrainingConfig) if field.metadata.get("flag")}


def _training_flags() -> type[TrainingFlags]:
    """Return the class of the flags: an option becomes one by the ``flag`` text of its field."""
    hints = typing.get_type_hints(Options)
    special: dict[str, Any] = {
        "batch_norm": Literal["frozen", "train", "sync"],
        "groups": list[str] | None,
        "masks": Literal["keep"] | None,
        "precision": str | None,
    }
    fields: list[tuple[str, Any, Any]] = []
    for name, field in _training_options().items():
        kinds = {*typing.get_args(hints[name]), hints[name]}
        kind = special.get(name) or (bool if bool in kinds else list[str] | None if str in kinds else hints[name])
        if name == "output":
            fields.append(("prediction", Prediction, dataclasses.field(default=None)))
            continue
        parameter = Parameter(
            group=LOSS if name == "targets" else TRAINED,
            negative=(),
            show_default=False if kind is bool else None,
            metavar={"groups": "GROUP", "precision": "FORMATS"}.get(
                name, "PATTERN" if kind == list[str] | None else None
            ),
            help=field.metadata["flag"],
        )
        default = None if name in special and name != "batch_norm" else field.default
        default = None if default == () else default
        fields.append((name, Annotated[kind, parameter], dataclasses.field(default=default)))
    made = dataclasses.make_dataclass("Training", fields, bases=(TrainingFlags,), frozen=True)
    made.__module__ = __name__  # cyclopts looks for the annotations there
    result: type[TrainingFlags] = Parameter(name="*", group=TRAINED)(made)
    return result


if TYPE_CHECKING:
    Training = TrainingFlags
else:
    Training = _training_flags()
