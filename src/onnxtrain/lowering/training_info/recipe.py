"""Records of a training step: the specification that algorithm graphs are written from, and the entries to run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.lowering.training_info.rounding import Rounding
from onnxtrain.operators.optimizer import Optimizer

COUNTERS_KEY = "onnxtrain.dropout_counters"
"""Metadata key of a training model: a JSON list of the states that identify a step, for dropout masks."""

SYNCHRONIZED_KEY = "onnxtrain.synchronized"
"""Metadata key of an entry: ``true`` if batch normalization is synchronized over all ranks; not in files."""

MASK = "/mask"
"""End of the name of a mask, a constant that is named after its parameter."""


@dataclass(frozen=True)
class Names:
    """Names of the algorithms' own inputs, results and update count."""

    target: str = "target"
    learning_rate: str = "learning_rate"
    loss: str = "loss"
    count: str = "T"
    weights: str = "sample_weight"

    @classmethod
    def beside(cls, graph: ir.Graph) -> Names:
        """Return the default names, with underscores appended to names that the graph already uses."""
        return cls(*free_names(graph, ["target", "learning_rate", "loss", "T", "sample_weight"]))


def free_names(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """Return the names, with underscores appended to names that the graph already uses."""
    taken, found = ir.convenience.create_value_mapping(graph, include_subgraphs=False), []
    for name in names:
        while name in taken:
            name += "_"
        found.append(name)
    return found


class LossTerms(NamedTuple):
    """Values of a loss in an algorithm graph, all 0-d and of the prediction's type."""

    loss: Value
    weight: Value
    sums: bool = False
    parts: Mapping[str, Value] = MappingProxyType({})


@dataclass(frozen=True)
class Clipping:
    """Clipping of gradients before the update: first by value, then by global norm."""

    value: float | None = None
    norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("value", "norm"):
            bound = getattr(self, name)
            if bound is not None and not (bound > 0 and np.isfinite(bound)):
                raise OptionError(f"clip_{name} is {bound}; it needs a finite number above 0.")


Block = tuple[int, ...]
"""Size of a block of weights along each axis of the stored tensor; empty for blocks of one weight."""


class UpdateRule(NamedTuple):
    """The update rule of a parameter."""

    optimizer: Optimizer
    rate_scale: float = 1.0
    missed: int = 0  # updates while it was frozen


@dataclass(frozen=True)
class Averaging:
    """An exponential moving average of the parameters; see :class:`onnxtrain.EMA`."""

    decay: float
    start: int = 0
    warmup: bool = False


@dataclass(eq=False)
class StepSpec:
    """Specification of a training step, from which algorithm graphs are built."""

    model: ir.Model
    build_loss: Callable[[Builder], LossTerms]
    targets: Sequence[ir.Value]
    parameters: Sequence[str]
    optimizer: Optimizer
    clipping: Clipping = field(default_factory=Clipping)
    micro_batches: bool = False
    alone: bool = False
    cleared: bool = True
    statistics: dict[str, str] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)
    sparsified: Mapping[str, Block] | None = None
    options: GradientOptions = field(default_factory=GradientOptions)
    weights: ir.Value | None = None
    synchronized: bool = False
    rules: Mapping[str, UpdateRule] = field(default_factory=dict)
    averaging: Averaging | None = None
    rounding: Rounding | None = None
    wide: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    given_squares: Mapping[str, np.ndarray] | None = None
    held: Collection[str] = ()

    def rule_of(self, parameter: str) -> UpdateRule:
        """Return the update rule of a parameter."""
        return self.rules.get(parameter) or UpdateRule(self.optimizer)


@dataclass(eq=False)
class StepEntry:
    """An entry of ``training_info`` as one graph, from which a session is created."""

    model: ir.Model
    states: Sequence[str]
    updates: dict[str, str] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    main: Collection[str] = ()
    notified_groups: Sequence[Sequence[str]] = ()
    notified_only: dict[str, str] = field(default_factory=dict)
