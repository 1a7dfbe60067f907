"""Hostile chat templates: refused in one sentence, in bounded time, without a crash of the process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from onnxtrain.data.limited_process import LimitedProcess
from onnxtrain.errors import DataError
from onnxtrain.plugins.text import tokenizer_files
from onnxtrain.plugins.text.rows import Row, in_blocks, read_rows
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer
from plugins.text.chats import CHATS, tokenizer

pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

HOSTILE = {
    "an endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a large number": "{{ 'a' * 99999999999 }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "deep recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "attributes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "no template": "{% for %}",
    "no end": "{% generation %}",
    "nested without end": "(" * 100 + "{{" + "(" * 5000,
    "an unknown filter": "{{ messages | shell }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a refusal": "{{ raise_exception('no') }}",
    "a wrong date": "{{ strftime_now(3) }}",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "_SECONDS", 2.0)
    monkeypatch.setattr(tokenizer_files, "_MEMORY", 1 << 29)
    opened = ChatTokenizer.open(tokenizer(tmp_path, HOSTILE[name]))
    with pytest.raises(DataError, match=r"chat template|cannot be rendered") as caught:
        opened.encode([Row("line 1", messages=CHATS[0])], answers=True)
    assert len(str(caught.value)) < 500
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("template", "tokens", "message"),
    [
        ("{{ 'abc d ' * 10000000 }}", {}, "60,000,000 characters for a chat"),
        ("{% for m in messages %}{{ m.content * 5000 }}{% endfor %}", {}, "characters for a chat"),
        ("{{ 'x' * 40000 }}", {}, "40,000 characters for a chat"),
        ("x" * (1 << 21), {}, "the limit"),
        (None, {"eos_token": "e" * 1_000_000}, "eos_token .* 1,000,000 characters"),
        (None, {"bos_token": {"content": "b" * 1_001}}, "bos_token .* at most 1,000"),
    ],
    ids=["text", "messages", "small", "template", "eos", "bos"],
)
def test_what_a_tokenizer_adds_has_limits(tmp_path: Path, template: str | None, tokens: Any, message: str) -> None:
    start, folder, rows = time.monotonic(), tokenizer(tmp_path, template, **tokens), [Row("line 1", messages=CHATS[0])]
    with pytest.raises(DataError, match=message):
        ChatTokenizer.open(folder).encode(rows, answers=True)
    assert time.monotonic() - start < 20


def test_rows_have_limits(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path)
    long = Row("line 1", text="a " * (3 << 20))
    with pytest.raises(DataError, match="line 1 has 6,291,456 characters"):
        ChatTokenizer.open(folder).encode([long], answers=True)
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "a" * (17 << 20)}))
    with pytest.raises(DataError, match="exceeds 16 MiB"):
        list(read_rows(path))
    blocks = in_blocks(iter([3, 2, 1 << 20, 5, 6, 7]), 2, lambda size: size)
    assert list(blocks) == [[3, 2], [1 << 20], [5, 6], [7]]


def test_the_time_for_texts_is_that_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer gets no more time for what a template, an end token or the settings add."""
    asked = []
    monkeypatch.setattr(LimitedProcess, "ask", spied(LimitedProcess.ask, asked))
    opened = ChatTokenizer.open(tokenizer(tmp_path, "{{ 'x' * 20000 }}", eos_token="</s>"))
    opened.encode([Row("line 1", messages=CHATS[0])], answers=False)
    assert len(asked) == 4
    assert max(size for size in asked[2:] if size is not None) < 2000
    assert asked[0] == asked[1] == int(tokenizer_files._SECONDS * tokenizer_files._CHARACTERS_PER_SECOND)


def spied(method: Any, asked: list[int | None]) -> Any:
    """Record the sizes of requests."""

    def ask(self: Any, request: Any, size: int | None = None) -> Any:
        asked.append(size)
        return method(self, request, size)

    return ask


@pytest.mark.parametrize("settings", ["[]", "{", '{"chat_template": 3}', '{"chat_template": [3]}', '{"a": ' * 99])
def test_odd_settings_are_refused(tmp_path: Path, settings: str) -> None:
    folder = tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match=r"tokenizer_config\.json"):
        ChatTokenizer.open(folder)


def test_odd_values_are_left_out(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, "{{ eos_token }}", eos_token={"content": "x"}, bos_token=3, model_max_length=1e30)
    (folder / "genai_config.json").write_text(json.dumps({"model": 3}))
    opened = ChatTokenizer.open(folder)
    assert opened.tokens == {"eos_token": "x", "pad_token": "<pad>"}
    assert opened.longest is None
