"""Registry of the optimizers: every module of this package that defines ``SCHEMA``."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.graph.domains import is_default_domain
from onnxtrain.operators.optimizer import Optimizer, accept_all_names
from onnxtrain.operators.schema import OptimizerSchema


class Entry(NamedTuple):
    """One optimizer.

    Attributes:
        schema: The operator.
        settings: The public class of its settings.
        reference: The operator over NumPy arrays.
    """

    schema: OptimizerSchema
    settings: type[Optimizer]
    reference: Callable[..., tuple[np.ndarray, ...]]


class Optimizers(Mapping[str, Entry]):
    """The optimizers by operator name, each imported at its first access.

    Args:
        package: Name of the package of the modules. A module has its operator's name in lower case.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def files(self) -> frozenset[str]:
        """Names of all modules of the package, with or without an optimizer."""
        path = importlib.import_module(self._package).__path__
        return frozenset(info.name for info in pkgutil.iter_modules(path) if not info.name.startswith("_"))

    def __getitem__(self, name: str) -> Entry:
        entry = self._find(name)
        if entry is None:
            raise KeyError(name)
        return entry

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        for file in sorted(self.files):
            entry = self._load(file)
            if entry is not None:
                yield entry.schema.name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _find(self, name: str) -> Entry | None:
        entry = self._entries.get(name) or self._load(name.lower())
        return entry if entry is not None and entry.schema.name == name else None

    def _load(self, file: str) -> Entry | None:
        return self.read(importlib.import_module(f"{self._package}.{file}")) if file in self.files else None

    def read(self, module: Any) -> Entry | None:
        """Return the optimizer that a module defines, or ``None``."""
        schema = vars(module).get("SCHEMA")
        if not isinstance(schema, OptimizerSchema):
            return None
        with self._lock:
            if schema.name not in self._entries:
                settings = accept_all_names(getattr(module, schema.name))
                self._entries[schema.name] = Entry(schema, settings, getattr(module, schema.name.lower()))
        return self._entries[schema.name]


OPTIMIZERS = Optimizers(__name__.rpartition(".")[0])
"""All optimizers."""


def find(domain: str, name: str) -> OptimizerSchema | None:
    """Return the schema of an optimizer operator, or ``None`` for any other operator."""
    if is_default_domain(domain):
        return None
    entry = OPTIMIZERS.get(name)
    return entry.schema if entry is not None and entry.schema.domain == domain else None
