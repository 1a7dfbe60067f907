"""A tokenizer with its chat template, from the files that lie beside a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from onnxtrain.data.limited_process import LimitedProcess
from onnxtrain.data.tokenizer import LONGEST_TOKEN, Encoded, Encoder, open_tokenizer
from onnxtrain.errors import DataError
from onnxtrain.model_file.small_files import MEGABYTE, RefusedFileError, read_json, read_text
from onnxtrain.plugins.text.rows import Row, kind_in_words

_MEMORY: Final = 2 << 30
"""Bytes that the process of a template may map."""

_SECONDS: Final = 20.0
_CHARACTERS_PER_SECOND: Final = 20_000
"""Time limits of a block of chats."""

_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that templates know by name."""

_TEMPLATE: Final = MEGABYTE
"""Characters of the longest template."""

LONGEST_ROW: Final = 4 * MEGABYTE
"""Characters of the longest row."""

_NO_LIMIT: Final = 1 << 30
"""Length from which a tokenizer's maximum means none."""


@dataclass
class ChatTokenizer:
    """A tokenizer with the settings of its files."""

    encoder: Encoder
    tokens: dict[str, str]
    template: str | None
    longest: int | None
    _process: LimitedProcess | None = field(default=None, repr=False)

    @classmethod
    def open(cls, given: Any, template: str | os.PathLike[str] | None = None) -> ChatTokenizer:
        """Open a tokenizer."""
        if isinstance(given, str | os.PathLike):
            path = Path(given)
            folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
            config = _settings(folder / "tokenizer_config.json")
            limits = [config.get("model_max_length"), _context(folder)]
            own = _template(folder, config.get("chat_template"))
            beside = folder / "special_tokens_map.json"
            tokens = {**_special(_settings(beside), f"'{beside}'"), **_special(config, f"'{folder}'")}
            encoder = open_tokenizer(file)
        else:
            limits = [getattr(given, "model_max_length", None)]
            own = _chosen_template(getattr(given, "chat_template", None), "the tokenizer")
            tokens = _special(getattr(given, "special_tokens_map", {}), "the tokenizer")
            encoder = open_tokenizer(getattr(given, "backend_tokenizer", given))
        if template is not None:
            own = _read_template(Path(template))
        known = [limit for limit in limits if type(limit) is int and 0 < limit < _NO_LIMIT]
        return cls(encoder, tokens, own, min(known, default=None))

    def encode(self, rows: Sequence[Row], *, answers: bool) -> list[tuple[Encoded, list[tuple[int, int]]]]:
        """Return the tokens of rows, and the spans of characters to learn."""
        sizes = [row.size for row in rows]
        for row, size in zip(rows, sizes, strict=True):
            if size > LONGEST_ROW:
                raise DataError(f"{row.label} has {size:,} characters; a row has at most {LONGEST_ROW:,}: divide it.")
        rendered = iter(self._rendered([row for row in rows if row.messages is not None], answers=answers))
        texts = [self._ended(row, answers=answers) if row.messages is None else next(rendered) for row in rows]
        for row, (text, _) in zip(rows, texts, strict=True):
            if not _is_unicode(text):
                raise DataError(
                    f"{row.label} holds half of a character (a surrogate, such as \\ud800), which no token has."
                ).about(row.label)
        encoded: list[Encoded | None] = [None] * len(rows)
        for plain in (True, False):  # a template writes the special tokens itself
            own = [index for index, row in enumerate(rows) if (row.messages is None) == plain]
            if own:
                size = sum(sizes[index] for index in own)
                found = self.encoder.encode([texts[index][0] for index in own], special=plain, size=size)
                for index, each in zip(own, found, strict=True):
                    encoded[index] = _once(each) if plain else each
        return [(each, spans) for each, (_, spans) in zip(encoded, texts, strict=True) if each is not None]

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt: a message of the user with the words that ask for an answer, or plain text."""
        return self.asking(text if self.template is None else [{"role": "user", "content": text}], "the prompt")

    def asking(self, given: str | list[dict[str, Any]], label: str) -> list[int]:
        """Return the tokens that an answer follows: of a plain text, or of messages with the words that ask for one."""
        if isinstance(given, str):
            (found,) = self.encoder.encode([given])
            ids = [int(one) for one in _once(found).ids]
            end = self.encoder.id_of(self.tokens.get("eos_token", ""))
            return ids[:-1] if ids and ids[-1] == end else ids
        row = Row.of({"messages": given}, label)
        ((rendered, _),) = self._answered([row], [{"messages": row.messages, "ask": True}])
        (found,) = self.encoder.encode([rendered], special=False, size=row.size)
        return [int(one) for one in found.ids]

    def _ended(self, row: Row, *, answers: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return a plain text with the token of its end."""
        end = self.tokens.get("eos_token", "")
        text = row.text if row.text.endswith(end) else row.text + end
        return text, [(row.start if answers else 0, len(text))]

    def _rendered(self, rows: Sequence[Row], *, answers: bool) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return the text of each chat, and the spans of characters to learn in it."""
        if not rows:
            return []
        chats = [
            {
                "messages": row.messages,
                "prompt": row.prompt,
                "tools": row.tools,
                "options": row.options,
                "answers": answers,
            }
            for row in rows
        ]
        return self._answered(rows, chats)

    def _answered(
        self, rows: Sequence[Row], chats: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return the answers of the process of the template."""
        process = self._started(rows[0])
        try:
            found, _ = process.ask(chats)
        except DataError as error:
            raise DataError(f"the chat template cannot render {rows[0].label} or a row after it: {error}") from error
        except (TypeError, ValueError) as error:  # not JSON
            raise DataError(f"{rows[0].label} or a row after it holds a value that is not JSON: {error}.") from error
        wrong = next((index for index, each in enumerate(found) if isinstance(each, str)), None)
        if wrong is not None:
            raise DataError(f"{rows[wrong].label} cannot be rendered: {found[wrong]}.")
        return [(text, [(start, end) for start, end in spans]) for text, spans in found]

    def _started(self, row: Row) -> LimitedProcess:
        """Return the process of the template."""
        if self._process is not None:
            return self._process
        if self.template is None:
            raise DataError(
                f"{row.label} is a chat, but the tokenizer has no chat template; name one: "
                "chat_template='template.jinja'."
            ).about(row.label)
        try:
            import jinja2  # noqa: F401 - the process imports it
        except ImportError:
            raise DataError("chat templates need jinja2; install it: pip install tokenizers jinja2.") from None
        try:
            self._process = LimitedProcess(
                Path(__file__).with_name("template_worker.py"),
                {"template": self.template, "tokens": self.tokens},
                memory=_MEMORY,
                seconds=_SECONDS,
                speed=_CHARACTERS_PER_SECOND,
            )
        except DataError as error:
            raise DataError(f"the chat template cannot be used: {str(error).rstrip('.')}.").about(
                "chat_template", got=str(error)
            ) from error
        return self._process


def _once(text: Encoded) -> Encoded:
    """Leave out the special tokens that the tokenizer adds at an end of a text that has them there already."""
    ids, added = text.ids, text.ends <= text.starts
    if len(ids) < 2:
        return text
    first, last = (added[end] and not added[next_] and ids[end] == ids[next_] for end, next_ in ((0, 1), (-1, -2)))
    return Encoded(*(each[int(first) : len(ids) - int(last)] for each in text))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _settings(path: Path) -> dict[str, Any]:
    """Read a JSON file that may be missing."""
    try:
        found = read_json(path, finite=False)
    except FileNotFoundError:
        return {}
    except (OSError, RefusedFileError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"'{path}' cannot be read: {reason}.") from error
    if not isinstance(found, dict):
        raise DataError(f"'{path}' holds {kind_in_words(found)}; it needs names and values.")
    return found


def _special(settings: Mapping[str, Any], label: str) -> dict[str, str]:
    """Return the special tokens of settings, which are texts or have a content."""
    found = {}
    for name in _TOKENS:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, Mapping) else getattr(value, "content", value)
        if isinstance(value, str) and len(value) > LONGEST_TOKEN:
            raise DataError(
                f"{name} of {label} has {len(value):,} characters; a special token has at most {LONGEST_TOKEN:,}."
            )
        if isinstance(value, str):
            found[name] = value
    return found


def _context(folder: Path) -> Any:
    """Return the context length that onnxruntime-genai's settings give, if there are any."""
    model = _settings(folder / "genai_config.json").get("model")
    return model.get("context_length") if isinstance(model, Mapping) else None


def end_ids(folder: Path) -> set[int]:
    """Return the tokens that end a text by onnxruntime-genai's settings; none without them."""
    model = _settings((folder if folder.is_dir() else folder.parent) / "genai_config.json").get("model")
    given = model.get("eos_token_id") if isinstance(model, Mapping) else None
    return {one for one in (given if isinstance(given, list) else [given]) if type(one) is int}


def _template(folder: Path, setting: Any) -> str | None:
    """Return the chat template of a folder: of its own file, else of the settings."""
    file = folder / "chat_template.jinja"
    return _read_template(file) if file.exists() else _chosen_template(setting, f"'{folder / 'tokenizer_config.json'}'")


def _read_template(path: Path) -> str:
    try:
        return read_text(path, _TEMPLATE)
    except FileNotFoundError:
        raise DataError(f"There is no file '{path}'; chat_template needs a template in Jinja.").about(
            "chat_template", got=str(path)
        ) from None
    except (OSError, RefusedFileError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"'{path}' cannot be read as a chat template: {reason}.") from error


def _chosen_template(setting: Any, label: str) -> str | None:
    """Return the chat template of a tokenizer's setting; among several templates, the one named 'default'."""
    if isinstance(setting, list):  # tokenizer_config.json lists several as {name, template}
        named = [each for each in setting if isinstance(each, Mapping)]
        setting = {str(each.get("name")): each.get("template") for each in named}
    if isinstance(setting, Mapping):
        if "default" not in setting:
            raise DataError(
                f"{label} has chat templates named {', '.join(map(repr, setting))}, but none named 'default'."
            ).about(label, got=[*setting], wanted="default")
        setting = setting["default"]
    if setting is not None and not isinstance(setting, str):
        raise DataError(f"the chat template of {label} is {kind_in_words(setting)}; it needs a text.")
    if setting is not None and len(setting) > _TEMPLATE:
        raise DataError(f"the chat template of {label} has {len(setting):,} characters; {_TEMPLATE:,} are the limit.")
    return setting
