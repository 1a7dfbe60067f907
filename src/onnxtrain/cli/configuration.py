"""``--config run.toml``: read flags from a file, and write the flags of a run as such a file."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter
from cyclopts.config import Dict

from onnxtrain.cli.flags import COMMON, RUNNING
from onnxtrain.errors import OptionError
from onnxtrain.model_file.small_files import read_toml

Config = Annotated[
    Path | None,
    Parameter(
        group=(RUNNING, COMMON),
        metavar="FILE",
        help="Read MODEL and flags from a .toml file. Flags are without leading hyphens there: epochs = 5. Those of "
        "the command line override them.",
    ),
]

_MODEL: Final = "model"
_ONE_CALL: Final = (
    *(
        "config",
        "run",
        "report",
        "tensorboard",
        "mlflow",
        "wandb",
        "debug",
        "quiet",
        "progress",
        "resume",
        "change",
        "json_output",
    ),
    *("parallel", "processes", "restarts", "sum_order", "compress", "shard_states", "shard_gradients", "wait"),
)
"""Flags that a written configuration omits: they belong to one call and do not affect the results."""

TOKENS: ContextVar[Sequence[str]] = ContextVar("TOKENS", default=())
"""The arguments of the running command, after ``onnxtrain``."""


def with_file(app: App, tokens: Sequence[str]) -> tuple[App, list[str]]:
    """Return the application with the flags of the file of ``--config``, and the tokens with its model."""
    path = _path(tokens)
    if path is None:
        return app, list(tokens)
    given = _read(path)
    model = given.pop(_MODEL, None)
    app.config = (Dict(given, use_commands_as_keys=False, allow_unknown=False, source=str(path)),)
    if model is not None and _lacks_model(app, tokens):
        return app, [*tokens[:1], str(model), *tokens[1:]]
    return app, list(tokens)


def _path(tokens: Sequence[str]) -> Path | None:
    for before, token in itertools.pairwise(["", *tokens]):
        if before == "--config":
            return Path(token)
        if token.startswith("--config="):
            return Path(token.partition("=")[2])
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_toml(path)
    except FileNotFoundError:
        raise OptionError(f"There is no file {str(path)!r}; --config needs a .toml file.") from None
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise OptionError(f"--config is {str(path)!r}, which cannot be read as TOML: {reason}.") from error
    table = next((name for name, value in found.items() if isinstance(value, dict)), None)
    if table is not None:
        raise OptionError(f"{str(path)!r} has a table [{table}]; it needs flags only, such as epochs = 5.")
    return found


def _lacks_model(app: App, tokens: Sequence[str]) -> bool:
    try:
        app.parse_args(list(tokens), exit_on_error=False, print_error=False)
    except MissingArgumentError as error:
        names = [] if error.argument is None else [str(name).lower() for name in error.argument.names]
        return _MODEL in names
    except CycloptsError:
        pass  # running the command reports it
    return False


def as_toml(values: Mapping[str, Any]) -> str:
    """Return arguments of a command as a configuration file: the fields of dataclasses, without those that are None.

    >>> print(as_toml({"model": Path("m.onnx"), "epochs": 5, "train": ["head.*"], "seed": None}), end="")
    model = "m.onnx"
    epochs = 5
    train = ["head.*"]
    """
    flat = dict(_flat(values))
    return "".join(f"{name} = {_value(value)}\n" for name, value in flat.items() if value is not None)


def _flat(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found += _flat({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        elif name not in _ONE_CALL:
            found.append((name, value))
    return found


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return '"' + "".join(_character(character) for character in str(value)) + '"'


def _character(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"
