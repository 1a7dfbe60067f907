"""Proximal term of FedProx, added to any loss: training stays near given weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.training.objective import Objective
from onnxtrain.training.trainer import Trainer


@dataclass(frozen=True)
class ProximalObjective(Objective):
    """A loss with a proximal term that pulls the parameters towards anchors."""

    mu: float = 0.0
    anchors: Mapping[str, np.ndarray] = field(default_factory=dict)

    def build_loss(self, op: Builder) -> LossTerms:
        """Emit the loss with the proximal term."""
        terms = super().build_loss(op)
        initializers = self.model.graph.initializers
        distances = []
        for name in self.parameters:
            parameter = op.wrap(initializers[name])
            distance = op.ReduceSumSquare(parameter - op.constant(self.anchors[name], parameter.dtype), keepdims=0)
            distances.append(op.cast(distance, terms.loss.dtype).with_shape(()))
        pull = op.sum_of(distances) * (self.mu / 2)
        return terms._replace(loss=(terms.loss + pull).with_shape(()))


def near(trainer: Trainer, mu: float) -> Trainer:
    """Return a trainer of the same model that starts from the current weights and stays near them.

    Source: Li et al., Federated Optimization in Heterogeneous Networks, https://arxiv.org/abs/1812.06127, equation 2.
    """
    if not (math.isfinite(mu) and mu >= 0):
        raise OptionError(f"The weight of the proximal term is {mu}; it needs a finite number of at least 0.")
    own = trainer.objective
    fields = {item.name: getattr(own, item.name) for item in dataclasses.fields(Objective)}
    anchors = {name: np.array(value) for name, value in trainer.parameters.items()}
    objective = ProximalObjective(**fields, mu=mu, anchors=anchors)
    return trainer.rebuilt(objective)
