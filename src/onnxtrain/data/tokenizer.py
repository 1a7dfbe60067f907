"""Tokenizers: texts to token ids.

A ``tokenizer.json`` runs in a process of its own with limits of time and memory: it may abort that process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.data.limited_process import LimitedProcess
from onnxtrain.errors import DataError, OptionError
from onnxtrain.model_file.small_files import MEGABYTE, RefusedFileError, parse_json, read_json, read_text

_FILE_LIMIT: Final = 256 * MEGABYTE

_MEMORY: Final = 4 << 30
"""Bytes that the process of a tokenizer may map, besides 64 for each byte of its file."""

_SECONDS: Final = 20.0
_CHARACTERS_PER_SECOND: Final = 20_000
"""Time limits of a block of texts; tokenizers encode millions of characters per second."""

_PADDING_NAMES: Final = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")

LONGEST_TOKEN: Final = 1000
"""Characters of the longest special token."""

_LARGEST_ID: Final = 2**31 - 1


Text = str | tuple[str, str]
"""A text, or a pair of texts in one row, such as a query with a document."""


class Encoded(NamedTuple):
    """A text as tokens."""

    ids: Array
    types: Array
    starts: Array
    ends: Array


class Sides(NamedTuple):
    """Settings for texts of another length than their row."""

    pad_token: str | None = None
    pads_left: bool = False
    cuts_left: bool = False


def cut_text(text: Encoded, limit: int, *, left: bool = False) -> Encoded:
    """Return a text of at most this many tokens; tokens that the tokenizer adds at its ends stay.

    Example:
        >>> ids = np.array([101, 7, 8, 9, 102])
        >>> starts, ends = np.array([0, 0, 2, 4, 0]), np.array([0, 1, 3, 5, 0])
        >>> cut_text(Encoded(ids, np.zeros(5, int), starts, ends), 3).ids.tolist()
        [101, 7, 102]
    """
    size = len(text.ids)
    if size <= limit:
        return text
    read = np.flatnonzero(text.ends > text.starts)
    if left:
        before = min(int(read[0]) if read.size else 0, limit - 1)
        kept = np.append(np.arange(before), np.arange(size - limit + before, size))
    else:
        added = min(size - 1 - int(read[-1]) if read.size else 0, limit - 1)
        kept = np.append(np.arange(limit - added), np.arange(size - added, size))
    return Encoded(*(each[kept] for each in text))


class Encoder(Protocol):
    """Interface of tokenizers."""

    padding: int
    """Padding id."""

    sides: Sides
    """The sides on which rows are padded and cut."""

    def encode(self, texts: Sequence[Text], *, special: bool = True, size: int | None = None) -> list[Encoded]:
        """Encode texts."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; ``None`` where there is none."""


def _size(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def open_tokenizer(given: Any) -> Encoder:
    """Open a tokenizer and disable its own padding and truncation."""
    try:
        import tokenizers
    except ImportError:
        raise DataError("texts need tokenizers; install it: pip install tokenizers.") from None
    if isinstance(given, str | os.PathLike):
        return _of_file(Path(given))
    if not hasattr(given, "encode_batch"):
        raise OptionError(
            f"tokenizer is a {type(given).__name__}; it needs the path of a tokenizer.json, or a "
            "tokenizers.Tokenizer (tokenizer.backend_tokenizer of one of transformers)."
        )
    settings = parse_json(given.to_str())
    sides = _own_sides(settings)
    padding = _own_padding(settings, "the tokenizer")
    return _Here(tokenizers.Tokenizer.from_str(json.dumps(settings)), padding, sides)


def _of_file(path: Path) -> Encoder:
    label = f"'{path}'"
    try:
        settings = parse_json(read_text(path, _FILE_LIMIT))
    except FileNotFoundError:
        raise DataError(f"There is no file {label}; tokenizer needs a tokenizer.json.").about(label) from None
    except (OSError, RefusedFileError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"{label} is not a tokenizer.json: {reason}.") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise DataError(f"{label} is not a tokenizer.json: it has no model.")
    sides = _sides_beside(path, _own_sides(settings))
    padding = _own_padding(settings, label)
    return _Elsewhere(label, json.dumps(settings), padding, sides)


def _own_sides(settings: dict[str, Any]) -> Sides:
    """Return where the tokenizer's own settings pad and cut; they are on the right where it does neither."""
    found = (settings.get(name) for name in ("padding", "truncation"))
    pads, cuts = (isinstance(each, dict) and each.get("direction") == "Left" for each in found)
    return Sides(None, pads, cuts)


def _sides_beside(path: Path, own: Sides) -> Sides:
    """Return the settings of ``tokenizer_config.json`` beside a tokenizer, else its own."""
    try:
        config = read_json(path.with_name("tokenizer_config.json"), _FILE_LIMIT, finite=False)
    except (OSError, RefusedFileError):
        return own
    if not isinstance(config, dict):
        return own
    token = config.get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    sides = [
        config[name] == "left" if config.get(name) in ("left", "right") else before
        for name, before in (("padding_side", own.pads_left), ("truncation_side", own.cuts_left))
    ]
    return Sides(token if isinstance(token, str) and len(token) <= LONGEST_TOKEN else None, *sides)


def _own_padding(settings: dict[str, Any], label: str) -> int | None:
    """Return the padding id of the settings, and remove padding and truncation from them."""
    padding = settings.get("padding")
    settings["padding"] = settings["truncation"] = None
    if not isinstance(padding, dict) or padding.get("pad_id") is None:
        return None
    found = padding["pad_id"]
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= _LARGEST_ID:
        raise DataError(f"{label} has the padding id {found!r}; it must be an integer of at least 0 and below 2^31.")
    return found


def _checked(ids: Array, label: str) -> Array:
    if ids.size and int(ids.max()) > _LARGEST_ID:
        raise DataError(f"{label} has the token id {int(ids.max())}; ids must be below 2^31.")
    return ids


class _Here:
    """A tokenizer object of the caller, in this process."""

    def __init__(self, tokenizer: Any, padding: int | None, sides: Sides) -> None:
        self._tokenizer, self.sides = tokenizer, sides
        ids = (tokenizer.token_to_id(name) for name in _PADDING_NAMES)
        self.padding = padding if padding is not None else next((found for found in ids if found is not None), 0)

    def encode(self, texts: Sequence[Text], *, special: bool = True, size: int | None = None) -> list[Encoded]:
        """Encode texts."""
        try:
            found = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # of Rust: not an Exception
                raise DataError(f"the tokenizer cannot encode the texts: {str(error)[:200]}.") from error
            raise
        return [_encoded(each) for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; ``None`` where there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


def _encoded(found: Any) -> Encoded:
    offsets = np.asarray(found.offsets, np.int64).reshape(-1, 2)
    ids = _checked(np.asarray(found.ids, np.int64), "the tokenizer")
    return Encoded(ids, np.asarray(found.type_ids, np.int64), offsets[:, 0], offsets[:, 1])


class _Elsewhere:
    """A tokenizer file, in a process of its own."""

    def __init__(self, label: str, settings: str, padding: int | None, sides: Sides) -> None:
        self._label, self.sides = label, sides
        names = [*([] if sides.pad_token is None else [sides.pad_token]), *_PADDING_NAMES]
        try:
            self._process = LimitedProcess(
                Path(__file__).with_name("tokenizing_worker.py"),
                {"tokenizer": settings, "names": names},
                memory=_MEMORY + 64 * len(settings),
                seconds=_SECONDS,
                speed=_CHARACTERS_PER_SECOND,
            )
        except DataError as error:
            raise DataError(f"{label} cannot be used as a tokenizer: {error}") from error
        known = [found for found in self._process.ready if found is not None]
        named = sides.pad_token is not None and self._process.ready[0] is not None
        self.padding = padding if padding is not None and not named else next(iter(known), 0)

    def encode(self, texts: Sequence[Text], *, special: bool = True, size: int | None = None) -> list[Encoded]:
        """Encode texts."""
        try:
            size = sum(map(_size, texts)) if size is None else size
            lengths, data = self._process.ask({"texts": list(texts), "special": special}, size)
        except DataError as error:
            raise DataError(f"{self._label} cannot encode the texts: {error}") from error
        columns = np.frombuffer(data, np.uint32).reshape(4, -1)
        _checked(columns[0], self._label)
        parts = np.split(columns, np.cumsum(lengths)[:-1], axis=1)
        return [Encoded(*part) for part in parts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        try:
            return str(self._process.ask({"ids": list(ids)}, len(ids))[0])
        except DataError as error:
            raise DataError(f"{self._label} cannot decode the tokens: {error}") from error

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; ``None`` where there is none."""
        found = self._process.ask({"token": token})[0]
        return found if isinstance(found, int) else None
