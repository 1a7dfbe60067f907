"""Every template with every chat: the tokens of transformers, the answers that marks show, and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from plugins.text.chat_templates import CHATS, MARKED, TEMPLATES
from plugins.text.chats import tokenizer

pytest.importorskip("tokenizers", reason="tokenizers are not installed")
jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed")

from onnxtrain.errors import DataError  # noqa: E402
from onnxtrain.plugins.text.rows import Row  # noqa: E402
from onnxtrain.plugins.text.template_worker import Renderer  # noqa: E402
from onnxtrain.plugins.text.token_rows import learned_tokens  # noqa: E402
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer  # noqa: E402

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def found(template: str, chat: list[dict[str, Any]]) -> Any:
    """The text and the answers of a chat, or the refusal of the template."""
    try:
        text, spans = Renderer(template, TOKENS).answers({"messages": chat, "answers": True})
    except jinja2.TemplateError as error:
        return str(error)
    return text, [text[start:end] for start, end in spans], spans


def test_there_are_many_templates_and_chats() -> None:
    assert len(TEMPLATES) == 20
    assert len(CHATS) >= 15
    assert all("generation %}" in MARKED[name] and "generation %}" not in TEMPLATES[name] for name in TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_those_that_marks_show(name: str) -> None:
    """Without marks the same answers are found, or the template refuses the chat either way."""
    for chat in CHATS.values():
        assert found(TEMPLATES[name], chat) == found(MARKED[name], chat)


@pytest.mark.torch
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tokenizer(tmp_path, TEMPLATES[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    own = ChatTokenizer.open(folder)
    for chat in CHATS.values():
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": MARKED[name]}
        try:
            wanted = theirs.apply_chat_template(chat, **options)
        except jinja2.TemplateError as error:
            refused = f"row 0 cannot be rendered: {re.escape(str(error).rstrip('.'))}"
            with pytest.raises(DataError, match=refused):
                own.encode([Row("row 0", messages=chat)], answers=True)
            continue
        ((encoded, spans),) = own.encode([Row("row 0", messages=chat)], answers=True)
        assert encoded.ids.tolist() == wanted["input_ids"]
        learned = learned_tokens(encoded.starts, encoded.ends, spans)
        assert learned.astype(int).tolist() == wanted["assistant_masks"]


NOT_OF_TRL = ("diffusion_gemma", "glm4moe", "idefics3", "smolvlm")
"""No words ask for an answer after a tool; the next turn's token ends an answer; messages need parts, not a text."""


@pytest.mark.torch
@pytest.mark.thorough
def test_answers_are_those_of_the_training_templates_of_trl() -> None:
    """TRL learns more only of the words that ask for an answer, which the model is given."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    folder, compared = Path(trl.__file__).parent / "chat_templates", 0
    for path in sorted(folder.glob("*_training.jinja")):
        name = path.name.removesuffix("_training.jinja")
        template = (folder / f"{name}.jinja").read_text()
        if name in NOT_OF_TRL:
            continue
        for chat in CHATS.values():
            try:
                text, wanted = Renderer(path.read_text(), TOKENS).answers({"messages": chat, "answers": True})
                own, _ = Renderer(template, TOKENS).answers({"messages": chat, "answers": False})
            except Exception:  # of the template, as in transformers
                continue
            if own != text:  # templates to train with render thoughts that the original leaves out
                continue
            asks = {"messages": [{"role": "user", "content": "?"}], "ask": True, "answers": True}
            asked, _ = Renderer(template, TOKENS).answers(asks)
            found = Renderer(template, TOKENS).answers({"messages": chat, "answers": True})[1]
            if len(wanted) > len(found) and wanted[-2][1] == wanted[-1][0]:  # the end of a chat, as a block of its own
                wanted[-2:] = [(wanted[-2][0], wanted[-1][1])]
            assert len(found) == len(wanted)
            for (start, end), (first, last) in zip(found, wanted, strict=True):
                assert end == last
                assert text[first:start] in asked or text[first:start] == "<｜tool▁outputs▁end｜>"  # noqa: RUF001
            compared += 1
    assert compared > 300
