"""Flags of the readers of data files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from onnxtrain.cli.flags import READING, SWITCH
from onnxtrain.errors import DataError, OptionError


@Parameter(name="*", group=READING)
@dataclass(frozen=True)
class ReaderFlags:
    """Settings of the readers in :mod:`onnxtrain.data`, for all data of a command."""

    mean: Annotated[
        str | None,
        Parameter(
            metavar="NUMBERS", help="Images: subtract this, one number or 0.49,0.46,0.41.  [default: the model's]"
        ),
    ] = None
    std: Annotated[
        str | None,
        Parameter(
            metavar="NUMBERS", help="Images: divide by this, one number or 0.23,0.22,0.23.  [default: the model's]"
        ),
    ] = None
    skip_broken: Annotated[bool, SWITCH, Parameter(help="Images: skip those that cannot be read.")] = False
    orient: Annotated[
        bool | None, Parameter(help="Images: rotate by their EXIF tag.  [default: as in the training, else yes]")
    ] = None
    delimiter: Annotated[
        str | None, Parameter(metavar="MARK", help="CSV: separator of cells.  [default: detected]")
    ] = None
    encoding: Annotated[
        str | None, Parameter(metavar="NAME", help="CSV: the encoding of the text.  [default: detected]")
    ] = None
    decimal: Annotated[str | None, Parameter(metavar="MARK", help="CSV: the decimal sign.  [default: detected]")] = None
    tokenizer: Annotated[
        Path | None,
        Parameter(
            metavar="FILE",
            help="Text: a tokenizer.json, for a column of texts or for chats.  [default for chats: beside the model]",
        ),
    ] = None
    text: Annotated[str, Parameter(metavar="NAME", help="Text: the column.")] = "text"
    length: Annotated[
        int | None,
        Parameter(metavar="TOKENS", help="Text: tokens per example.  [default: the model's or longest]"),
    ] = None

    train_on: Annotated[
        Literal["answers", "all"],
        Parameter(help="Chats, with next_token: learn the answers, or all tokens."),
    ] = "answers"
    max_length: Annotated[
        int | None,
        Parameter(metavar="TOKENS", help="Chats: cut rows at this length.  [default: the model's, or 1024]"),
    ] = None
    pack: Annotated[
        int | None,
        Parameter(metavar="TOKENS", help="Chats: put several rows into one of this length, kept apart."),
    ] = None
    chat_template: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Chats: a template in Jinja.  [default: the tokenizer's]"),
    ] = None

    def source(self, path: str, loss: str | None = None) -> Any:
        """Return the data of a path, read with these settings.

        Args:
            path: The data.
            loss: The loss as given; with ``next_token`` texts are rows of a language model, with others they are
                compared.

        Raises:
            OptionError: A setting is for another kind of data.
        """
        from onnxtrain.data import CsvFile, ImageFolder, TarFile, TextFile
        from onnxtrain.data.csv_file import CSV_SUFFIXES
        from onnxtrain.data.images import is_image_folder
        from onnxtrain.data.tar_file import is_tar
        from onnxtrain.plugins.text import ChatData, ComparisonData
        from onnxtrain.plugins.text.rows import holds_texts, is_json_lines

        image_settings = {"mean": _channel_values("mean", self.mean), "std": _channel_values("std", self.std)}
        compared = _compares_rows(loss) and holds_texts(path)
        rows = holds_texts(path) and (loss or "").partition("(")[0] == "next_token"
        if rows or compared or is_json_lines(path):
            reading = ("delimiter", "encoding", "decimal") if Path(path).suffix.lower() in CSV_SUFFIXES else ()
            own = ("tokenizer", "max_length", "chat_template", *(() if compared else ("train_on", "pack")))
            self._only(*own, *reading, kind="texts to compare" if compared else "chats or texts", path=path)
            opened = CsvFile(path, self.delimiter, self.encoding, self.decimal) if reading else path
            return (ComparisonData if compared else ChatData)(opened, **{name: getattr(self, name) for name in own})
        if self.tokenizer is not None:
            self._only("tokenizer", "text", "length", kind="texts", path=path)
            return TextFile(path, self.tokenizer, self.text, self.length)
        if is_tar(path) or is_image_folder(Path(path)):
            self._only("mean", "std", "skip_broken", "orient", kind="images", path=path)
            reader = TarFile if is_tar(path) else ImageFolder
            return reader(path, **image_settings, skip_broken=self.skip_broken, orient=self.orient)
        if Path(path).suffix.lower() in CSV_SUFFIXES:
            self._only("delimiter", "encoding", "decimal", kind="a CSV file", path=path)
            return CsvFile(path, self.delimiter, self.encoding, self.decimal)
        self._only(kind="arrays", path=path)
        return path

    def held_out(self, validation: str | None, loss: str | None = None) -> Any:
        """Return validation data with these settings, or the fraction to hold out.

        Raises:
            DataError: The text is neither.
        """
        if validation is None:
            return None
        if Path(validation).exists():
            return self.source(validation, loss)
        try:
            return float(validation)
        except ValueError:
            raise DataError(
                f"There is no file {validation!r}; --validation needs a file or folder of data, or a fraction such as "
                "0.1."
            ) from None

    def _only(self, *names: str, kind: str, path: str) -> None:
        """Raise OptionError for settings that are not for this kind of data."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in names and value != field.default:
                flag = f"--{'no-' * (value is False)}{field.name.replace('_', '-')}"
                shown = flag if isinstance(value, bool) else f"{flag} is {str(value)!r}"
                raise OptionError(f"{shown}, but {path!r} is read as {kind}; leave it out.")


def _compares_rows(loss: str | None) -> bool:
    """Return whether a loss, as given, compares rows of texts."""
    from onnxtrain.errors.spelling import ALIASES
    from onnxtrain.losses import LOSSES
    from onnxtrain.losses.groups import GroupLoss
    from onnxtrain.operators.call_text import name_of

    found = LOSSES.get(ALIASES.get(name_of(loss), name_of(loss)))
    return found is not None and issubclass(found, GroupLoss)


def _channel_values(name: str, given: str | None) -> float | Sequence[float] | None:
    if given is None:
        return None
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        raise OptionError(f"--{name} is {given!r}; it needs numbers such as 0.5 or 0.49,0.46,0.41.") from None
    return found[0] if len(found) == 1 else found
