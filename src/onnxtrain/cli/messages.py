"""Messages on the terminal: the library's arguments as flags, and one line for each log record and warning.

``batch_norm="train"`` becomes ``--batch-norm train``. Records and warnings of other libraries (onnx-ir about unusual
attributes, NumPy about overflows) stay hidden: they quote names from the user's files and would distract from the
sentence of an error. ``--debug`` shows all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cyclopts import Argument, CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

import onnxtrain
from onnxtrain.cli.commands import COMMANDS
from onnxtrain.cli.flags import flag_of
from onnxtrain.cli.help import first_sentence
from onnxtrain.errors import TrainingHint
from onnxtrain.errors.escaping import visible
from onnxtrain.errors.registries import added
from onnxtrain.errors.spelling import nearest

_PACKAGE = str(Path(onnxtrain.__file__).parent) + os.sep

_TEXT = r"'[^']*'|\"[^\"]*\""
_ARGUMENT = re.compile(
    rf"\b(?P<name>[a-z_]+)=(?P<value>True|False|{_TEXT}|-?\d+(?:\.\d+)?|\[(?:{_TEXT})(?:, (?:{_TEXT}))*\])?"
)
_READER = re.compile(r"onnxtrain\.data\.\w+\(path, ([^()]*)\)")
"""A data reader with a setting that is a flag."""

_PLAIN = re.compile(r"[\w.:-]+")


def in_flags(sentence: str) -> str:
    """Return a message with arguments of :class:`~onnxtrain.Trainer` and ``fit`` written as flags."""
    names = _argument_names()

    def replace(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in names:
            return match[0]
        if value in (None, "True"):
            return flag_of(name)
        if value == "False":
            return flag_of(f"no_{name}")
        bare = [text.strip("\"'") for text in (re.findall(_TEXT, value) or [value])]
        return " ".join(f"{flag_of(name)} {text if _PLAIN.fullmatch(text) else repr(text)}" for text in bare)

    return _ARGUMENT.sub(replace, _READER.sub(r"\1", sentence))


def usage(error: CycloptsError) -> str:
    """Return a message for wrong arguments, with a pointer to the help."""
    command = " ".join(["onnxtrain", *(error.command_chain or ())])
    if isinstance(error, MissingArgumentError) and error.keyword is None and error.argument is not None:
        return f"{command} needs {_explained(error.argument)}; see {command} --help."
    if isinstance(error, UnusedCliTokensError):
        listed = " and ".join(map(repr, error.unused_tokens or ()))
        return f"{command} takes no further argument {listed}; see {command} --help."
    if isinstance(error, UnknownOptionError) and error.token.source == "cli":
        named = [name.removeprefix("--") for each in error.argument_collection or () for name in each.names]
        given = (error.token.keyword or error.token.value).partition("=")[0]
        near = nearest(given.lstrip("-"), [name for name in named if not name.startswith("-")])
        question = "; see" if near is None else f". Did you mean --{near}? See"
        return f"Unknown option: {given}{question} {command} --help."
    sentence = " ".join(str(error).split()).rstrip(".")  # some messages end with a full stop, others do not
    link = " See" if sentence.endswith("?") else "; see"
    return f"{sentence}{link} {command} --help."


def _explained(argument: Argument) -> str:
    """Return a flag or an argument with the first sentence of its help."""
    parameter = argument.parameter
    value = f" {parameter.metavar}" if parameter.metavar and argument.name.startswith("-") else ""
    first = first_sentence(parameter.help or "").partition("  [")[0].strip().rstrip(".")
    first = first if first[1:2].isupper() else first[:1].lower() + first[1:]
    return f"{argument.name}{value}{first and f' ({first})'}"


def _argument_names() -> set[str]:
    from onnxtrain.cli.plugin_flags import ReaderFlags
    from onnxtrain.cli.training_flags import LossFlags
    from onnxtrain.training.config import AdvancedOptions
    from onnxtrain.training.trainer import Trainer

    functions = (Trainer, Trainer.fit, *(COMMANDS[name].command for name in added("command")))
    names = {name for function in functions for name in _flags_of(function)} - {"self", "y"}
    return names | {
        *AdvancedOptions.__annotations__,
        "targets",
        "lora_targets",
        "lora_rank_pattern",
        "lora_alpha_pattern",
        "entry",
        *(field.name for flags in (LossFlags, ReaderFlags) for field in dataclasses.fields(flags)),
    }


def _flags_of(function: Any) -> Iterator[str]:
    """Yield the parameters of a function; those of a command may be classes of flags."""
    for name, parameter in inspect.signature(function).parameters.items():
        if dataclasses.is_dataclass(parameter.default):
            yield from (field.name for field in dataclasses.fields(parameter.default))
        else:
            yield name


class _Notices(logging.Handler):
    """Writes log records as lines on the standard error."""

    def __init__(self, *, everything: bool) -> None:
        super().__init__(logging.WARNING)
        self._everything = everything

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record of onnxtrain; records of other libraries only if ``everything`` is true."""
        if self._everything or record.name.partition(".")[0] == "onnxtrain":
            _write_line("warning", record.getMessage())


def _write_line(label: str, text: str) -> None:
    """Write one line on the standard error, with control characters escaped."""
    sys.stderr.write(visible(f"{label}: {' '.join(text.split())}") + "\n")


@contextlib.contextmanager
def notices(*, everything: bool) -> Iterator[None]:
    """Print log records and warnings as lines for a while."""
    handler, root = _Notices(everything=everything), logging.getLogger()

    def show(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        if issubclass(category, TrainingHint):
            sys.stderr.write(visible(f"hint: {in_flags(str(message))}") + "\n")
        elif everything or filename.startswith(_PACKAGE):
            _write_line("warning", str(message))

    root.addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrainingHint)
        warnings.showwarning = show
        try:
            yield
        finally:
            root.removeHandler(handler)
