"""Rows of texts in the forms that fine-tuning data has: chats, prompts with completions, instructions, plain text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.csv_file import CSV_SUFFIXES, CsvFile
from onnxtrain.data.files import Reader
from onnxtrain.data.map_dataset import is_hugging_face, is_stream, refuse_other_kinds
from onnxtrain.data.parquet_file import PARQUET_SUFFIXES, ParquetFile
from onnxtrain.errors import DataError
from onnxtrain.model_file.small_files import MEGABYTE, RefusedFileError, check_regular_file, parse_json

JSON_SUFFIXES: Final = (".jsonl", ".ndjson")
TEXT_SUFFIXES: Final = (*JSON_SUFFIXES, ".txt", *CSV_SUFFIXES, *PARQUET_SUFFIXES)
"""Endings of files that hold rows of texts."""

FORMS: Final = (("messages",), ("prompt", "completion"), ("instruction", "output"), ("text",))
"""Columns of each form of a row, the first that fits."""

_COLUMNS: Final = (*dict.fromkeys(name for form in FORMS for name in form), "input", "tools", "chat_template_kwargs")

_LINE_LIMIT: Final = 16 * MEGABYTE
"""Maximum bytes of a line."""


_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Row:
    """A row in the form that a template or a tokenizer takes."""

    label: str
    text: str = ""
    start: int = 0
    messages: list[dict[str, Any]] | None = None
    prompt: int | None = None
    tools: Any = None
    options: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """Its number of characters; of a chat about that of its JSON."""
        chat = (self.messages, self.tools, self.options)
        return len(self.text) + sum(len(str(part)) for part in chat if part is not None)

    @classmethod
    def of(cls, given: Any, label: str) -> Row:
        """Convert a row."""
        columns = given if isinstance(given, Mapping) else {}
        form = next((form for form in FORMS if all(columns.get(name) is not None for name in form)), None)
        if form is None:
            held = f"holds {', '.join(map(repr, list(columns)[:8]))}" if columns else f"is {kind_in_words(given)}"
            raise DataError(
                f"{label} {held}; a row needs messages, prompt and completion, instruction and output, or text."
            )
        tools, options = columns.get("tools"), columns.get("chat_template_kwargs")
        if isinstance(tools, str):
            try:
                tools = parse_json(tools)
            except RefusedFileError as error:
                raise DataError(f"tools of {label} are not JSON: {error}.") from error
        if options is not None and not isinstance(options, Mapping):
            raise DataError(f"chat_template_kwargs of {label} is {kind_in_words(options)}; it needs names and values.")
        by_template: dict[str, Any] = {"tools": tools or None, "options": options}
        if form == ("text",):
            return cls(label, text_of(columns, "text", label))
        if form == ("messages",):
            return cls(label, messages=_messages(columns, "messages", label), **by_template)
        if form == ("instruction", "output"):
            task, answer = (text_of(columns, name, label) for name in form)
            more = text_of(columns, "input", label) if columns.get("input") else ""
            question = f"{task}\n\n{more}" if more else task
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return cls(label, messages=chat, prompt=1, **by_template)
        if isinstance(columns["prompt"], str) and isinstance(columns["completion"], str):
            return cls(label, columns["prompt"] + columns["completion"], len(columns["prompt"]))
        prompt, completion = (_messages(columns, name, label) for name in form)
        return cls(label, messages=prompt + completion, prompt=len(prompt), **by_template)


_KINDS: Final = {"bool": "true or false", "int": "a number", "float": "a number", "NoneType": "null", "str": "a text"}


def kind_in_words(value: Any) -> str:
    """Return the kind of a JSON value in words."""
    return _KINDS.get(type(value).__name__, f"a {type(value).__name__}")


def forms_in_words(forms: Sequence[Sequence[str]]) -> str:
    """Return the columns of each form of a row in words.

    >>> forms_in_words([("prompt", "chosen", "rejected"), ("chosen", "rejected")])
    'prompt, chosen and rejected, or chosen and rejected'
    """
    shown = (" and ".join(filter(None, (", ".join(form[:-1]), form[-1]))) for form in forms)
    return ", or ".join(shown)


def text_of(columns: Mapping[str, Any], name: str, label: str) -> str:
    """Return the text in a column of a row."""
    if not isinstance(columns[name], str):
        raise DataError(f"{name} of {label} is {kind_in_words(columns[name])}; it needs a text.")
    return str(columns[name])


def _messages(columns: Mapping[str, Any], name: str, label: str) -> list[dict[str, Any]]:
    given = columns[name]
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if not isinstance(given, list | tuple) or not given:
        shown = "empty" if isinstance(given, list | tuple) else kind_in_words(given)
        raise DataError(f"{name} of {label} is {shown}; it needs a list of messages with role and content.")
    found = []
    for number, message in enumerate(given, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} of {name} of {label} has no role; it needs role and content.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"message {number} of {name} of {label} has no content.")
        if not isinstance(message.get("content"), str | list | tuple | np.ndarray | None):
            kind = kind_in_words(message["content"])
            raise DataError(
                f"content of message {number} of {name} of {label} is {kind}; it needs a text, or a list of parts."
            )
        # Tables have all columns of all messages: None stands for a missing one.
        found.append({key: value for key, value in message.items() if value is not None or key == "content"})
    return found


def name_of(source: Any) -> str:
    """Return the name of a source in messages."""
    if isinstance(source, Reader):
        return source.name
    return f"'{Path(source)}'" if isinstance(source, str | os.PathLike) else "the dataset"


_BLOCK_SIZE: Final = MEGABYTE
"""Characters from which a block of rows is encoded."""


def in_blocks(rows: Iterator[_Item], most: int, size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yield rows in lists of at most ``most``, fewer where they are long."""
    block: list[_Item] = []
    characters = 0
    for row in rows:
        block.append(row)
        characters += size(row)
        if len(block) == most or characters >= _BLOCK_SIZE:
            yield block
            block, characters = [], 0
    if block:
        yield block


def is_json_lines(source: Any) -> bool:
    """Return whether a source is the path of a file with one JSON document a line, which holds rows of texts only."""
    return isinstance(source, str | os.PathLike) and Path(source).suffix.lower() in JSON_SUFFIXES


def is_text_file(source: Any) -> bool:
    """Return whether a source is a reader of tables, or the path of a file of texts by its ending."""
    if isinstance(source, str | os.PathLike):
        return Path(source).suffix.lower() in TEXT_SUFFIXES
    return isinstance(source, CsvFile | ParquetFile)


def holds_texts(source: Any) -> bool:
    """Return whether a source has the columns of a form of rows: a file by its ending, a dataset by its columns."""
    if is_hugging_face(source) and not isinstance(source, dict):
        return any(set(source.column_names or ()).issuperset(form) for form in FORMS)
    return is_text_file(source) or (isinstance(source, list) and bool(source) and is_row(source[0], FORMS))


def is_row(first: Any, forms: Sequence[Sequence[str]]) -> bool:
    """Return whether the first item of data is a row of texts: it has the columns of a form, a text, or messages."""
    if not isinstance(first, Mapping) or holds_arrays(first):
        return False
    texts = any(isinstance(value, str) or _is_chat(value) for value in first.values())
    return texts or any(set(first).issuperset(form) for form in forms)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def holds_arrays(row: Mapping[str, Any]) -> bool:
    """Return whether a row holds arrays."""
    return any(hasattr(value, "shape") for value in row.values())


def read_rows(source: Any) -> Iterator[Row]:
    """Read the rows of a file, a reader, a dataset, or a list."""
    name = name_of(source)
    for label, row in read_records(source):
        yield Row.of(row, f"{label} of {name}")


def read_records(
    source: Any, forms: Sequence[tuple[str, ...]] = FORMS, columns: Sequence[str] = _COLUMNS
) -> Iterator[tuple[str, Any]]:
    """Read the rows of a file, a reader, a dataset, or a list, as they are, each with its label for messages."""
    if isinstance(source, str | os.PathLike):
        suffix = Path(source).suffix.lower()
        if suffix in CSV_SUFFIXES:
            source = CsvFile(source)
        elif suffix in PARQUET_SUFFIXES:
            source = ParquetFile(source)
    if isinstance(source, CsvFile):
        yield from _of_csv(source, forms, columns)
    elif isinstance(source, ParquetFile):
        yield from ((f"row {number}", row) for number, row in enumerate(source.rows(columns)))
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        parse = _json if is_json_lines(path) else None
        for number, line in _lines(path):
            label = f"line {number}"
            yield label, {"text": line} if parse is None else parse(line, f"{label} of '{path}'")
    elif isinstance(source, Iterable):
        if is_hugging_face(source):
            plain: Any = source
            if not is_stream(source):
                refuse_other_kinds(source)
            source = plain.with_format(None)
        yield from ((f"row {number}", row) for number, row in enumerate(source))
    else:
        raise DataError(f"the data is {kind_in_words(source)}; it needs a path, a dataset, or a list of rows.").about(
            "data", got=kind_in_words(source)
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank, with their numbers."""
    try:
        check_regular_file(path)
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LINE_LIMIT + 1):
                number += 1
                if len(line) > _LINE_LIMIT:
                    raise DataError(f"line {number} of '{path}' exceeds {_LINE_LIMIT // MEGABYTE} MiB: divide it.")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except FileNotFoundError:
        raise DataError(f"There is no file '{path}'; give a .jsonl, .txt, .csv or .parquet file of texts.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"line {number} of '{path}' is not in UTF-8 ({error.reason}).") from error
    except (OSError, RefusedFileError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"'{path}' cannot be read: {reason}.") from error


def _json(line: str, label: str) -> Any:
    try:
        return parse_json(line)
    except RefusedFileError as error:
        cause = error.__cause__
        reason = f"{cause.msg} at character {cause.pos + 1}" if isinstance(cause, json.JSONDecodeError) else error
        raise DataError(f"{label} is not JSON: {reason}.") from error


def _of_csv(file: CsvFile, forms: Sequence[tuple[str, ...]], columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    held = file.column_names()
    known = [name for name in columns if name in held]
    if not any(set(known).issuperset(form) for form in forms):
        wanted = forms_in_words([form for form in forms if form != ("messages",)])
        raise DataError(f"{file.name} has the columns {', '.join(held[:8])}; rows of texts need {wanted}.").about(
            file.name, got=held, wanted=wanted
        )
    specs = [TensorSpec(name, np.dtype(object), (None,)) for name in known]
    inputs = file.read(specs, need_target=False)[0]
    texts = [np.asarray(inputs[name]).astype(object) for name in known]
    for number, values in enumerate(zip(*texts, strict=True)):
        yield f"row {number}", {name: str(value) for name, value in zip(known, values, strict=True)}
