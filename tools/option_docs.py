"""Writes the options of a training into the docstring of Trainer, from the fields of TrainingConfig.

python tools/option_docs.py
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from pathlib import Path

from onnxtrain.training.config import ADVANCED, TrainingConfig
from onnxtrain.training.trainer import Trainer

FILE = Path(inspect.getfile(Trainer))
BEGIN, END = "    Args:\n", "\n    Raises:\n"


def arguments() -> str:
    """Return the documentation of all arguments, in the order of the signature."""
    docs = {field.name: field.metadata.get("doc") for field in dataclasses.fields(TrainingConfig)}
    named = [name for name in inspect.signature(Trainer).parameters if name not in ("self", "advanced")]
    lines = (
        textwrap.fill(
            f"{name}: {docs[name]}",
            width=120,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name in (*named, *ADVANCED)
    )
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """Return the source of the trainer with today's documentation of the options in its first docstring."""
    begin = text.index(BEGIN) + len(BEGIN)
    return text[:begin] + arguments() + text[text.index(END, begin) :]


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
