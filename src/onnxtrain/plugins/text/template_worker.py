"""Render chats by a template and find the answers; the script of a process of its own, since a template is a program.

The environment is the one that chat templates are written for: Jinja's immutable sandbox without spaces around blocks,
with ``break`` and ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that keeps characters, and the tag
``{% generation %}``. This file imports nothing of onnxtrain.
"""

import datetime
import itertools
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

_MARK = re.compile(r"<[^<>\s]+>")
"""A special token."""

_ENDED = re.compile(r"\s*<[^<>\s]+>\s*")
"""A special token, and the spaces around it."""

_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?$")
"""A thought that a template begins, and perhaps ends, where it asks for an answer: it belongs to the answer."""

_PLAIN: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
"""Messages that every template renders."""


class _TooLongError(ValueError):
    """A template writes too much."""


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
            return text, [(self._span(chat, text, prompt)[0], len(text))]
        places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [messages[index].get("weight") != 0 for index in places]
        if self._environment.marked:  # type: ignore[attr-defined]
            spans = self._marked(chat, text)
            if len(spans) != len(places) and not all(learned):
                raise ValueError("the chat template marks no answer of each message, so that weights have no place")
            return text, spans if all(learned) else list(itertools.compress(spans, learned))
        return text, [self._span(chat, text, index) for index in itertools.compress(places, learned)]

    def _span(self, chat: Chat, text: str, index: int) -> tuple[int, int]:
        """Return where an answer begins and ends."""
        start = self._start(chat, text, index)
        own = "" if start is None else (self._try(chat, chat["messages"][: index + 1]) or "")[start:]
        start = self._start_by_marks(chat, text, index) if start is None else start
        if index + 1 == len(chat["messages"]):
            return start, len(text)
        return start, start + len(own) if own and text.startswith(own, start) else self._end(chat, text, index, start)

    def _start(self, chat: Chat, text: str, index: int) -> int | None:
        """Return where an answer begins, behind the words that ask for it; ``None`` where the text before differs."""
        earlier = chat["messages"][:index]
        for ask in (True, False) if earlier and earlier[-1]["role"] == "assistant" else (True,):
            asked = self._try(chat, earlier, ask=ask) if earlier else None
            if asked is not None and text.startswith(asked):  # perhaps no words ask for another answer
                return None if self._is_between(chat, text, index, len(asked)) else len(asked)
        return None

    def _start_by_marks(self, chat: Chat, text: str, index: int) -> int:
        """Return where an answer begins: behind the words after the message before it, as far as the chat has them."""
        messages = chat["messages"]
        content = self._place(chat, messages, index, text, at_end=False)
        last = self._place(chat, messages, index, text) if content is None else content
        for before in range(index - 1, -1, -1):
            place = self._place(chat, messages, before, text)
            asked = None if place is None else self._behind(chat, messages[:index], before, ask=True)
            if place is None or asked is None:
                continue
            plain = self._behind(chat, messages[:index], before) or ""
            same = _matched(asked, text[place:last])
            if same >= len(_OPEN_MARK.sub("", _shared(asked, plain))):
                return place + same
        # Nothing before it says where it begins: the words that ask for an answer elsewhere do.
        if last is None:
            raise ValueError(_CHANGED)
        asked = self._asking(chat)
        for size in range(len(asked), 0, -1):
            if not _OPEN_MARK.search(asked[:size]) and (at := text.rfind(asked[:size], 0, last)) >= 0:
                return last if self._is_between(chat, text, index, at + size) else at + size
        if content is None:
            raise ValueError(_CHANGED)
        lead = self._lead(chat)
        return content - len(lead) if text[:content].endswith(lead) else content

    def _is_between(self, chat: Chat, text: str, index: int, start: int) -> bool:
        """Return whether the system message before an answer stands between its beginning and its content."""
        messages = chat["messages"]
        if not index or messages[index - 1]["role"] != "system":
            return False
        return (self._place(chat, messages, index - 1, text) or 0) > start

    def _lead(self, chat: Chat) -> str:
        """Return the text between the words that ask for an answer and its content."""
        text = self._try(chat, _PLAIN)
        start = None if text is None else self._start({**chat, "messages": _PLAIN}, text, 1)
        place = None if text is None else self._place(chat, _PLAIN, 1, text, at_end=False)
        return "" if text is None or start is None or place is None else text[start:place]

    def _end(self, chat: Chat, text: str, index: int, start: int) -> int:
        """Return where an answer ends: behind what follows its content where it is the last message, too."""
        messages, last = chat["messages"], _last_line(chat["messages"][index])
        place = self._place(chat, messages, index, text)
        behind = None if place is None else self._behind(chat, messages[: index + 1], index)
        if place is None and last and last in text[start:]:  # a call of a function
            return start + self._length(chat, text[start:], index, last)
        if place is None and _with_mark(messages[index], "", at_end=True) is not None:
            raise ValueError(_CHANGED)
        if place is None:  # an answer without words
            lead = self._lead(chat)
            place = start + len(lead) if text.startswith(lead, start) else start
        behind = self._behind(chat, _PLAIN, 1) if behind is None else behind
        size = _matched(behind or "", text[place:])
        if behind and not text[place : place + size].strip():  # the last answer of a chat ends with another token
            opening, ended = _MARK.match(self._asking(chat)), _ENDED.match(text, place)
            size = ended.end() - place if opening and ended and text.startswith(opening.group(), ended.end()) else size
        if place + size == start and behind != "":
            raise ValueError(_CHANGED)
        return place + size

    def _length(self, chat: Chat, rest: str, index: int, last: str) -> int:
        """Return the characters of an answer at the beginning of a text, by those that end the shorter chat."""
        own = self._try(chat, chat["messages"][: index + 1]) or ""
        own = own[max(own.rfind(last) + len(last), 0) :] if last in own else ""
        at = rest.find(last) + len(last)
        if not own:
            raise ValueError(_CHANGED)
        return at + _matched(own, rest[at:])

    def _asking(self, chat: Chat) -> str:
        """Return the words that ask for an answer behind a question."""
        asked, plain = (self._try(chat, _PLAIN[:1], ask=ask) or "" for ask in (True, False))
        return asked[len(_OPEN_MARK.sub("", _shared(asked, plain))) :]

    def _behind(self, chat: Chat, messages: list[Any], index: int, *, ask: bool = False) -> str | None:
        """Return the text behind the content of a message; ``None`` where it is not found."""
        text = self._try(chat, messages, ask=ask)
        place = None if text is None else self._place(chat, messages, index, text, ask=ask)
        return None if text is None or place is None else text[place:]

    def _place(
        self, chat: Chat, messages: list[Any], index: int, text: str, *, at_end: bool = True, ask: bool = False
    ) -> int | None:
        """Return where the content of a message begins or ends in the text; ``None`` where it is not found."""
        mark = secrets.token_hex(12)
        changed = _with_mark(messages[index], mark, at_end=at_end)
        if changed is None:
            return None
        found = self._try(chat, [*messages[:index], changed, *messages[index + 1 :]], ask=ask) or ""
        return found.index(mark) if found.count(mark) == 1 and found.replace(mark, "") == text else None

    def _try(self, chat: Chat, messages: list[Any], *, ask: bool = False) -> str | None:
        """Return the text of messages, which the template may refuse, without a thought that it begins itself."""
        try:
            text = self._render(chat, messages, add_generation_prompt=ask)
            return _THOUGHT.sub("", text) if ask else text
        except _TooLongError:
            raise
        except Exception:  # of the template
            return None

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
            raise _TooLongError(f"the chat template writes {len(text):,} characters for a chat of {self._given:,}")
        return text


def _shared(one: str, other: str) -> str:
    """Return what two texts begin with."""
    return os.path.commonprefix([one, other])  # noqa: RUF071 - they are no paths


def _matched(expected: str, text: str) -> int:
    """Return the characters that a text begins with as expected; no part of a special token."""
    same = _shared(expected, text)
    return len(same if len(same) == len(expected) else _OPEN_MARK.sub("", same))


def _with_mark(message: dict[str, Any], mark: str, *, at_end: bool) -> dict[str, Any] | None:
    """Return a message with a mark at an end of its content; ``None`` where it has no text."""
    content = message.get("content")
    if isinstance(content, str):
        text = content.strip()
        if not text:
            return None
        before, _, after = content.partition(text)
        return {**message, "content": f"{before}{text}{mark}{after}" if at_end else f"{before}{mark}{text}{after}"}
    parts = [*content] if isinstance(content, list) else []
    at = [index for index, part in enumerate(parts) if isinstance(part, dict) and str(part.get("text") or "").strip()]
    if not at:
        return None
    index = at[-1 if at_end else 0]
    inner = _with_mark({"content": parts[index]["text"]}, mark, at_end=at_end)
    assert inner is not None
    parts[index] = {**parts[index], "text": inner["content"]}
    return {**message, "content": parts}


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
