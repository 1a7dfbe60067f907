"""Make control characters in names from files visible."""

from __future__ import annotations

import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that a terminal obeys or hides: control characters, marks that change the direction
of writing, surrogates, line and paragraph separators."""

_JOINERS = "\u200c\u200d"
"""Between letters and within emoji: they change only how their neighbours look."""


def visible(text: str) -> str:
    r"""Return a text whose characters are all shown and none is obeyed; line breaks and tabs stay.

    >>> visible("layer\x1b[31m")
    'layer\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(
        each
        if each in "\n\t" or each in _JOINERS or unicodedata.category(each) not in _HIDDEN
        else each.encode("unicode_escape").decode("ascii")
        for each in text
    )
