"""The optimizers: every class of settings in the modules of ``operators/rules``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np

from onnxtrain.errors._internal import classes_in
from onnxtrain.graph.domains import is_default_domain
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.reference import operator_over_arrays
from onnxtrain.operators.schema import OptimizerSchema


class Entry(NamedTuple):
    """One optimizer."""

    schema: OptimizerSchema
    settings: type[Optimizer]
    reference: Callable[..., tuple[np.ndarray, ...]]


def optimizers_in(package: str) -> dict[str, Entry]:
    """Return the optimizers that the modules of a package define, by operator name."""
    found = classes_in(package, Optimizer)
    return {name: Entry(each.schema, each, operator_over_arrays(each.schema)) for name, each in found.items()}


OPTIMIZERS: Final[Mapping[str, Entry]] = optimizers_in(f"{__name__.rpartition('.')[0]}.rules")
"""All optimizers."""


def find(domain: str, name: str) -> OptimizerSchema | None:
    """Return the schema of an optimizer operator, or ``None`` for any other operator."""
    if is_default_domain(domain):
        return None
    entry = OPTIMIZERS.get(name)
    return entry.schema if entry is not None and entry.schema.domain == domain else None
