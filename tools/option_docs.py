"""Writes options into signatures and docstrings, from the fields of the classes that list them.

Those of TrainingConfig go into the docstring of ``Trainer``; those of FitOptions and PruneOptions into the signatures
and docstrings of ``Trainer.fit`` and ``prune``.

python tools/option_docs.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from onnxtrain.plugins.pruning.options import PruneOptions
from onnxtrain.plugins.pruning.prune import prune
from onnxtrain.training.config import ADVANCED, TrainingConfig
from onnxtrain.training.fit_options import FitOptions
from onnxtrain.training.trainer import Trainer

TRAINER, PRUNE = Path(inspect.getfile(Trainer)), Path(inspect.getfile(inspect.unwrap(prune)))


def documented(source: type, names: Iterable[str], indent: int) -> str:
    """Return the documentation of arguments, as in a docstring."""
    docs = {field.name: field.metadata.get("doc") for field in dataclasses.fields(source)}
    lines = (
        textwrap.fill(
            f"{name}: {docs[name]}",
            width=120,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + 4),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name in names
    )
    return "\n".join(lines) + "\n"


def parameters(source: type, indent: int) -> str:
    """Return the options as keyword arguments of a signature."""
    lines = []
    for field in dataclasses.fields(source):
        default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        lines.append(f"{' ' * indent}{field.name}: {field.type} = {default},\n")
    return "".join(lines)


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return a text with other content between two marks, each the first of its kind."""
    start = text.index(begin) + len(begin)
    return text[:start] + content + text[text.index(end, start) :]


def trainer(text: str) -> str:
    """Return the source of the trainer with today's documentation of the options in its first docstring."""
    named = [name for name in inspect.signature(Trainer).parameters if name not in ("self", "advanced")]
    content = documented(TrainingConfig, (*named, *ADVANCED), 8)
    return between(text, "    Args:\n", "\n    Raises:\n", content)


def function(text: str, name: str, source: type) -> str:
    """Return the source of a module with today's options in the signature and the docstring of a function."""
    found = re.search(rf"^( *)def {name}\(\n", text, re.MULTILINE)
    assert found is not None
    head, body, outer = text[: found.end()], text[found.end() :], len(found[1])
    first = dataclasses.fields(source)[0].name
    names = [field.name for field in dataclasses.fields(source)]
    last = "**options" if "**options" in body.partition(") -> ")[0] else ") -> "
    indent = " " * (outer + 4)
    begin = f"\n{indent}{first}: "
    start = body.index(begin) + 1
    stop = body.index(f"\n{indent if last == '**options' else ' ' * outer}{last}", start) + 1
    body = body[:start] + parameters(source, outer + 4) + body[stop:]
    start = body.index(f"\n{indent}    {first}: ", body.index("Args:\n")) + 1
    stop = min(body.index(mark, start) for mark in (f"\n{indent}    **options: ", "\n\n") if mark in body[start:]) + 1
    return head + body[:start] + documented(source, names, outer + 8) + body[stop:]


WRITTEN: dict[Path, tuple[Callable[[str], str], ...]] = {
    TRAINER: (trainer, lambda text: function(text, "fit", FitOptions)),
    PRUNE: (lambda text: function(text, "prune", PruneOptions),),
}


def written(path: Path) -> str:
    """Return the source of a file with today's options."""
    text = path.read_text()
    for write in WRITTEN[path]:
        text = write(text)
    return text


if __name__ == "__main__":
    for each in WRITTEN:
        each.write_text(written(each))
