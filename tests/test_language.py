"""Words and docstring openings that readers of this code stumble over do not come back."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "native", "include", "web/src", "docs", "examples", "tests", "tools", "benchmarks", "recipes")
ENDINGS = {".py", ".pyi", ".md", ".h", ".hpp", ".cpp", ".cu", ".ts"}
INSTEAD = {
    r"taken again|computed again": "recomputed",
    r"few bits": "low-bit",
    r"whole numbers?": "integers",
    r"announced? gradients?": "notify when gradients are ready",
    r"in the place of": "instead of, replaces, placeholder for",
    r"looks? random": "pseudo-random",
    r"weights? in halves|read_halves": "float16 or bfloat16 weights",
    r"free batch": "dynamic batch",
    r"hidden weights": "weights stored outside initializers",
    r"other people's|stranger's|of strangers": "upstream, other tools, users",
    r"tables? of positions": "position tables",
    r"makes? numbers of|part by part": "dequantize tile by tile",
    r"what is learned": "trainable parameters",
    r"in a circle|circles of|(?-i:import circle)": "cycle",
    r"has from elsewhere": "ml_dtypes extension types",
    r"such as is|is none that": "a plain verb",
    r"told so|(is|are|was|were) told": "an error or hint says",
    r"the course of a training": "training history",
    r"pasts|keys and values of the past": "KV cache",
    r"products? with weights?|products? with a weight": "linear layer, matrix multiplication",
    r"a picture|the pictures?|pictures (of|are|that|in|with)": "image, figure",
}
OPENINGS = {"What", "Whose", "How", "That", "Where"}


@functools.cache
def texts() -> dict[str, str]:
    """The files of the folders and the pages in the root, by path."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for folder in FOLDERS:
        paths += sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS)
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: path.read_text(encoding="utf-8") for name, path in named.items() if name != "tests/test_language.py"}


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module with the lines of their definitions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "lineno", 1), docstring


@pytest.mark.parametrize("words", INSTEAD)
def test_words_of_our_own_stay_away(words):
    pattern = re.compile(rf"\b({words})\b".replace(" ", r"\s+"), re.IGNORECASE)
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for name, text in texts().items()
        for match in pattern.finditer(text)
    ]
    assert not found, f"say {INSTEAD[words]}:\n" + "\n".join(found)


@pytest.mark.thorough
def test_docstrings_begin_with_a_verb_or_a_noun():
    found = [
        f"{name}:{line}: {docstring.splitlines()[0]}"
        for name, text in texts().items()
        if name.endswith(".py")
        for line, docstring in docstrings(text)
        if docstring.split()[0].strip(":,") in OPENINGS
    ]
    assert not found, "\n".join(found)
