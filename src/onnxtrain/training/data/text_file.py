"""Texts as the numbers of a tokenizer, in the inputs that language models have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.errors import DataError, OptionError
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.data.conversion import Array, TensorSpec
from onnxtrain.training.data.csv_file import CSV_SUFFIXES, CsvFile
from onnxtrain.training.data.files import check_regular
from onnxtrain.training.data.growing import GrowingArray
from onnxtrain.training.data.parquet_file import PARQUET_SUFFIXES, ParquetFile
from onnxtrain.training.data.reader import Reader

_BLOCK: Final = 1024
"""How many texts are encoded at a time."""


@checks_arguments
@dataclass(frozen=True)
class TextFile(Reader):
    """Texts with a tokenizer: a column of a CSV, Parquet or Arrow file, or the lines of a ``.txt`` file.

    Of the model's inputs, one whose name has ``mask`` in it is 1 for tokens and 0 for padding, one with ``type`` or
    ``segment`` has the tokenizer's type ids, one with ``position`` counts from 0, and the other has the token ids.
    Texts are cut at, and padded to, one length.

    Args:
        path: the file; the lines of a ``.txt`` file have no targets.
        tokenizer: a ``tokenizer.json``, or a ``tokenizers.Tokenizer``. Its own truncation and padding are not used.
        text: the column of texts.
        length: tokens of a text; by default as many as the model's input has, or the longest text.
    """

    tokenizer: Any
    text: str = "text"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise OptionError(f"length is {self.length}; it needs a number of tokens of at least 1.")

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """The inputs by name, and the targets or None.

        Raises:
            DataError: the file cannot be read, or the inputs are none of a language model.
        """
        roles = {spec.name: _role(spec) for spec in specs}
        if list(roles.values()).count("ids") != 1:
            shown = ", ".join(f"'{spec.name}'" for spec in specs)
            raise DataError(f"{self.name} holds texts, but the inputs {shown} are not one for token ids and its masks.")
        tokenizer = self._tokenizer()
        texts, targets = self._texts(target, need_target)
        if not len(texts):
            raise DataError(f"{self.name} holds no texts.")
        length = self._length(specs, tokenizer, texts)
        arrays = {spec.name: GrowingArray((length,), np.dtype(np.int32)) for spec in specs}
        padding = _padding(tokenizer)
        for start in range(0, len(texts), _BLOCK):
            block = tokenizer.encode_batch([str(text) for text in texts[start : start + _BLOCK]])
            tokens = {
                "ids": _padded([each.ids for each in block], length, padding),
                "mask": _padded([[1] * len(each.ids) for each in block], length, 0),
                "types": _padded([each.type_ids for each in block], length, 0),
                "positions": np.tile(np.arange(length, dtype=np.int32), (len(block), 1)),
            }
            for spec in specs:
                arrays[spec.name].append(tokens[roles[spec.name]])
        return {name: array.finish() for name, array in arrays.items()}, targets

    def _tokenizer(self) -> Any:
        """The tokenizer, a copy without limits of its own."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DataError("texts need tokenizers; install it: pip install 'onnxtrain[tokenizers]'.") from None
        if not isinstance(self.tokenizer, str | os.PathLike):
            if not hasattr(self.tokenizer, "encode_batch"):
                raise OptionError(
                    f"tokenizer is a {type(self.tokenizer).__name__}; it needs the path of a tokenizer.json, or a "
                    "tokenizers.Tokenizer (tokenizer.backend_tokenizer of one of transformers)."
                )
            found = Tokenizer.from_str(self.tokenizer.to_str())
        else:
            path = Path(self.tokenizer)
            if not path.is_file():
                raise DataError(f"There is no file '{path}'; tokenizer needs a tokenizer.json.")
            try:
                found = Tokenizer.from_file(str(path))
            except Exception as error:  # it has no errors of its own
                raise DataError(f"'{path}' is no tokenizer.json: {str(error)[:150]}.") from error
        found.no_truncation()
        return found

    def _texts(self, target: str | None, need_target: bool) -> tuple[Sequence[object], object | None]:
        path = Path(self.path)
        suffix = path.suffix.lower()
        if suffix in (*CSV_SUFFIXES, *PARQUET_SUFFIXES):
            table = CsvFile(path) if suffix in CSV_SUFFIXES else ParquetFile(path)
            spec = TensorSpec(self.text, np.dtype(object), (None,))
            inputs, targets = table.read([spec], target=target, need_target=need_target)
            return np.asarray(inputs[self.text]), targets  # type: ignore[return-value]
        if need_target:
            raise DataError(f"{self.name} has no column of targets; give a .csv or .parquet file.")
        try:
            check_regular(path)
            return path.read_text(encoding="utf-8-sig").splitlines(), None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.name} cannot be read: {error}.") from error

    def _length(self, specs: Sequence[TensorSpec], tokenizer: Any, texts: Sequence[object]) -> int:
        fixed = {spec.shape[1] for spec in specs if spec.shape is not None and isinstance(spec.shape[1], int)}
        wanted = next(iter(fixed), None)
        if isinstance(wanted, int):
            if self.length not in (None, wanted):
                raise OptionError(f"length is {self.length}, but the model takes {wanted} tokens; leave it out.")
            return wanted
        if self.length is not None:
            return self.length
        longest = 1
        for start in range(0, len(texts), _BLOCK):
            block = tokenizer.encode_batch([str(text) for text in texts[start : start + _BLOCK]])
            longest = max(longest, *(len(each.ids) for each in block))
        return longest


def _role(spec: TensorSpec) -> str:
    if spec.dtype.kind not in "iub" or spec.shape is None or len(spec.shape) != 2:
        raise DataError(
            f"texts become whole numbers [batch, tokens], but the input '{spec.name}' is {spec.dtype} "
            f"{spec.describe_shape()}."
        )
    name = spec.name.lower()
    parts = {"mask": "mask", "type": "types", "segment": "types", "position": "positions"}
    return next((role for part, role in parts.items() if part in name), "ids")


def _padding(tokenizer: Any) -> int:
    """The id of padding: the tokenizer's own, or that of a token of such a name, or 0."""
    if tokenizer.padding is not None:
        found = int(tokenizer.padding["pad_id"])
        tokenizer.no_padding()
        return found
    names = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")
    return next((int(found) for name in names if (found := tokenizer.token_to_id(name)) is not None), 0)


def _padded(rows: Sequence[Sequence[int]], length: int, padding: int) -> Array:
    found = np.full((len(rows), length), padding, np.int32)
    for row, values in zip(found, rows, strict=True):
        kept = values[:length]
        row[: len(kept)] = kept
    return found
