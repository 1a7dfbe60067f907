"""All that a training model is made from."""

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


@dataclass(frozen=True)
class Names:
    """What the algorithms call their own inputs, results and update count."""

    target: str = "target"
    learning_rate: str = "learning_rate"
    loss: str = "loss"
    count: str = "T"
    weights: str = "sample_weight"

    @classmethod
    def beside(cls, graph: ir.Graph) -> Names:
        """The usual names, with underscores behind those that the graph has given away."""
        return cls(*free_names(graph, ["target", "learning_rate", "loss", "T", "sample_weight"]))


def free_names(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """The names, with underscores behind those that the graph has given away."""
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
        weight: How many terms there are, or the sum of their weights.
        sums: Whether the loss is the sum: those of micro-batches add up to that of the batch.
        parts: What the loss is made of, by the name that a step returns it under.
    """

    loss: Value
    weight: Value
    sums: bool = False
    parts: Mapping[str, Value] = MappingProxyType({})


@dataclass(frozen=True)
class Clipping:
    """What happens to gradients before the update: first by value, then by global norm.

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
    """How a parameter is updated.

    Attributes:
        optimizer: The update rule with its attributes.
        rate_scale: What the learning rate is multiplied by.
    """

    optimizer: Optimizer
    rate_scale: float = 1.0


@dataclass(frozen=True)
class Averaging:
    """An exponential moving average of the parameters, beside them; see :class:`onnxtrain.EMA`.

    Attributes:
        decay: The weight of the old average.
        start: How many updates the average follows at once.
        warmup: Whether the decay grows from 2/11 to its value.
    """

    decay: float
    start: int = 0
    warmup: bool = False


@dataclass(eq=False)
class Recipe:
    """All that a training model is made from.

    Attributes:
        model: The main graph: a working copy with shapes inferred; algorithms are built beside its nodes.
        build_loss: Emits the loss in the algorithm; returns its terms.
        targets: The targets that the algorithm takes as inputs.
        weights: The input for one weight per example; ``None`` where all count alike.
        parameters: Names of the initializers that are trained.
        optimizer: Update rule with its attributes.
        averaging: The moving average that is kept of the parameters; ``None`` for none.
        rules: Update rules of the parameters that have one of their own, of the same operator.
        clipping: What is done to gradients.
        micro_batches: Write two entries: one that adds a micro-batch's gradients up, one that applies them.
        alone: Every update has one micro-batch: its gradients take the place of what is accumulated.
        cleared: The second entry clears what the first has added up; otherwise that is left to who runs them.
        statistics: Running statistics of batch normalization: initializer to the main graph's new value.
        synchronized: Whether batch normalization takes the statistics of all processes that train together.
        masks: Parameters of which a part stays zero: where the mask is false, the gradient is zero.
        sparsified: Parameters whose sparsity the optimizer promotes, where it does; by default those of rank 2
            and more. The others take plain steps: a bias that starts at zero would freeze under a p-norm.
        options: How the gradients are built; stated in the training model's metadata.
        rounding: How the states of float32 parameters are kept in fewer bits; ``None``: states have the type of
            their parameter.
        wide: Parameters in bfloat16, which are rounded at random, to the values of the main graph that have their
            numbers in float32: gradients are taken of these.
        seed: Of the rounding of parameters.
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
        """How a parameter is updated."""
        return self.rules.get(parameter) or UpdateRule(self.optimizer)
