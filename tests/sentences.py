"""Errors and warnings by their key in ``sentences.toml``: rewording a sentence changes its line there, and no test."""

from __future__ import annotations

import os
import pkgutil
import re
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest

from onnxtrain import errors

GOLDEN = Path(__file__).with_suffix(".toml")
SENTENCES = {
    key: (kind, sentence)
    for kind, sentences in tomllib.loads(GOLDEN.read_text(encoding="utf-8")).items()
    for key, sentence in sentences.items()
}
FIELDS = ("what", "got", "wanted")


def raises_sentence(key: str, **values: Any) -> Any:
    """Expect an error with this sentence; ``what``, ``got`` and ``wanted`` are fields of the error, too.

    Texts of other placeholders are parts of what stands there.
    """
    values = _plain(values)
    return pytest.raises(_kind(key), match=pattern(key, **values), check=lambda error: _has_fields(error, values))


def warns_sentence(key: str, **values: Any) -> Any:
    """Expect a warning with this sentence."""
    return pytest.warns(_kind(key), match=pattern(key, **_plain(values)))


def pattern(key: str, **values: Any) -> str:
    """Return the regular expression of a whole sentence: placeholders without a value match anything."""
    parts, unused = [], set(values) - set(FIELDS)
    for text, name, form, conversion in string.Formatter().parse(SENTENCES[key][1]):
        parts.append(re.escape(text))
        if name in values:
            value = repr(values[name]) if conversion == "r" else values[name]
            part = re.escape(format(value, form) if form else str(value))
            parts.append(part if name in FIELDS or isinstance(value, int) else f".*?{part}.*?")
        elif name is not None:
            parts.append(".*?")
        unused.discard(name)
    assert not unused, f"the sentence {key!r} has no placeholder {sorted(unused)}"
    return rf"(?s)\A{''.join(parts)}\Z"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}


def _kind(key: str) -> Any:
    name = SENTENCES[key][0]
    return getattr(errors, name, None) or pkgutil.resolve_name(name if "." in name else f"builtins.{name}")


def _has_fields(error: BaseException, values: dict[str, Any]) -> bool:
    for name in FIELDS:
        if name in values and isinstance(error, errors.OnnxTrainError):
            assert getattr(error, name) == values[name], f"{name} of: {error}"
    return True
