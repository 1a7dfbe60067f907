"""Imports that a dependency makes and that training seldom needs, put off until something of them is used.

onnx-ir imports sympy for arithmetic with symbolic sizes: a third of a training process's memory before its first
step, and half of its start. onnx imports what joins and cuts models and what generates its own sources, which bring
the standard library's archives, processes and command lines. In the place of such a module stands one that imports it
when the first attribute is read. (Python's own lazy loader does not serve here: an ``import`` statement of others
already makes it load.) A module that is imported already, or is not there, is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    """Stands for a module until an attribute of it is read."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(module.__dict__)  # for those who hold this object already
        return getattr(module, name)


def defer_imports() -> None:
    """Put off sympy, the module of onnx-ir that uses it while it is imported, and modules of onnx.

    To be called before these packages are imported; what is imported already stays as it is.
    """
    _defer_from("onnx", "compose", "gen_proto", "utils")
    if _defer_from("onnx_ir", "_symbolic_shapes"):
        _defer("sympy", None)


def _defer_from(name: str, *modules: str) -> bool:
    """Put off modules of a package; returns whether it is there and not imported yet."""
    package = None if name in sys.modules else importlib.util.find_spec(name)
    if package is None or package.submodule_search_locations is None:
        return False
    for module in modules:
        _defer(f"{name}.{module}", list(package.submodule_search_locations))
    return True


def _defer(name: str, locations: Sequence[str] | None) -> None:
    spec = importlib.machinery.PathFinder.find_spec(name, locations)
    if name not in sys.modules and spec is not None:
        sys.modules[name] = stub = _Deferred(name)
        stub.__spec__ = spec
