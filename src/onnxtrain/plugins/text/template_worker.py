"""Render chats by a template and find the answers; the script of a process of its own, since a template is a program.

The environment is the one that chat templates are written for: Jinja's immutable sandbox without spaces around blocks,
with ``break`` and ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that keeps characters, and the tag
``{% generation %}``. This file imports nothing of onnxtrain.
"""

import datetime
import json
import os.path
import re
import secrets
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Chat = dict[str, Any]
"""``messages``, ``tools`` and ``options`` of a chat, ``prompt`` (messages before the completion) and ``answers``; or
``ask`` for the words that ask for an answer, too."""


_CHANGED = (
    "the chat template renders the first messages in another way when the others follow, so that the answers are not "
    "found; mark them in the template by {% generation %}, or set train_on='all'"
)

_ADDED, _TIMES = 1 << 15, 8
"""Characters that a template may write besides those of the chat, and how often it may write the chat."""

_OPEN_MARK = re.compile(r"[<\[][^<>\[\]]*$")
"""The beginning of a special token, such as ``<|``, at the end of a text."""


class _Generation(jinja2.ext.Extension):
    """The tag ``{% generation %}``: its block is put between marks while answers are searched."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        inner = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.marked = True  # type: ignore[attr-defined]
        return jinja2.nodes.CallBlock(self.call_method("_block"), [], [], inner).set_lineno(line)

    def _block(self, caller: Any) -> str:
        before, after = self.environment.marks  # type: ignore[attr-defined]
        return f"{before}{caller()}{after}"


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the Jinja environment in which chat templates are rendered."""
    found = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    found.marked, found.marks = False, ("", "")  # type: ignore[attr-defined]
    found.filters["tojson"] = _as_json
    found.globals["raise_exception"] = _refuse
    found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return found


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class Renderer:
    """Renders chats by a template."""

    def __init__(self, template: str, tokens: dict[str, str]) -> None:
        self._environment = environment()
        self._template = self._environment.from_string(template)
        self._tokens = tokens

    def answers(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat, and where its answers begin and end."""
        self._given = len(json.dumps(chat))
        messages, prompt = chat["messages"], chat.get("prompt")
        if chat.get("ask"):
            return self._render(chat, messages, add_generation_prompt=True), []
        text = self._render(chat, messages)
        if not chat["answers"]:
            return text, [(0, len(text))]
        if prompt is not None:
            return text, [(self._start(chat, text, prompt), len(text))]
        if self._environment.marked:  # type: ignore[attr-defined]
            return text, self._marked(chat, text)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._start(chat, text, index)
                spans.append((start, start + self._length(chat, text[start:], index, start)))
        return text, spans

    def _start(self, chat: Chat, text: str, index: int) -> int:
        """Return where the text of a message begins, behind the words that ask for an answer."""
        earlier = chat["messages"][:index]
        if not earlier:
            raise ValueError("the first message is an answer; put the question before it")
        asked = self._render(chat, earlier, add_generation_prompt=True)
        if earlier[-1]["role"] == "assistant" and not text.startswith(asked):
            asked = self._render(chat, earlier)  # no words ask for another answer
        return self._prefix(text, asked)

    def _length(self, chat: Chat, rest: str, index: int, start: int) -> int:
        """Return the characters of an answer at the beginning of the text from ``start`` on."""
        message, messages = chat["messages"][index], chat["messages"]
        if index + 1 == len(messages):
            return len(rest)
        own = self._render(chat, messages[: index + 1])[start:]
        if rest.startswith(own):
            return len(own)
        ends = (own[at:] for at in range(len(own)) if own[at] == rest[0] and rest.startswith(own[at:]))
        last = _last_line(message)
        for found in (_OPEN_MARK.sub("", _shared(own, rest)), next(ends, "")):
            if last and last in found:
                return len(found)
        raise ValueError(_CHANGED)

    def _prefix(self, text: str, start: str) -> int:
        if not text.startswith(start):
            raise ValueError(_CHANGED)
        return len(start)

    def _marked(self, chat: Chat, text: str) -> list[tuple[int, int]]:
        """Return the blocks of ``{% generation %}``."""
        before, after = (f"<{secrets.token_hex(12)}>" for _ in range(2))
        self._environment.marks = (before, after)  # type: ignore[attr-defined]
        try:
            rest = self._render(chat, chat["messages"])
        finally:
            self._environment.marks = ("", "")  # type: ignore[attr-defined]
        plain, spans = "", []
        while before in rest:
            head, _, rest = rest.partition(before)
            answer, _, rest = rest.partition(after)
            plain += head
            spans.append((len(plain), len(plain) + len(answer)))
            plain += answer
        if plain + rest != text:
            raise ValueError("the chat template changes the text of a {% generation %} block after the block")
        return spans

    def _render(self, chat: Chat, messages: list[Any], *, add_generation_prompt: bool = False) -> str:
        text = self._template.render(
            **{
                "documents": None,
                **self._tokens,
                **(chat.get("options") or {}),
                "messages": messages,
                "tools": chat.get("tools"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if len(text) > _ADDED + _TIMES * self._given:
            raise ValueError(f"the chat template writes {len(text):,} characters for a chat of {self._given:,}")
        return text


def _shared(one: str, other: str) -> str:
    """Return what two texts begin with."""
    return os.path.commonprefix([one, other])  # noqa: RUF071 - they are no paths


def _last_line(message: dict[str, Any]) -> str:
    """Return the end of a message that its rendering has: the name of a function that it calls, else its last line."""
    calls = message.get("tool_calls")
    if calls:
        return str((calls[-1].get("function") or calls[-1]).get("name", ""))
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [str(part.get("text", "")) for part in content]
    lines = "\n".join(texts).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def start(settings: Any) -> tuple[Any, Any]:
    """Parse the template; return the function that renders chats."""
    renderer = Renderer(settings["template"], settings["tokens"])

    def respond(chats: Any) -> tuple[Any, bytes]:
        found: list[Any] = []
        for chat in chats:
            try:
                found.append(renderer.answers(chat))
            except Exception as error:  # of the template
                found.append(" ".join((str(error) or type(error).__name__).split()).rstrip(".")[:300])
        return found, b""

    return None, respond
