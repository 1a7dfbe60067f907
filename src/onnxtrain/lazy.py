"""Names that are imported when they are first used, so that a program pays for what it needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package whose names are imported from their modules at the first use.

    Args:
        package: The package's ``__name__``.
        homes: The module of each name; a module that ends in the name is the value itself.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = importlib.import_module(home)
        value = module if home.rpartition(".")[2] == name and not hasattr(module, name) else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find


def public_names(package: str) -> Callable[[], list[str]]:
    """Return a ``__dir__`` for a package: its public names, and no module or helper that was imported on the way."""

    def names() -> list[str]:
        found = vars(sys.modules[package])
        return sorted({*found["__all__"], *(name for name in found if name.startswith("__") and name.endswith("__"))})

    return names


class LazyMapping(Mapping[str, Any]):
    """Objects by name, each imported when it is asked for.

    Args:
        homes: ``module:name`` of each object.
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, key: str) -> Any:
        module, _, name = self._homes[key].partition(":")
        return getattr(importlib.import_module(module), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)
