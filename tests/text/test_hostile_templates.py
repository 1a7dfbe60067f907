"""Hostile chat templates: refused in one sentence, in bounded time, without a crash of the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnxtrain.errors import DataError
from onnxtrain.text import tokenizer_files
from onnxtrain.text.rows import Row
from onnxtrain.text.tokenizer_files import ChatTokenizer
from text.chats import CHATS, tokenizer

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
