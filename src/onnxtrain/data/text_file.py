"""Texts as token ids, in the inputs that language models have.

A ``tokenizer.json`` runs in a process of its own with limits of time and memory: it may abort that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.csv_file import CSV_SUFFIXES, CsvFile
from onnxtrain.data.files import GrowingArray, Reader
from onnxtrain.data.parquet_file import PARQUET_SUFFIXES, ParquetFile
from onnxtrain.errors import DataError, OptionError
from onnxtrain.model_file.small_files import MEGABYTE, RefusedFileError, parse_json, read_text
from onnxtrain.spelling import checks_arguments

_FILE_LIMIT: Final = 256 * MEGABYTE

_MEMORY: Final = 4 << 30
"""Bytes that the process of a tokenizer may map, besides 64 for each byte of its file."""

_SECONDS: Final = 20.0
_BYTES_PER_SECOND: Final = 20_000
"""Time limits of a block of texts; tokenizers encode millions of bytes per second."""

_PADDING_NAMES: Final = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")

_LARGEST_ID: Final = 2**31 - 1

Rows = list[tuple[Array, Array]]
"""Token ids and type ids of each text."""


class Encoder(Protocol):
    """Interface of tokenizers."""

    padding: int
    """Padding id."""

    def encode(self, texts: Sequence[str]) -> Rows:
        """Encode texts.

        Raises:
            DataError: The tokenizer fails on them.
        """


def open_tokenizer(given: Any) -> Encoder:
    """Open a tokenizer and disable its own padding and truncation.

    Args:
        given: Path of a tokenizer.json, which runs in a process of its own, or a ``tokenizers.Tokenizer``.

    Raises:
        DataError: The file cannot be read, or ``tokenizers`` is not installed.
        OptionError: The value is neither.
    """
    try:
        import tokenizers
    except ImportError:
        raise DataError("texts need tokenizers; install it: pip install 'onnxtrain[tokenizers]'.") from None
    if isinstance(given, str | os.PathLike):
        return _of_file(Path(given))
    if not hasattr(given, "encode_batch"):
        raise OptionError(
            f"tokenizer is a {type(given).__name__}; it needs the path of a tokenizer.json, or a "
            "tokenizers.Tokenizer (tokenizer.backend_tokenizer of one of transformers)."
        )
    settings = parse_json(given.to_str())
    padding = _own_padding(settings, "the tokenizer")
    return _Here(tokenizers.Tokenizer.from_str(json.dumps(settings)), padding)


def _of_file(path: Path) -> Encoder:
    label = f"'{path}'"
    try:
        settings = parse_json(read_text(path, _FILE_LIMIT))
    except FileNotFoundError:
        raise DataError(f"There is no file {label}; tokenizer needs a tokenizer.json.") from None
    except (OSError, RefusedFileError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"{label} is not a tokenizer.json: {reason}.") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise DataError(f"{label} is not a tokenizer.json: it has no model.")
    padding = _own_padding(settings, label)
    return _Elsewhere(label, json.dumps(settings), padding)


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

    def __init__(self, tokenizer: Any, padding: int | None) -> None:
        self._tokenizer = tokenizer
        ids = (tokenizer.token_to_id(name) for name in _PADDING_NAMES)
        self.padding = padding if padding is not None else next((found for found in ids if found is not None), 0)

    def encode(self, texts: Sequence[str]) -> Rows:
        """Encode texts."""
        try:
            found = self._tokenizer.encode_batch(list(texts))
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # of Rust: not an Exception
                raise DataError(f"the tokenizer cannot encode the texts: {str(error)[:200]}.") from error
            raise
        return [
            (_checked(np.asarray(each.ids, np.int64), "the tokenizer"), np.asarray(each.type_ids, np.int64))
            for each in found
        ]


class _Elsewhere:
    """A tokenizer file, in a process of its own."""

    def __init__(self, label: str, settings: str, padding: int | None) -> None:
        self._label = label
        self._memory = _MEMORY + 64 * len(settings)
        worker = Path(__file__).with_name("tokenizing_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"MALLOC_ARENA_MAX": "4"},
            start_new_session=True,  # Ctrl-C goes to this process only, which ends the other
        )
        weakref.finalize(self, _end, self._process)
        request = {"tokenizer": settings, "memory": self._memory, "names": _PADDING_NAMES}
        try:
            answer = self._ask(request, len(settings))
        except DataError as error:
            raise DataError(f"{label} cannot be used as a tokenizer: {error}") from error
        ids = [found for found in answer["ids"] if found is not None]
        self.padding = padding if padding is not None else next(iter(ids), 0)

    def encode(self, texts: Sequence[str]) -> Rows:
        """Encode texts."""
        try:
            answer = self._ask({"texts": list(texts)}, sum(map(len, texts)))
            lengths = answer["lengths"]
            total = sum(lengths)
            numbers = np.frombuffer(self._read(8 * total, self._deadline), np.uint32)
        except DataError as error:
            raise DataError(f"{self._label} cannot encode the texts: {error}") from error
        ids, types = _checked(numbers[:total], self._label), numbers[total:]
        ends = np.cumsum(lengths)[:-1]
        return list(zip(np.split(ids, ends), np.split(types, ends), strict=True))

    def _ask(self, request: dict[str, Any], size: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        data = json.dumps(request).encode()
        self._seconds = _SECONDS + size / _BYTES_PER_SECOND
        self._deadline = time.monotonic() + self._seconds
        try:
            self._process.stdin.write(struct.pack("<Q", len(data)) + data)
            self._process.stdin.flush()
        except OSError as error:
            raise DataError(self._end_of_process()) from error
        (length,) = struct.unpack("<Q", self._read(8, self._deadline))
        answer: dict[str, Any] = json.loads(self._read(length, self._deadline))
        if "error" in answer:
            raise DataError(f"{' '.join(str(answer['error']).split())[:200]}.")
        return answer

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, parts = self._process.stdout.fileno(), bytearray()
        while len(parts) < size:
            left = deadline - time.monotonic()
            if hasattr(select, "poll") and left > 0:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN | select.POLLHUP)
                ready = bool(poll.poll(left * 1000))
            else:
                ready = left > 0
            if not ready:
                _end(self._process)
                raise DataError(f"it takes longer than {self._seconds:.0f} s, the time limit for these texts.")
            chunk = os.read(descriptor, min(size - len(parts), 1 << 20))
            if not chunk:
                raise DataError(self._end_of_process())
            parts += chunk
        return bytes(parts)

    def _end_of_process(self) -> str:
        code = self._process.wait()
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended ({end}): it crashed, or exceeded its memory limit of {self._memory / 2**30:.1f} GiB."


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


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
    ids. Texts are truncated and padded to one length.

    Args:
        path: The file; the lines of a ``.txt`` file have no targets.
        tokenizer: A ``tokenizer.json``, which runs in a process of its own with limits of time and memory, or a
            ``tokenizers.Tokenizer``. Its own truncation and padding are not used.
        text: Column of texts.
        length: Tokens per text; by default the size of the model's input, or the length of the longest text.
    """

    tokenizer: Any
    text: str = "text"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise OptionError(f"length is {self.length}; it must be a number of tokens of at least 1.")

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return the inputs by name, and the targets or None.

        Raises:
            DataError: The file cannot be read, or the inputs are not those of a language model.
        """
        roles = {spec.name: _role(spec) for spec in specs}
        if list(roles.values()).count("ids") != 1:
            shown = ", ".join(f"'{spec.name}'" for spec in specs)
            raise DataError(f"{self.name} holds texts, but the inputs {shown} are not token ids with masks.")
        tokenizer = open_tokenizer(self.tokenizer)
        texts, targets = self._texts(target, need_target)
        if not len(texts):
            raise DataError(f"{self.name} holds no texts.")
        length = self._length(specs, tokenizer, texts)
        arrays = {spec.name: GrowingArray((length,), np.dtype(np.int32)) for spec in specs}
        for start in range(0, len(texts), _BLOCK):
            block = tokenizer.encode([str(text) for text in texts[start : start + _BLOCK]])
            tokens = {
                "ids": _padded([ids for ids, _ in block], length, tokenizer.padding),
                "mask": _padded([np.ones(len(ids)) for ids, _ in block], length, 0),
                "types": _padded([types for _, types in block], length, 0),
                "positions": np.tile(np.arange(length, dtype=np.int32), (len(block), 1)),
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
            raise DataError(f"{self.name} has no column of targets; give a .csv or .parquet file.")
        try:
            return read_text(path, _TEXT_LIMIT, "utf-8-sig").splitlines(), None
        except (OSError, ValueError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise DataError(f"{self.name} cannot be read: {reason}.") from error

    def _length(self, specs: Sequence[TensorSpec], tokenizer: Encoder, texts: Sequence[object]) -> int:
        fixed = {spec.shape[1] for spec in specs if spec.shape is not None and isinstance(spec.shape[1], int)}
        wanted = next(iter(fixed), None)
        if isinstance(wanted, int):
            if self.length not in (None, wanted):
                raise OptionError(f"length is {self.length}, but the model takes {wanted} tokens; leave out length.")
            return wanted
        if self.length is not None:
            return self.length
        longest = 1
        for start in range(0, len(texts), _BLOCK):
            block = tokenizer.encode([str(text) for text in texts[start : start + _BLOCK]])
            longest = max(longest, *(len(ids) for ids, _ in block))
        return longest


def _role(spec: TensorSpec) -> str:
    if spec.dtype.kind not in "iub" or spec.shape is None or len(spec.shape) != 2:
        raise DataError(
            f"texts become integers [batch, tokens], but the input '{spec.name}' is {spec.dtype} "
            f"{spec.describe_shape()}."
        )
    name = spec.name.lower()
    parts = {"mask": "mask", "type": "types", "segment": "types", "position": "positions"}
    return next((role for part, role in parts.items() if part in name), "ids")


def _padded(rows: Sequence[Array], length: int, padding: int) -> Array:
    found = np.full((len(rows), length), padding, np.int32)
    for row, values in zip(found, rows, strict=True):
        kept = values[:length]
        row[: len(kept)] = kept
    return found
