"""Finds the optimizers: every module of this package that has a ``SCHEMA``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.operators.aliases import accept_aliases
from onnxtrain.operators.optimizer import Optimizer
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


OPTIMIZERS: dict[str, Entry] = {}
"""All optimizers by the name of their operator; filled when the package is imported."""


def discover(package: ModuleType) -> None:
    """Import the modules of a package, and register those that are optimizers."""
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_"):
            continue
        module: Any = importlib.import_module(f"{package.__name__}.{info.name}")
        schema = vars(module).get("SCHEMA")
        if isinstance(schema, OptimizerSchema):
            accept_aliases(getattr(module, schema.name))
            OPTIMIZERS[schema.name] = Entry(schema, getattr(module, schema.name), getattr(module, schema.name.lower()))


def find(domain: str, name: str) -> OptimizerSchema | None:
    """The schema of an optimizer operator, or ``None`` where it is none."""
    entry = OPTIMIZERS.get(name)
    return entry.schema if entry is not None and entry.schema.domain == domain else None
