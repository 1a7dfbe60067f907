"""Flags of the readers of data files, and the bases of flags that plugins add."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter

from onnxtrain.cli.flags import READING, RESULTS, flag, flag_of, grouped, read_numbers
from onnxtrain.errors import DataError, OptionError

if TYPE_CHECKING:
    from onnxtrain.training.callbacks import Callback
    from onnxtrain.training.callbacks.progress import Progress


@grouped(READING)
@dataclass(frozen=True)
class DataFlags:
    """Settings of the readers in :mod:`onnxtrain.data`, for all data of a command.

    Plugins add flags by classes derived from this one (:func:`onnxtrain.register_flags`).
    """

    mean: str | None = flag(
        None, "Images: subtract this, one number or 0.49,0.46,0.41.  [default: the model's]", metavar="NUMBERS"
    )
    std: str | None = flag(
        None, "Images: divide by this, one number or 0.23,0.22,0.23.  [default: the model's]", metavar="NUMBERS"
    )
    skip_broken: bool = flag(False, "Images: skip those that cannot be read.")
    orient: bool | None = flag(None, "Images: rotate by their EXIF tag.  [default: as in the training, else yes]")
    delimiter: str | None = flag(None, "CSV: separator of cells.  [default: detected]", metavar="MARK")
    encoding: str | None = flag(None, "CSV: the encoding of the text.  [default: detected]", metavar="NAME")
    decimal: str | None = flag(None, "CSV: the decimal sign.  [default: detected]", metavar="MARK")
    tokenizer: Path | None = flag(
        None,
        "Text: a tokenizer.json, for a column of texts or for chats.  [default for chats: beside the model]",
        metavar="FILE",
    )
    text: str = flag("text", "Text: the column.", metavar="NAME")
    length: int | None = flag(None, "Text: tokens per example.  [default: the model's or longest]", metavar="TOKENS")

    def source(self, path: str, loss: str | None = None) -> Any:
        """Return the data of a path, read with these settings."""
        from onnxtrain.data import CsvFile, TextFile
        from onnxtrain.data.images import ImageReader
        from onnxtrain.data.opening import reader_of

        if self.tokenizer is not None:
            self.only("tokenizer", "text", "length", kind="texts", path=path)
            return TextFile(path, self.tokenizer, self.text, self.length)
        reader = reader_of(path)
        if reader is not None and issubclass(reader, ImageReader):
            return reader(path, **self.of_images(path))
        if reader is CsvFile:
            self.only("delimiter", "encoding", "decimal", kind="a CSV file", path=path)
            return CsvFile(path, self.delimiter, self.encoding, self.decimal)
        self.only(kind="arrays", path=path)
        return path

    def of_images(self, path: str, *others: str) -> dict[str, Any]:
        """Return the settings of images, and refuse those that are for data of other kinds."""
        self.only("mean", "std", "skip_broken", "orient", *others, kind="images", path=path)
        values = {name: _channel_values(name, getattr(self, name)) for name in ("mean", "std")}
        return {**values, "skip_broken": self.skip_broken, "orient": self.orient}

    def read(self, path: str, loss: str | None) -> Any:
        """Return data of the kind that a plugin's flags are for, or ``None`` for other data."""
        return None

    def held_out(self, validation: str | None, loss: str | None = None) -> Any:
        """Return validation data with these settings, or the fraction to hold out."""
        if validation is None:
            return None
        if Path(validation).exists() or glob.has_magic(validation):
            return self.source(validation, loss)
        try:
            return float(validation)
        except ValueError:
            raise DataError(
                f"There is no file {validation!r}; --validation needs a file or folder of data, or a fraction such as "
                "0.1."
            ) from None

    def only(self, *names: str, kind: str, path: str) -> None:
        """Raise OptionError for settings that are not for this kind of data."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in names and value != field.default:
                flag = flag_of(f"{'no_' * (value is False)}{field.name}")
                shown = flag if isinstance(value, bool) else f"{flag} is {str(value)!r}"
                raise OptionError(f"{shown}, but {path!r} is read as {kind}; leave it out.")


@Parameter(name="*", group=RESULTS)
@dataclass(frozen=True)
class FitFlags:
    """Base of flags that plugins add to ``fit`` (:func:`onnxtrain.register_flags`)."""

    def callbacks(self, reading: DataFlags, shown: Progress) -> list[Callback]:
        """Return the callbacks that the flags ask for."""
        return []


def _channel_values(name: str, given: str | None) -> float | Sequence[float] | None:
    if given is None:
        return None
    found = read_numbers(f"--{name}", given, "numbers such as 0.5 or 0.49,0.46,0.41")
    return found[0] if len(found) == 1 else found
