"""Imports that a dependency makes and that training seldom needs, put off until something of them is used.

onnx-ir imports sympy for arithmetic with symbolic sizes: a third of a training process's memory before its first
step, and half of its start. In the place of such a module stands one that imports it when the first attribute is
read. (Python's own lazy loader does not serve here: an ``import`` statement of others already makes it load.) A module
that is imported already, or is not there, is left as it is.
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
    """Put off sympy and the module of onnx-ir that uses it while it is imported; call before onnx-ir is imported."""
    if "onnx_ir" in sys.modules:
        return
    package = importlib.util.find_spec("onnx_ir")
    if package is not None and package.submodule_search_locations is not None:
        _defer("sympy", None)
        _defer("onnx_ir._symbolic_shapes", list(package.submodule_search_locations))


def _defer(name: str, locations: Sequence[str] | None) -> None:
    spec = importlib.machinery.PathFinder.find_spec(name, locations)
    if name not in sys.modules and spec is not None:
        sys.modules[name] = stub = _Deferred(name)
        stub.__spec__ = spec
