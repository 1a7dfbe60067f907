"""Write docs/names.md: every public name with the beginning of its docstring.

python tools/names_page.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "names.md"
MODULES = (
    "losses", "metrics", "schedules", "callbacks", "data", "layers", "sklearn", "distributed", "pruning", "examples",
    "adapters", "audio", "images", "tables", "text", "hub", "testing", "operators", "kernels", "errors",
)  # fmt: skip
LONG = 9  # words
CLAUSES = "which|whose|where|such|like|for|per|written|as|so|in|with|from|scaled|else|epoch|every"
CLASSES = ("Trainer", "TrainingSession")
HEAD = """# Names

The public names of `import onnxtrain`, which [keep their signatures](releases.md#versions). `help(onnxtrain.Trainer)`
has arguments, shapes, errors and examples. A name of the first list is not repeated under its module. Written by
`python tools/names_page.py`.
"""


def summary(value: Any) -> str:
    """The first sentence of a docstring, on one line; a long one ends at its colon or at a clause behind a comma."""
    text = inspect.getdoc(value) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    plain = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", paragraph).replace("``", "`")
    sentence = re.split(r"(?<=[a-z)`])[.;] ", plain)[0].removesuffix(".")
    if len(sentence.split()) > LONG:
        sentence = re.sub(r"(?<= )([^ :]+): .*", r"\1", sentence)
    if len(sentence.split()) > LONG:
        sentence = re.sub(rf", ({CLAUSES}) .*", "", sentence)
    return sentence


def public_names(module: Any) -> list[str]:
    """The names of a module: those it lists, else the functions and classes that it defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        names = {*listed, *(name for name in dir(module) if not name.startswith("_"))}  # also those of plugins
        return sorted(sorted(names), key=str.lower)
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]
    return sorted(defined, key=str.lower)


def methods(owner: type) -> Iterator[str]:
    """The public methods and properties that a class documents."""
    for name, _ in inspect.getmembers(owner):
        if not name.startswith("_") and inspect.getdoc(inspect.getattr_static(owner, name)):
            yield name


def rows(entries: list[tuple[str, Any]]) -> str:
    """Format a list of names and summaries; nine functions that differ in their optimizer only share a line."""
    lines: dict[str, list[str]] = {}
    for name, value in entries:
        text = summary(value).removeprefix(f"{name}: ")
        optimizer = rf"(the operator|one step)( of)? {name.strip('_')}\b"
        lines.setdefault(re.sub(optimizer, r"\1 of that optimizer", text, flags=re.I), []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {text}" for text, names in lines.items())


def is_described(value: Any) -> bool:
    """Return whether a value can have its own docstring; a constant has only its type's."""
    return isinstance(value, property) or inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)


def undocumented() -> list[str]:
    """Return the public names without a docstring."""
    found = []
    for heading, entries in sections():
        for name, value in entries:
            text = inspect.getdoc(value) or ""
            generated = dataclasses.is_dataclass(value) and text.startswith(f"{name}(")
            if is_described(value) and (not text or generated):
                found.append(f"{heading}.{name}")
    return found


def sections() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Headings with their names and values."""
    package = importlib.import_module("onnxtrain")
    yield "onnxtrain", [(name, getattr(package, name)) for name in public_names(package)]
    for name in CLASSES:
        owner = getattr(package, name)
        yield f"onnxtrain.{name}", [(entry, inspect.getattr_static(owner, entry)) for entry in methods(owner)]
    for name in MODULES:
        module = getattr(package, name)
        yield f"onnxtrain.{name}", [(entry, getattr(module, entry)) for entry in public_names(module)]


def page() -> str:
    """The page as text; a name that the package offers itself is not repeated under its module."""
    parts = [HEAD]
    offered: set[int] = set()
    for heading, entries in sections():
        described = [(name, value) for name, value in entries if is_described(value) and id(value) not in offered]
        if not offered:
            offered = {id(value) for _, value in described}
        parts.append(f"## {heading}\n\n{rows(described)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
