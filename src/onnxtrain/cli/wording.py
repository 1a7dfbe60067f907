"""Messages of the library in the words of the command line: ``batch_norm="train"`` becomes ``--batch-norm train``."""

from __future__ import annotations

import dataclasses
import inspect
import re

from cyclopts import Argument, CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from onnxtrain.spelling import nearest

RENAMED = {"output": "prediction"}
"""Arguments whose flag has another name: ``--output`` is the file that a command writes."""

_ARGUMENT = re.compile(r"\b(?P<name>[a-z_]+)=(?P<value>True|False|'[^']*'|\"[^\"]*\"|-?\d+(?:\.\d+)?)?")
_READER = re.compile(r"onnxtrain\.data\.\w+\(path, ([^()]*)\)")
"""A reader with a setting, which has a flag here."""

_PLAIN = re.compile(r"[\w.:-]+")


def flag(name: str) -> str:
    """The flag of an argument."""
    return "--" + RENAMED.get(name, name).replace("_", "-")


def in_flags(sentence: str) -> str:
    """A message with the arguments of :class:`~onnxtrain.Trainer` and ``fit`` written as flags."""
    names = _argument_names()

    def replace(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in names:
            return match[0]
        if value in (None, "True"):
            return flag(name)
        if value == "False":
            return flag(f"no_{name}")
        bare = value.strip("\"'")
        return f"{flag(name)} {bare if _PLAIN.fullmatch(bare) else repr(bare)}"

    return _ARGUMENT.sub(replace, _READER.sub(r"\1", sentence))


def usage(error: CycloptsError) -> str:
    """Return a message for wrong arguments, with a pointer to the help."""
    command = " ".join(["onnxtrain", *(error.command_chain or ())])
    if isinstance(error, MissingArgumentError) and error.keyword is None and error.argument is not None:
        return f"{command} needs {_explained(error.argument)}; see {command} --help."
    if isinstance(error, UnusedCliTokensError):
        listed = " and ".join(map(repr, error.unused_tokens or ()))
        return f"{command} has no place for {listed}, behind all that it takes; see {command} --help."
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
    """A flag or an argument with the first sentence of its help."""
    parameter = argument.parameter
    value = f" {parameter.metavar}" if parameter.metavar and argument.name.startswith("-") else ""
    first = (parameter.help or "").partition("  [")[0].partition(". ")[0].strip().rstrip(".")
    first = first if first[1:2].isupper() else first[:1].lower() + first[1:]
    return f"{argument.name}{value}{first and f' ({first})'}"


def _argument_names() -> set[str]:
    from onnxtrain.cli.data_flags import ReaderFlags
    from onnxtrain.cli.flags import LossFlags
    from onnxtrain.pruning.prune import prune
    from onnxtrain.training.trainer import Trainer

    functions = (Trainer, Trainer.fit, prune)
    names = {name for function in functions for name in inspect.signature(function).parameters} - {"self", "y"}
    return names | {
        "targets",
        "lora_targets",
        "entry",
        *(field.name for flags in (LossFlags, ReaderFlags) for field in dataclasses.fields(flags)),
    }
