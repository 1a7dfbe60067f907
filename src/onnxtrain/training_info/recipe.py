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
from onnxtrain.ir import Builder, Value
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training_info.rounding import Rounding

COUNTERS_KEY = "onnxtrain.dropout_counters"
"""Key of a training model's metadata that holds, as a JSON list, the states that tell one step from another."""

SYNCHRONIZED_KEY = "onnxtrain.synchronized"
"""Key of an entry's metadata; ``true`` where batch normalization is synchronized over all ranks.

Only sessions read it: a file is for one process."""


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
        """Return the usual names, with underscores behind those that the graph uses already."""
        return cls(*free_names(graph, ["target", "learning_rate", "loss", "T", "sample_weight"]))


def free_names(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """Return the names, with underscores behind those that the graph uses already."""
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    taken |= {output.name for node in graph for output in node.outputs}
    found = []
    for name in names:
        while name in taken:
            name += "_"
        found.append(name)
    return found


class LossTerms(NamedTuple):
    """A loss under construction, all of it 0-d of the prediction's type.

    Attributes:
        loss: (sum of terms) / ``weight``, or the sum itself.
        weight: The number of terms, or the sum of their weights.
        sums: True where the loss is the sum: the losses of micro-batches add up to the loss of the batch.
        parts: The losses that the loss is the sum of, by their names in the results of a step.
    """

    loss: Value
    weight: Value
    sums: bool = False
    parts: Mapping[str, Value] = MappingProxyType({})


@dataclass(frozen=True)
class Clipping:
    """Clipping of gradients before the update: first by value, then by global norm.

    Attributes:
        value: Each element is clipped to [-value, value].
        norm: All gradients are scaled by min(1, norm / ||g||), the norm taken over all of them together.
    """

    value: float | None = None
    norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("value", "norm"):
            bound = getattr(self, name)
            if bound is not None and not (bound > 0 and np.isfinite(bound)):
                raise OptionError(f"clip_{name} is {bound}; it needs a finite number above 0.")


class UpdateRule(NamedTuple):
    """The update rule of a parameter.

    Attributes:
        optimizer: The optimizer with its attributes.
        rate_scale: Factor of the learning rate.
    """

    optimizer: Optimizer
    rate_scale: float = 1.0


@dataclass(frozen=True)
class Averaging:
    """An exponential moving average of the parameters, beside them; see :class:`onnxtrain.EMA`.

    Attributes:
        decay: The weight of the old average.
        start: Number of first updates in which the average equals the parameter.
        warmup: True where the decay grows from 2/11 to its value.
    """

    decay: float
    start: int = 0
    warmup: bool = False


@dataclass(eq=False)
class StepSpec:
    """The specification of a training step: everything that the algorithm graphs are written from.

    Attributes:
        model: The main graph: a working copy with shapes inferred; algorithms are built beside its nodes.
        build_loss: Emits the loss in the algorithm; returns its terms.
        targets: The targets that the algorithm takes as inputs.
        weights: The input for one weight per example; ``None`` where all count alike.
        parameters: Names of the initializers that are trained.
        optimizer: Update rule with its attributes.
        averaging: The moving average that is kept of the parameters; ``None`` for none.
        rules: Update rules of the parameters that have one of their own, of the same operator.
        clipping: Clipping of gradients.
        micro_batches: Write two entries: one that adds a micro-batch's gradients up, one that applies them.
        alone: Every update has one micro-batch, whose gradients replace the accumulated ones.
        cleared: The second entry clears the accumulators; otherwise the executor does.
        statistics: Running statistics of batch normalization: initializer to the main graph's new value.
        synchronized: Whether batch normalization is synchronized over all ranks.
        masks: Masks by parameter: where a mask is false, the gradient is zero.
        sparsified: Parameters whose sparsity the optimizer promotes, where it does; by default those of rank 2
            and more. The others take plain steps: a bias that starts at zero would freeze under a p-norm.
        options: Options of the gradients, which the training model's metadata has, too.
        rounding: Rounding of the states of float32 parameters to fewer bits; ``None`` for states of the parameter's
            type.
        wide: Parameters in bfloat16, which are rounded stochastically, to their float32 values in the main graph, for
            which gradients are computed.
        seed: Seed of the rounding of parameters.
        given_squares: States that hold the squares of the rows of all gradients, with their first values, for an
            update of parts of the parameters; by default the update computes them.
    """

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
    sparsified: Collection[str] | None = None
    options: GradientOptions = field(default_factory=GradientOptions)
    weights: ir.Value | None = None
    synchronized: bool = False
    rules: Mapping[str, UpdateRule] = field(default_factory=dict)
    averaging: Averaging | None = None
    rounding: Rounding | None = None
    wide: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    given_squares: Mapping[str, np.ndarray] | None = None

    def rule_of(self, parameter: str) -> UpdateRule:
        """Return the update rule of a parameter."""
        return self.rules.get(parameter) or UpdateRule(self.optimizer)


@dataclass(eq=False)
class StepEntry:
    """One entry of ``training_info``, its main graph and algorithm in one graph: the source of a session.

    Attributes:
        model: Main graph and algorithm in one sorted graph. Its states are graph inputs; other tensors are
            initializers.
        states: The states of the whole training, by name.
        updates: States to the names of the values that they take after a step.
        results: Names of the values that a step returns.
        main: Names of the main graph's inputs and initializers; all others belong to the algorithm.
        announced: Groups of states that are reported as soon as their new values are ready, with native kernels.
        passed: Like updates, for states that are reported and not kept.
    """

    model: ir.Model
    states: Sequence[str]
    updates: dict[str, str] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    main: Collection[str] = ()
    announced: Sequence[Sequence[str]] = ()
    passed: dict[str, str] = field(default_factory=dict)
