"""Patterns of names: one glob grammar for initializers, modules, nodes and layers.

``*`` stands for any characters, ``?`` for one, ``[ab]`` and ``[!ab]`` for one of a set. ``|`` separates alternatives,
and ``{q,k}`` holds alternatives within a name. Case counts. A name that equals the pattern matches, whatever its
characters are.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections.abc import Iterable, Sequence

from onnxtrain.errors.formatting import listed

Patterns = str | Sequence[str]
"""Glob patterns of names: one, or several."""

_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|\{[^{}]*\}|\||[^\[{|]+|.", re.DOTALL)
"""A set of characters, alternatives within a name, a separator of alternatives, or plain text."""

_SHOWN = 8
"""Number of names that an error lists."""


def pattern_list(patterns: Patterns | None) -> list[str]:
    """Return patterns as a list; ``None`` is an empty one."""
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


@functools.lru_cache(maxsize=1024)
def alternatives(pattern: str) -> tuple[str, ...]:
    """Expand ``|`` and braces.

    Example:
        >>> alternatives("*.{q,v}_proj|head.[|]")
        ('*.q_proj', '*.v_proj', 'head.[|]')
    """
    choices: list[list[list[str]]] = [[]]  # of each alternative, the choices of its tokens
    for token in _TOKEN.findall(pattern):
        if token == "|":
            choices.append([])
        elif len(token) > 1 and token[0] == "{":
            choices[-1].append(re.split(r"[,|]", token[1:-1]))
        else:
            choices[-1].append([token])
    return tuple("".join(chosen) for each in choices for chosen in itertools.product(*each))


def match_alike(patterns: Iterable[str], names: Sequence[str]) -> bool:
    """Return whether each pattern matches all of the names, or none of them.

    Example:
        >>> [match_alike(patterns, ["conv1", "relu1"]) for patterns in ([], ["*1", "fc*"], ["*1", "conv*"])]
        [True, True, False]
    """
    return all(len({matches(pattern, name) for name in names}) < 2 for pattern in patterns)


def matches(pattern: str, *names: str) -> bool:
    """Return whether a pattern matches one of the names.

    Example:
        >>> [matches(pattern, "layer.1.bias") for pattern in ("*.bias", "*.{weight,bias}", "a|layer.?.*", "*.BIAS")]
        [True, True, True, False]
    """
    globs = (pattern, *alternatives(pattern))  # `|` and braces may also be characters of the name
    return any(name == pattern or any(fnmatch.fnmatchcase(name, glob) for glob in globs) for name in names)


def escape(name: str) -> str:
    """Return the pattern that matches this name alone.

    Example:
        >>> escape("w[0]|*")
        'w[[]0][|][*]'
    """
    return re.sub(r"([*?\[|{])", r"[\1]", name)


def no_match(option: str, pattern: str, kind: str, known: Iterable[str], advice: str = "") -> str:
    """Return the error message for a pattern that matches nothing.

    Example:
        >>> no_match("train", "head.*", "initializer", ["w", "b"])
        "train='head.*' matches no initializer; the model has w, b."
    """
    shown = listed(known, _SHOWN, counted=False) or "none"
    return f"{option}={pattern!r} matches no {kind}; the model has {shown}.{advice and ' '}{advice}"
