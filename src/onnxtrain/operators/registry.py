"""The optimizers: every class of settings in the modules of ``operators/rules``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final, NamedTuple

import numpy as np

from onnxtrain.graph.domains import is_default_domain
from onnxtrain.operators import rules
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.reference import operator_over_arrays
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


def optimizers_in(package: ModuleType) -> dict[str, Entry]:
    """Return the optimizers that the modules of a package define, by operator name."""
    found = {}
    for file in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{file.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Optimizer) and value.__module__ == module.__name__:
                found[value.__name__] = Entry(value.schema, value, operator_over_arrays(value.schema))
    return found


OPTIMIZERS: Final[Mapping[str, Entry]] = optimizers_in(rules)
"""All optimizers."""


def find(domain: str, name: str) -> OptimizerSchema | None:
    """Return the schema of an optimizer operator, or ``None`` for any other operator."""
    if is_default_domain(domain):
        return None
    entry = OPTIMIZERS.get(name)
    return entry.schema if entry is not None and entry.schema.domain == domain else None
