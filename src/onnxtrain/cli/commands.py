"""The commands of ``onnxtrain``, with those of plugins."""

from __future__ import annotations

from typing import Any, Final

from onnxtrain.errors.registries import Registry

_NAMES = (
    *("fit", "evaluate", "predict", "inspect", "adapter", "quantize", "export"),
    *("runs", "completion", "demo"),
)

COMMANDS: Final[Registry[Any]] = Registry(
    "command",
    lambda given: all(hasattr(given, name) for name in ("command", "HELP", "EXAMPLES")),
    "a module with command, HELP and EXAMPLES",
    {name: f"onnxtrain.cli.{name.replace('-', '_')}" for name in _NAMES},
)
"""Each is a module: a function ``command``, its ``HELP`` and ``EXAMPLES`` (not its docstring: ``python -OO`` removes
those). Ours are modules of this package, those of plugins anywhere."""
