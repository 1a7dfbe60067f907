"""Flags that say how files of data are read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from onnxtrain.cli.flags import SWITCH
from onnxtrain.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

READING = Group("How data are read", sort_key=1.5)


@Parameter(name="*", group=READING)
@dataclass(frozen=True)
class ReaderFlags:
    """Settings of the readers in :mod:`onnxtrain.data`, for all data of a command."""

    mean: Annotated[
        str | None, Parameter(metavar="NUMBERS", help="Pictures: what is subtracted, one number or 0.49,0.46,0.41.")
    ] = None
    std: Annotated[
        str | None, Parameter(metavar="NUMBERS", help="Pictures: what to divide by, one number or 0.23,0.22,0.23.")
    ] = None
    skip_broken: Annotated[bool, SWITCH, Parameter(help="Pictures: leave out those that cannot be read.")] = False
    delimiter: Annotated[str | None, Parameter(metavar="MARK", help="CSV: what separates cells.  [default: found]")] = (
        None
    )
    encoding: Annotated[
        str | None, Parameter(metavar="NAME", help="CSV: the encoding of the text.  [default: found]")
    ] = None
    decimal: Annotated[str | None, Parameter(metavar="MARK", help="CSV: the decimal sign.  [default: found]")] = None
    tokenizer: Annotated[
        Path | None, Parameter(metavar="FILE", help="Texts: a tokenizer.json; makes tokens of a column of texts.")
    ] = None
    text: Annotated[str, Parameter(metavar="NAME", help="Texts: the column.")] = "text"
    length: Annotated[
        int | None, Parameter(metavar="TOKENS", help="Texts: tokens of each.  [default: the model's, or the longest]")
    ] = None

    def source(self, path: str) -> Any:
        """A path with these settings, as data.

        Raises:
            OptionError: A setting is for files of another kind.
        """
        from onnxtrain.data import CsvFile, ImageFolder, TarFile, TextFile
        from onnxtrain.data.csv_file import CSV_SUFFIXES
        from onnxtrain.data.image_folder import is_image_folder
        from onnxtrain.data.tar_file import is_tar

        of_pictures = {"mean": _numbers("mean", self.mean), "std": _numbers("std", self.std)}
        if self.tokenizer is not None:
            self._only("tokenizer", "text", "length", kind="texts", path=path)
            return TextFile(path, self.tokenizer, self.text, self.length)
        if is_tar(path) or is_image_folder(Path(path)):
            self._only("mean", "std", "skip_broken", kind="pictures", path=path)
            reader = TarFile if is_tar(path) else ImageFolder
            return reader(path, **of_pictures, skip_broken=self.skip_broken)
        if Path(path).suffix.lower() in CSV_SUFFIXES:
            self._only("delimiter", "encoding", "decimal", kind="a CSV file", path=path)
            return CsvFile(path, self.delimiter, self.encoding, self.decimal)
        self._only(kind="arrays", path=path)
        return path

    def _only(self, *names: str, kind: str, path: str) -> None:
        """Refuse settings that are not for this kind of data."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in names and value != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                shown = flag if value is True else f"{flag} is {str(value)!r}"
                raise OptionError(f"{shown}, but {path!r} is read as {kind}; leave it out.")


def _numbers(name: str, given: str | None) -> float | Sequence[float] | None:
    if given is None:
        return None
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        raise OptionError(f"--{name} is {given!r}; it needs numbers such as 0.5 or 0.49,0.46,0.41.") from None
    return found[0] if len(found) == 1 else found
