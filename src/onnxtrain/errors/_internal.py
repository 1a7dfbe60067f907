"""Small helpers of the whole package: pauses of the garbage collector, ignored warnings, imports, ``dir()``."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from onnxtrain.errors import OptionError

T = TypeVar("T")

_lock = threading.RLock()
_pauses = 0
_was_enabled = True
_ignoring = 0
_restoring = ExitStack()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Run the body without cyclic garbage collection, in any number of threads.

    Building a graph allocates some hundred thousand long-lived objects. Collections would scan them again and again,
    a sixth of the time to build a model of 2,000 nodes.
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()


@contextmanager
def ignored_warnings(category: type[Warning] = Warning, module: str = "") -> Iterator[None]:
    """Ignore warnings of a category from modules that match a pattern."""
    global _ignoring
    with _lock:
        if not _ignoring:
            _restoring.enter_context(warnings.catch_warnings())
        _ignoring += 1
        warnings.filterwarnings("ignore", category=category, module=module)
    try:
        yield
    finally:
        with _lock:
            _ignoring -= 1
            if not _ignoring:
                _restoring.close()


def import_optional(module: str, *, needs: str, packages: str) -> Any:
    """Import a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(f"{needs} ({error}); install it with pip install {packages}.") from None


def classes_in(package: str, base: type[T], ending: str = "") -> dict[str, type[T]]:
    """Import the modules of a package; return the public classes derived from a base that they define, by name."""
    found: dict[str, type[T]] = {}
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not file.name.endswith(ending):
            continue
        module = importlib.import_module(f"{package}.{file.name}")
        for name, value in vars(module).items():
            own = isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
            if own and not name.startswith("_"):
                found[name] = value
    return found


def public_names(package: str, more: Callable[[], Iterable[str]] = tuple) -> Callable[[], list[str]]:
    """Return a ``__dir__`` for a package: its public names, without the modules and helpers that it imports."""

    def names() -> list[str]:
        found = vars(sys.modules[package])
        return sorted(
            {*found["__all__"], *more(), *(name for name in found if name.startswith("__") and name.endswith("__"))}
        )

    return names
