"""Texts as token ids, in the inputs that language models have."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.csv_file import CSV_SUFFIXES, CsvFile
from onnxtrain.data.files import GrowingArray, Reader
from onnxtrain.data.parquet_file import PARQUET_SUFFIXES, ParquetFile
from onnxtrain.data.tokenizer import Encoder, cut_text, open_tokenizer
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.small_files import read_text

_logger = logging.getLogger(__name__)

_BLOCK: Final = 1024
"""Texts that are encoded at a time."""

_TEXT_LIMIT: Final = 4 << 30
"""Maximum size of a text file in bytes."""


@checks_arguments
@dataclass(frozen=True)
class TextFile(Reader):
    """Texts with a tokenizer: a column of a CSV, Parquet or Arrow file, or the lines of a ``.txt`` file.

    The model's inputs are recognized by name: one with ``mask`` is 1 for tokens and 0 for padding, one with ``type`` or
    ``segment`` has the tokenizer's type ids, one with ``position`` counts from 0, and the remaining one has the token
    ids. Texts are truncated and padded to one length, on the side that the tokenizer's settings say
    (``tokenizer_config.json`` beside it, else its own), by default at their end; tokens that the tokenizer adds, such
    as ``[SEP]``, stay.

    Args:
        path: The file; the lines of a ``.txt`` file have no targets.
        tokenizer: A ``tokenizer.json``, which runs in a process of its own with limits of time and memory, or a
            ``tokenizers.Tokenizer``. The lengths of its own truncation and padding are not used.
        text: Column of texts.
        length: Tokens per text; by default the size of the model's input, or the length of the longest text.
    """

    tokenizer: Any
    text: str = "text"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise OptionError(f"length is {self.length}; it must be a number of tokens of at least 1.").about(
                "length", got=self.length
            )

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return the inputs by name, and the targets or None.

        Raises:
            DataError: The file cannot be read, or the inputs are not those of a language model.
        """
        roles = {spec.name: token_role(spec) for spec in specs}
        if list(roles.values()).count("ids") != 1:
            shown = ", ".join(f"'{spec.name}'" for spec in specs)
            raise DataError(f"{self.name} holds texts, but the inputs {shown} are not token ids with masks.")
        tokenizer = open_tokenizer(self.tokenizer)
        texts, targets = self._texts(target, need_target)
        if not len(texts):
            raise DataError(f"{self.name} holds no texts.")
        blank = [row for row, text in enumerate(texts) if not str(text).strip()]
        if blank:
            _logger.warning(
                "%d of %d texts in %s are blank, the first at example %d.", len(blank), len(texts), self.name, blank[0]
            )
        length = self._length(specs, tokenizer, texts)
        left = tokenizer.sides.pads_left and not any(spec.right_padded for spec in specs)
        if left or tokenizer.sides.cuts_left:
            actions = [name for name, side in (("padded", left), ("cut", tokenizer.sides.cuts_left)) if side]
            _logger.warning("Texts are %s on the left, as the tokenizer's settings say.", " and ".join(actions))
        arrays = {spec.name: GrowingArray((length,), np.dtype(np.int32)) for spec in specs}
        for start in range(0, len(texts), _BLOCK):
            encoded = tokenizer.encode([str(text) for text in texts[start : start + _BLOCK]])
            block = [cut_text(each, length, left=tokenizer.sides.cuts_left) for each in encoded]
            empty = next((row for row, each in enumerate(block, start) if not len(each.ids)), None)
            if empty is not None:
                raise DataError(
                    f"the text {str(texts[empty])!r} at example {empty} of {self.name} has no tokens; a model reads at "
                    "least one: remove such examples."
                ).about(self.name, got=str(texts[empty]))
            mask = padded([np.ones(len(each.ids)) for each in block], length, 0, left=left)
            counted = np.maximum(mask.cumsum(1, dtype=np.int32) - 1, 0)
            tokens = {
                "ids": padded([each.ids for each in block], length, tokenizer.padding, left=left),
                "mask": mask,
                "types": padded([each.types for each in block], length, 0, left=left),
                "positions": counted if left else np.tile(np.arange(length, dtype=np.int32), (len(block), 1)),
            }
            for spec in specs:
                arrays[spec.name].append(tokens[roles[spec.name]])
        return {name: array.finish() for name, array in arrays.items()}, targets

    def _texts(self, target: str | None, need_target: bool) -> tuple[Sequence[object], object | None]:
        path = Path(self.path)
        suffix = path.suffix.lower()
        if suffix in (*CSV_SUFFIXES, *PARQUET_SUFFIXES):
            table = CsvFile(path) if suffix in CSV_SUFFIXES else ParquetFile(path)
            spec = TensorSpec(self.text, np.dtype(object), (None,))
            inputs, targets = table.read([spec], target=target, need_target=need_target)
            return np.asarray(inputs[self.text]), targets  # type: ignore[return-value]
        if need_target:
            raise DataError(f"{self.name} has no column of targets; give a .csv or .parquet file.").about(self.name)
        try:
            text = read_text(path, _TEXT_LIMIT, "utf-8-sig")
            return [line.rstrip("\n") for line in io.StringIO(text, newline=None)], None  # not at U+2028 and others
        except (OSError, ValueError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise DataError(f"{self.name} cannot be read: {reason}.") from error

    def _length(self, specs: Sequence[TensorSpec], tokenizer: Encoder, texts: Sequence[object]) -> int:
        fixed = {spec.shape[1] for spec in specs if spec.shape is not None and isinstance(spec.shape[1], int)}
        wanted = next(iter(fixed), None)
        if isinstance(wanted, int):
            if self.length not in (None, wanted):
                raise OptionError(
                    f"length is {self.length}, but the model takes {wanted} tokens; leave out length."
                ).about("length", got=self.length, wanted=wanted)
            return wanted
        if self.length is not None:
            return self.length
        longest = 1
        for start in range(0, len(texts), _BLOCK):
            block = tokenizer.encode([str(text) for text in texts[start : start + _BLOCK]])
            longest = max(longest, *(len(each.ids) for each in block))
        return longest


def token_role(spec: TensorSpec) -> str:
    """Return "ids", "mask", "types" or "positions" for an input of a language model."""
    if spec.dtype.kind not in "iub" or spec.shape is None or len(spec.shape) != 2:
        raise DataError(
            f"texts become integers [batch, tokens], but the input '{spec.name}' is {spec.dtype} "
            f"{spec.describe_shape()}."
        )
    name = spec.name.lower()
    parts = {"mask": "mask", "type": "types", "segment": "types", "position": "positions"}
    return next((role for part, role in parts.items() if part in name), "ids")


def padded(rows: Sequence[Array], length: int, padding: int, *, left: bool = False) -> Array:
    """Return rows of one length [rows, length], cut at their ends, and padded there or on the left."""
    found = np.full((len(rows), length), padding, np.int32)
    for row, values in zip(found, rows, strict=True):
        kept = values[:length]
        start = length - len(kept) if left else 0
        row[start : start + len(kept)] = kept
    return found
