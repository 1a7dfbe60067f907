"""Flags of the command line joined with those of plugins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from cyclopts import Group, Parameter

from onnxtrain.cli.flags import READING, RESULTS
from onnxtrain.cli.reader_flags import DataFlags, FitFlags
from onnxtrain.errors.registries import ClassRegistry

if TYPE_CHECKING:
    from onnxtrain.training.callbacks import Callback
    from onnxtrain.training.callbacks.progress import Progress


DATA: Final[ClassRegistry[DataFlags]] = ClassRegistry("flags of data", DataFlags)
FIT: Final[ClassRegistry[FitFlags]] = ClassRegistry("flags of fit", FitFlags)
"""Flags of plugins."""


@dataclass(frozen=True)
class _Readers(DataFlags):
    def source(self, path: str, loss: str | None = None) -> Any:
        """Return the data of a path, read by the plugin whose kind it is, or by the core."""
        for flags in DATA.values():
            if (found := flags.read(self, path, loss)) is not None:
                return found
        return super().source(path, loss)


def _joined(name: str, classes: Sequence[Any], group: Group) -> type:
    """Return a class whose fields are those of all classes, the last ones first."""
    fields: dict[str, tuple[str, Any, Any]] = {}
    for each in reversed(classes):
        hints = get_type_hints(each, include_extras=True)  # names in annotations are those of the plugin's module
        for own in dataclasses.fields(each):
            fields[own.name] = (own.name, hints[own.name], dataclasses.field(default=own.default))
    namespace = {"__module__": __name__}
    found = dataclasses.make_dataclass(name, fields.values(), bases=tuple(classes), frozen=True, namespace=namespace)
    return Parameter(name="*", group=group)(found)


if TYPE_CHECKING:
    ReaderFlags = _Readers
    AddedFlags = FitFlags
else:
    ReaderFlags = _joined("ReaderFlags", [_Readers, *reversed(list(DATA.values()))], READING)
    AddedFlags = _joined("AddedFlags", [*reversed(list(FIT.values())), FitFlags], RESULTS)


def added_callbacks(flags: AddedFlags, reading: ReaderFlags, shown: Progress) -> list[Callback]:
    """Return the callbacks that flags of plugins ask for."""
    return [callback for added in FIT.values() for callback in added.callbacks(flags, reading, shown)]
