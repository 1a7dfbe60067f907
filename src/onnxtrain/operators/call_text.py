"""Parse calls written as text, for example on the command line: ``step(10 epochs, 0.5)``, ``huber(delta=0.3)``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_CALL: Final = r"\s*(?P<name>[a-z_][a-z_0-9]*)\s*(?:\((?P<arguments>.*)\)\s*)?"
_NAMED: Final = r"(?P<name>[a-z_][a-z_0-9]*)\s*=(?P<value>.*)"


class Call(NamedTuple):
    """A parsed call; its arguments are still text."""

    name: str
    positional: tuple[str, ...]
    named: dict[str, str]

    def fits(self, function: Callable[..., Any]) -> bool:
        """Return whether a function accepts these arguments."""
        try:
            inspect.signature(function).bind(*self.positional, **self.named)
        except TypeError:
            return False
        return True


def name_of(text: object) -> str:
    """Return the first word of a text in lower case, for spelling suggestions; empty for other values.

    >>> name_of("cosin(0.1)")
    'cosin'
    """
    match = re.match(r"\s*([\w-]+)", text) if isinstance(text, str) else None
    return "" if match is None else match[1].lower()


def read_call(text: str) -> Call | None:
    """Parse a call; return ``None`` if the text is not one.

    >>> read_call("cross(0.1, weights=(1, 2))")
    Call(name='cross', positional=('0.1',), named={'weights': '(1, 2)'})
    """
    match = re.fullmatch(_CALL, text, re.DOTALL)
    parts = None if match is None else _split(match["arguments"] or "")
    if match is None or parts is None:
        return None
    positional: list[str] = []
    named: dict[str, str] = {}
    for part in parts:
        pair = re.fullmatch(_NAMED, part, re.DOTALL)
        if pair is None and not named:
            positional.append(part)
        elif pair is None or pair["name"] in named:
            return None
        else:
            named[pair["name"]] = pair["value"].strip()
    return Call(match["name"], tuple(positional), named)


def split_list(text: str) -> list[str]:
    """Split a text at commas outside brackets and braces, strip the parts, and drop empty ones.

    >>> split_list("accuracy, f1(average=micro),")
    ['accuracy', 'f1(average=micro)']
    """
    parts = _split(text)
    return [text] if parts is None else [part for part in parts if part]


_LONGEST: Final = 2**20
"""Characters of the longest literal that is read."""


def read_literal(text: str) -> Any:
    """Return the value of a literal in Python's notation, whoever wrote it."""
    try:
        if len(text) <= _LONGEST:
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"no literal: {error}") from error
    raise ValueError("too long for a literal")


def _split(arguments: str) -> list[str] | None:
    """Split at commas outside brackets and braces; return ``None`` if brackets do not match."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        return None
    return [part.strip() for part in parts] if arguments.strip() else []
