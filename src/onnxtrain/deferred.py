"""Imports that a dependency makes and that training seldom needs, put off until something of them is used.

onnx-ir imports sympy for arithmetic with symbolic sizes: a third of a training process's memory before its first
step, and half of its start. onnx imports what joins and cuts models and what generates its own sources, which bring
the standard library's archives, processes, networks and command lines, and Protocol Buffers as text and as JSON; it
looks its own version up with `importlib.metadata`, which brings archives and e-mail: a twentieth of the start.
onnx-ir's writing of data files brings archives and random numbers, Protocol Buffers its messages in Python, and
`pathlib` addresses of networks: another twentieth.

While this package imports one of them for the first time, and no longer, deferred modules are where Python looks for
what it puts off. What imports that then, onnx or onnx-ir, has a module that imports the real one when its first
attribute is read. Nobody else sees any of it: `sys.modules` has real modules only, so that everybody's `import` gets
the real one. What was imported before stays as it is (workarounds: sympy at every
start, everything at every start).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_DEFERRED = {
    "onnx": (
        "calendar",
        "google.protobuf.internal.python_message",
        "google.protobuf.json_format",
        "google.protobuf.text_format",
        "importlib.metadata",
        "ipaddress",
        "onnx.compose",
        "onnx.gen_proto",
        "onnx.utils",
        "socket",
        "uuid",
    ),
    "onnx_ir": (
        "concurrent.futures",
        "onnx_ir._symbolic_shapes",
        "onnx_ir.schemas",
        "packaging.version",
        "shutil",
        "sympy",
        "tempfile",
    ),
    "onnx_ir.passes.common": ("hashlib",),
}
"""What is put off while a package is imported."""


_METADATA = "importlib.metadata"


class _DeferredModule(ModuleType):
    """Stands for a module until an attribute of it is read."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(module.__dict__)  # for those who hold this object already
        return getattr(module, name)


class _Metadata(_DeferredModule):
    """Stands for ``importlib.metadata`` until more is read of it than a version that is plain to see."""

    def version(self, name: str) -> str:
        """The version of an installed package, as its one folder of metadata says; else what the real module finds."""
        from pathlib import Path  # while `urllib.parse`, which that imports, finds no `ipaddress`

        pattern = re.compile(re.escape(name) + r"-([^-]+)\.dist-info")
        spec = PathFinder.find_spec(name)
        home = Path(spec.origin).parent.parent if spec is not None and spec.origin else Path()
        try:
            found = [entry for entry in home.iterdir() if pattern.fullmatch(entry.name)]
            (folder,) = found
            told = folder.name[len(name) + 1 : -len(".dist-info")]
            with (folder / "METADATA").open(encoding="utf-8") as file:
                lines = [line.rstrip() for line, _ in zip(file, range(_HEADERS), strict=False)]
            if f"Version: {told}" in lines:
                return told
        except (OSError, ValueError):
            pass
        return str(self.__getattr__("version")(name))


_HEADERS = 8
"""Lines of a package's metadata among which its version is."""


class _Finder:
    """Finds these packages when this one asks for them; in ``sys.meta_path`` until all are there."""

    def __init__(self) -> None:
        self._waiting = {name: modules for name, modules in _DEFERRED.items() if name not in sys.modules}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        modules = self._waiting.pop(name)
        if not _is_asked_by_this_package():
            for inner in [other for other in self._waiting if other.startswith(f"{name}.")]:
                del self._waiting[inner]
            modules = ()
        if not self._waiting:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path) if modules else None
        if spec is not None and spec.loader is not None:
            _with_deferred(spec.loader, modules)
        return spec


def _is_asked_by_this_package() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0] and (
            frame.f_globals["__name__"] != __name__
        ):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _with_deferred(loader: Any, modules: Sequence[str]) -> None:
    """Let a loader execute its module once while there are deferred ones for others."""
    execute = loader.exec_module

    def execute_once(module: ModuleType) -> None:
        del loader.exec_module
        with _deferred_modules(modules):
            execute(module)

    loader.exec_module = execute_once


@contextmanager
def _deferred_modules(names: Sequence[str]) -> Iterator[None]:
    made: dict[str, ModuleType] = {}
    for name in names:
        parent = _parent(name)
        spec = PathFinder.find_spec(name, parent.__path__ if parent else None)
        if name not in sys.modules and spec is not None:
            sys.modules[name] = made[name] = (_Metadata if name == _METADATA else _DeferredModule)(name)
            made[name].__spec__ = spec
            if name == _METADATA:
                importlib.metadata = made[name]
            elif parent and parent.__name__ not in _DEFERRED:  # onnx and onnx-ir bind theirs themselves
                parent.__getattr__ = partial(_real_module, parent.__name__)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, module in made.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if vars(importlib).get("metadata") is made.get(_METADATA, importlib):
            del importlib.metadata


def _parent(name: str) -> ModuleType | None:
    """The package that a module is in, where it is in one."""
    parent = name.rpartition(".")[0]
    return importlib.import_module(parent) if parent else None


def _real_module(package: str, attribute: str) -> ModuleType:
    """A module of a package that others use, too, imported when it is looked up there: for everybody the real one."""
    name = f"{package}.{attribute}"
    if not any(name in modules for modules in _DEFERRED.values()):
        raise AttributeError(f"module {package!r} has no attribute {attribute!r}")
    return importlib.import_module(name)


def defer_imports() -> None:
    """Put off what onnx and onnx-ir import and training does not need, where they are not imported yet."""
    finder = _Finder()
    if finder._waiting:
        sys.meta_path.insert(0, finder)
