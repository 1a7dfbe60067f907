"""Writes what type checkers read of the names that the package finds by reflection: optimizers, losses.

python tools/stubs.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

from onnxtrain.losses import LOSSES
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.operators.optimizer import Optimizer, added_names
from onnxtrain.operators.registry import Entry

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onnxtrain"
FACE = PACKAGE / "__init__.pyi"

_OPERATORS = '''# Written by `python tools/stubs.py`; do not edit.
"""Optimizers as ONNX operators: schema, reference over NumPy arrays, body in standard operators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from .evaluation import emit as emit
from .nodes import infer_optimizer_types as infer_optimizer_types
from .optimizer import Optimizer as Optimizer
from .registry import Entry
from .sparsity import Sparsity

OPTIMIZERS: Final[Mapping[str, Entry]]
'''

_LOSSES = '''# Written by `python tools/stubs.py`; do not edit.
"""Losses, built as graphs of standard operators from a prediction and a target."""

from collections.abc import Mapping
from typing import Final

'''


def operators() -> str:
    """The stub of ``onnxtrain.operators``: settings by all their names, and the operators over arrays."""
    made = [_OPERATORS]
    for name, entry in OPTIMIZERS.items():
        made += [_settings(name, entry.settings), _over_arrays(entry)]
    return "\n".join(made)


def _settings(name: str, settings: type[Optimizer]) -> str:
    own = [(field.name, field.type, field.default) for field in fields(settings)]
    arguments = [f"{field}: {kind} = {_shown(default)}," for field, kind, default in own]
    arguments += ["*,", *(f"{also}: {kind} = ...," for also, kind in added_names(settings).items())]
    lines = [
        "@dataclass(frozen=True)",
        f"class {name}(Optimizer):",
        textwrap.indent(f'"""{inspect.cleandoc(settings.__doc__ or "")}\n"""', "    ", lambda line: bool(line.strip())),
        "",
        *(f"    {field}: {kind}" for field, kind, _ in own),
        "    def __init__(",
        "        self,",
        *(f"        {argument}" for argument in arguments),
        "    ) -> None: ...",
    ]
    for also, value in vars(settings).items():
        if isinstance(value, property) and not hasattr(Optimizer, also):
            assert value.fget is not None
            lines += ["    @property", f"    def {also}(self) -> {value.fget.__annotations__['return']}: ..."]
    lines.append("")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _over_arrays(entry: Entry) -> str:
    """The operator over arrays; its attributes are typed by their kinds."""
    kinds = {float: "float", str: "str", tuple: "tuple[int, ...]"}
    attributes = [
        f"{attribute.name}: {kinds[attribute.kind]}"
        + ("" if attribute.default is None else f" = {_shown(attribute.default)}")
        for attribute in entry.schema.attributes
    ]
    arguments = ["R: ArrayLike", "T: ArrayLike", "*inputs: ArrayLike", *attributes]
    lines = [f"def {entry.schema.name.lower()}(", *(f"    {argument}," for argument in arguments)]
    return "\n".join([*lines, ") -> tuple[np.ndarray, ...]: ...", ""])


def losses() -> str:
    """The stub of ``onnxtrain.losses``."""
    of_base = ("Loss", "ReducedLoss", "TargetForm", "TargetKind", "examples", "mean_over", "node_rank")
    bases = [("onnxtrain.losses.base", name) for name in of_base]
    found = [(each.__module__, each.__name__) for each in LOSSES.values()]
    names = sorted([*bases, ("onnxtrain.losses.custom_loss", "CustomLoss"), *found], key=lambda each: _by_kind(*each))
    lines = [f"from {module} import {name} as {name}" for module, name in names]
    return _LOSSES + "\n".join(lines) + "\n\nLOSSES: Final[Mapping[str, type[Loss]]]\n"


def _by_kind(module: str, name: str) -> tuple[str, int, str]:
    """The order of imports: constants and abbreviations of a module, then classes, then functions."""
    return module, 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def face() -> str:
    """The stub of the package, with the names of the optimizers."""
    lines = FACE.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("from .operators import "))
    others = [line for line in lines if not re.match(r"from \.operators import ", line)]
    names = sorted(OPTIMIZERS, key=lambda name: _by_kind("", name))
    others[first:first] = [f"from .operators import {name} as {name}" for name in names]
    return "\n".join(others) + "\n"


def stubs() -> dict[Path, str]:
    """All stubs that this tool writes, by file."""
    return {
        FACE: face(),
        PACKAGE / "losses" / "__init__.pyi": losses(),
        PACKAGE / "operators" / "__init__.pyi": operators(),
    }


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
