"""Texts of other people's files, shown and not obeyed."""

from __future__ import annotations

import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of what a terminal or a page obeys, or does not show, instead of showing it: control characters,
marks that turn the direction of writing, halves of characters, separators of lines and paragraphs."""

_JOINERS = "\u200c\u200d"
"""Between letters and within emoji: they change how their neighbours look, and nothing else."""


def visible(text: str) -> str:
    r"""A text whose every character is shown and none is obeyed; lines and tabs stay.

    Names in models, data and checkpoints are other people's. Printed as they are, they could write anywhere on the
    terminal, set its title, or show one thing and mean another.

    >>> visible("layer\x1b[31m")
    'layer\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character in "\n\t" or character in _JOINERS or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
