"""Rows of texts in the forms that fine-tuning data has: chats, prompts with completions, instructions, plain text."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import numpy as np

from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.csv_file import CSV_SUFFIXES, CsvFile
from onnxtrain.data.files import Reader
from onnxtrain.data.map_dataset import is_hugging_face, is_stream, refuse_other_kinds
from onnxtrain.data.parquet_file import PARQUET_SUFFIXES, ParquetFile
from onnxtrain.errors import DataError, OptionError
from onnxtrain.model_file.small_files import MEGABYTE, RefusedFileError, check_regular_file, parse_json

JSON_SUFFIXES: Final = (".jsonl", ".ndjson")
TEXT_SUFFIXES: Final = (*JSON_SUFFIXES, ".json", ".txt", *CSV_SUFFIXES, *PARQUET_SUFFIXES)
"""Endings of files that hold rows of texts; all but tables may be compressed, ``.jsonl.gz``."""

FORMS: Final = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("text",))
"""Columns of each form of a row, the first that fits."""

_MORE: Final = ("input", "history", "system", "tools", "chat_template_kwargs")
_COLUMNS: Final = (*dict.fromkeys(name for form in FORMS for name in form), *_MORE)

_ROLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""Roles by their names in ShareGPT's form, ``{"from": "human", "value": "..."}``."""

_ALPACA: Final = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
)
"""Beginning of Stanford Alpaca's prompt, for instructions without a chat template and a system message."""

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
    plain: Row | None = None
    """The row without a chat template, if it may do without."""

    @property
    def size(self) -> int:
        """Its number of characters; of a chat about that of its JSON."""
        chat = (self.messages, self.tools, self.options)
        return len(self.text) + sum(len(str(part)) for part in chat if part is not None)

    @classmethod
    def of(cls, given: Any, label: str) -> Row:
        """Convert a row."""
        columns = {name: value for name, value in given.items() if not is_nan(value)} if is_mapping(given) else {}
        form = next((form for form in FORMS if all(columns.get(name) is not None for name in form)), None)
        if form is None:
            held = f"holds {', '.join(map(repr, list(columns)[:8]))}" if columns else f"is {kind_in_words(given)}"
            raise DataError(
                f"{label} {held}; a row needs messages, prompt and completion, instruction and output, conversations, "
                "or text."
            )
        tools, options = columns.get("tools"), columns.get("chat_template_kwargs")
        if isinstance(tools, str) and tools.strip():
            try:
                tools = parse_json(tools)
            except RefusedFileError as error:
                raise DataError(f"tools of {label} are not JSON: {error}.") from error
        if options is not None and not isinstance(options, Mapping):
            raise DataError(f"chat_template_kwargs of {label} is {kind_in_words(options)}; it needs names and values.")
        by_template: dict[str, Any] = {"tools": tools or None, "options": options}
        if form == ("text",):
            return cls(label, text_of(columns, "text", label))
        system = [{"role": "system", "content": text_of(columns, "system", label)}] if columns.get("system") else []
        if form in (("messages",), ("conversations",)):
            return cls(label, messages=system + _messages(columns, form[0], label), **by_template)
        if form == ("instruction", "output"):
            task, answer = (text_of(columns, name, label) for name in form)
            more = text_of(columns, "input", label) if columns.get("input") else ""
            question = f"{task}\n\n{more}" if more else task
            earlier = _history(columns, label)
            chat = [*system, *earlier, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            paired, given_input = (", paired with an input that provides further context", f"### Input:\n{more}\n\n")
            first = system[0]["content"] if system else _ALPACA.format(paired if more else "")
            before = f"{first}\n\n### Instruction:\n{task}\n\n{given_input if more else ''}### Response:\n"
            plain = None if earlier else cls(label, before + answer, len(before))
            asked = None if earlier else len(chat) - 1  # earlier answers are learned, too
            return cls(label, messages=chat, prompt=asked, plain=plain, **by_template)
        if isinstance(columns["prompt"], str) and isinstance(columns["completion"], str):
            if system:
                raise DataError(f"{label} has a system message, but its prompt is a text; it needs a list of messages.")
            return cls(label, columns["prompt"] + columns["completion"], len(columns["prompt"]))
        prompt, completion = (_messages(columns, name, label) for name in form)
        prompt = system + prompt
        return cls(label, messages=prompt + completion, prompt=len(prompt), **by_template)


def is_nan(value: Any) -> bool:
    """Return whether a value is NaN, which tables have where a value is missing."""
    return isinstance(value, float) and math.isnan(value)


def is_mapping(value: Any) -> bool:
    """Return whether a row has named columns."""
    return isinstance(value, Mapping)


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
        message = _with_role(message, f"message {number} of {name} of {label}")
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} of {name} of {label} has no role; it needs role and content.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"message {number} of {name} of {label} has no content.")
        if not isinstance(message.get("content"), str | list | tuple | np.ndarray | None):
            kind = kind_in_words(message["content"])
            raise DataError(
                f"content of message {number} of {name} of {label} is {kind}; it needs a text, or a list of parts."
            )
        weight = message.get("weight")
        if not (weight is None or is_nan(weight)) and weight not in (0, 1):
            raise DataError(
                f"weight of message {number} of {name} of {label} is {weight!r:.80}; it is 0 for an answer that is not "
                "learned, else 1."
            )
        # Tables have all columns of all messages: None stands for a missing one.
        found.append({key: value for key, value in message.items() if value is not None or key == "content"})
    return found


def _history(columns: Mapping[str, Any], label: str) -> list[dict[str, Any]]:
    """Return the earlier questions and answers of an instruction, as LLaMA-Factory has them: pairs of texts."""
    given = columns.get("history")
    given = given.tolist() if isinstance(given, np.ndarray) else given
    pairs = [list(pair) if isinstance(pair, list | tuple | np.ndarray) else [] for pair in given or ()]
    if not isinstance(given, list | tuple | None) or not all([*map(type, pair)] == [str, str] for pair in pairs):
        raise DataError(f"history of {label} is {given!r:.80}; it needs a list of pairs, [question, answer].")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _with_role(message: Any, label: str) -> Any:
    """Return a message of ShareGPT's form with role and content; others as they are."""
    if not isinstance(message, Mapping) or "from" not in message or message.get("role") is not None:
        return message
    role = _ROLES.get(str(message["from"]).lower())
    if role is None:
        raise DataError(f"{label} is from {message['from']!r}; it needs 'human', 'gpt', 'system' or 'tool'.")
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "role")}
    return {"role": role, "content": message.get("value"), **rest}


class Broken:
    """Counts rows that cannot be read; if they are not skipped, the first one is an error."""

    def __init__(self, *, skip: bool) -> None:
        self.skip, self.count, self.first = skip, 0, ""

    def add(self, error: DataError) -> None:
        """Count a row, or raise its error."""
        if not self.skip:
            raise error
        self.count, self.first = self.count + 1, self.first or str(error)

    def hints(self, name: str, read: int) -> tuple[str, ...]:
        """Return a sentence about the rows that were skipped."""
        if not self.count:
            return ()
        return (f"{name}: {self.count:,} of {read:,} rows cannot be read and are skipped, for example: {self.first}",)


def name_of(source: Any) -> str:
    """Return the name of a source in messages."""
    if (parts := parts_of(source)) is not None:
        return " and ".join(name_of(part) for part in parts)
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


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the ending of a file, of a compressed one that of its content."""
    given = Path(path)
    inner = Path(given.stem).suffix.lower()
    zipped = given.suffix.lower() == ".gz" and inner in (*JSON_SUFFIXES, ".json", ".txt")
    return inner if zipped else given.suffix.lower()


def parts_of(source: Any) -> dict[Any, float] | None:
    """Return the files of a source of several with their weights: a list of paths, or weights by path."""
    weighted = isinstance(source, Mapping) and not is_hugging_face(source)
    if not source or not (weighted or isinstance(source, list)):
        return None
    if not all(isinstance(path, str | os.PathLike) and is_text_file(path) for path in source):
        return None
    if not weighted:
        return {path: float(source.count(path)) for path in source}
    for path, weight in source.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (is_number and 0 < weight < math.inf):
            shown = f"{weight:g}" if is_number else repr(weight)
            raise OptionError(f"the weight of '{path}' is {shown:.80}; it needs a finite number above 0.")
    return {path: float(weight) for path, weight in source.items()}


def is_json_lines(source: Any) -> bool:
    """Return whether a source is the path of a file with one JSON document a line, which holds rows of texts only."""
    return isinstance(source, str | os.PathLike) and suffix_of(source) in JSON_SUFFIXES


def is_text_file(source: Any) -> bool:
    """Return whether a source is a reader of tables, or the path of a file of texts by its ending."""
    if isinstance(source, str | os.PathLike):
        return suffix_of(source) in TEXT_SUFFIXES
    return isinstance(source, CsvFile | ParquetFile) or parts_of(source) is not None


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


def read_rows(source: Any) -> Iterator[Row | DataError]:
    """Read the rows of a file, a reader, a dataset, or a list; an error for each that cannot be read."""
    for label, row in read_records(source):
        try:
            if isinstance(row, DataError):
                raise row
            yield Row.of(row, label)
        except DataError as error:
            yield error


def read_records(
    source: Any, forms: Sequence[tuple[str, ...]] = FORMS, columns: Sequence[str] | None = _COLUMNS
) -> Iterator[tuple[str, Any]]:
    """Read the rows of a source as they are, each with its label for messages; an error for one that is no JSON.

    Of tables these columns are read, or all.

    Of several files, each row is read as often as the weight of its file says: a weight of 2 reads it twice, one of 0.5
    every second row.
    """
    parts = parts_of(source)
    if parts is None:
        name = name_of(source)
        yield from ((f"{label} of {name}", row) for label, row in _records(source, forms, columns, name))
        return
    for part, weight in parts.items():
        number = taken = 0
        for number, record in enumerate(read_records(part, forms, columns), 1):
            for _ in range(math.floor(number * weight) - taken):
                yield record
            taken = math.floor(number * weight)
        if number and not taken:
            rows = f"its {number:,} rows" if number > 1 else "its row"
            raise DataError(f"{name_of(part)} has the weight {weight:g}, which takes none of {rows}; leave it out.")


def _records(
    source: Any, forms: Sequence[tuple[str, ...]], columns: Sequence[str] | None, name: str
) -> Iterator[tuple[str, Any]]:
    """Read the rows of one source."""
    if isinstance(source, str | os.PathLike):
        suffix = suffix_of(source)
        if suffix in CSV_SUFFIXES:
            source = CsvFile(source)
        elif suffix in PARQUET_SUFFIXES:
            source = ParquetFile(source)
        elif suffix == ".json":
            yield from ((f"row {number}", row) for number, row in enumerate(_of_array(Path(source))))
            return
    if isinstance(source, CsvFile):
        yield from _of_csv(source, forms, columns)
    elif isinstance(source, ParquetFile):
        yield from ((f"row {number}", row) for number, row in enumerate(source.rows(columns)))
    elif isinstance(source, str | os.PathLike):
        is_json = is_json_lines(source)
        for number, line in _lines(Path(source)):
            label = f"line {number}"
            yield label, _json(line, f"{label} of {name}") if is_json else {"text": line}
    elif isinstance(source, Iterable):
        if is_hugging_face(source):
            plain: Any = source
            if not is_stream(source):
                refuse_other_kinds(source)
            source = plain.with_format(None)
        first = getattr(source, "first_row", 0)
        yield from ((f"row {number}", row) for number, row in enumerate(source, first))
    else:
        raise DataError(f"the data is {kind_in_words(source)}; it needs a path, a dataset, or a list of rows.").about(
            "data", got=kind_in_words(source)
        )


def _opened(path: Path) -> IO[bytes]:
    """Open a file, or the content of a compressed one."""
    check_regular_file(path)
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank, with their numbers."""
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(_LINE_LIMIT + 1):
                number += 1
                if len(line) > _LINE_LIMIT:
                    raise DataError(f"line {number} of '{path}' exceeds {_LINE_LIMIT // MEGABYTE} MiB: divide it.")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise DataError(f"line {number} of '{path}' is not in UTF-8 ({error.reason}).") from error
    except (OSError, EOFError, zlib.error, RefusedFileError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"There is no file '{path}'; give a .jsonl, .txt, .csv or .parquet file of texts.")
    reason = (isinstance(error, OSError) and error.strerror) or error
    return DataError(f"'{path}' cannot be read: {reason}.")


_BETWEEN: Final = re.compile(r"[\s,]*")
"""Separators of the rows of an array."""


def _of_array(path: Path) -> Iterator[Any]:
    """Yield the rows of a file with one JSON array, of which a part is held at a time."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")().decode
    text, at, number, begun, ended = "", 0, 0, False, False
    try:
        with _opened(path) as file:
            while True:
                found = _BETWEEN.match(text, at)
                at = at if found is None else found.end()
                if begun and text.startswith("]", at):
                    if (text[at + 1 :] + decode(file.read(_LINE_LIMIT))).strip():
                        raise DataError(f"'{path}' goes on behind its array; it needs one array.")
                    return
                if not begun and at < len(text):
                    if text[at] != "[":
                        raise DataError(f"'{path}' holds no array of rows; it needs [...], or a row on each line.")
                    begun, at = True, at + 1
                    continue
                failure: Exception = ValueError("it ends before its array does")
                if at < len(text):
                    try:
                        end = decoder.raw_decode(text, at)[1]
                        yield _json(text[at:end], f"row {number} of '{path}'")
                        at, number = end, number + 1
                        continue
                    except (ValueError, RecursionError) as error:
                        failure = error
                if ended or len(text) - at > _LINE_LIMIT or isinstance(failure, RecursionError):
                    reason = failure.msg if isinstance(failure, json.JSONDecodeError) else failure
                    raise DataError(f"row {number} of '{path}' is not JSON: {reason}.")
                block = file.read(max(MEGABYTE, len(text) - at))
                text, at, ended = text[at:] + decode(block, final=not block), 0, not block
    except UnicodeDecodeError as error:
        raise DataError(f"row {number} of '{path}' is not in UTF-8 ({error.reason}).") from error
    except (OSError, EOFError, zlib.error, RefusedFileError) as error:
        raise _unreadable(path, error) from error


def _json(line: str, label: str) -> Any:
    """Return a row, or the error of one that is no JSON."""
    try:
        return parse_json(line, finite=False)
    except RefusedFileError as error:
        cause = error.__cause__
        reason = f"{cause.msg} at character {cause.pos + 1}" if isinstance(cause, json.JSONDecodeError) else error
        return DataError(f"{label} is not JSON: {reason}.")


def _of_csv(
    file: CsvFile, forms: Sequence[tuple[str, ...]], columns: Sequence[str] | None
) -> Iterator[tuple[str, Any]]:
    held = file.column_names()
    known = held if columns is None else [name for name in columns if name in held]
    if not any(set(known).issuperset(form) for form in forms):
        wanted = forms_in_words([form for form in forms if form not in (("messages",), ("conversations",))])
        raise DataError(f"{file.name} has the columns {', '.join(held[:8])}; rows of texts need {wanted}.").about(
            file.name, got=held, wanted=wanted
        )
    specs = [TensorSpec(name, np.dtype(object), (None,)) for name in known]
    inputs = file.read(specs, need_target=False)[0]
    texts = [np.asarray(inputs[name]).astype(object) for name in known]
    for number, values in enumerate(zip(*texts, strict=True)):
        yield f"row {number}", {name: str(value) for name, value in zip(known, values, strict=True)}
