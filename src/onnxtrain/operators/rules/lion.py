"""Lion: steps of one size along the sign of an averaged gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.operators.arithmetic import Tensor, Wide
from onnxtrain.operators.optimizer import Optimizer, optimizer
from onnxtrain.operators.schema import ALPHA, AVERAGE, BETA, Attribute


def rule(
    R: Wide, T: Wide, X: Tensor, G: Tensor, V: Tensor, *, alpha: Wide, beta: Wide, weight_decay: Wide
) -> tuple[Any, ...]:
    """Update one variable; returns X_new and V_new."""
    direction = np.sign(alpha * V + (1 - alpha) * G)
    V_new = beta * V + (1 - beta) * G
    X_new = (1 - R * weight_decay) * X - R * direction
    return X_new, V_new


@optimizer(
    "One step of Lion: by the learning rate, along the sign of the gradient averaged with the running average. The "
    "decay shrinks the variable by a factor that depends on the learning rate.",
    rule,
    ALPHA._replace(doc="Weight of the running average in the direction."),
    BETA._replace(doc="Weight of the old value in the running average of the gradient."),
    Attribute("weight_decay", "Shrinks the variable by the factor 1 - R * weight_decay."),
    states=(AVERAGE,),
    counted=False,
)
@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion: steps of one size along the sign of an averaged gradient.

    With learning rate R, parameter X, its gradient G, the state V, and alpha, beta = betas::

        X_new = (1 - R * weight_decay) * X - R * sign(alpha * V + (1 - alpha) * G)
        V_new = beta * V + (1 - beta) * G

    PyTorch has no Lion; the authors' implementation takes these steps. The learning rate is three to ten times smaller
    than AdamW's, the weight decay as many times larger.

    Args:
        learning_rate: R, 0 or more.
        betas: Both in [0, 1).
        weight_decay: Decay of the parameter, multiplied by the learning rate, 0 or more.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        X. Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023; onnxtrain::Lion, version 1.

    Example:
        >>> Lion(weight_decay=0.1).node_attributes()
        {'alpha': 0.9, 'beta': 0.99, 'weight_decay': 0.1}
        >>> from onnxtrain.operators import lion
        >>> lion(0.25, 0, np.ones(1), np.array([-3.0]), np.array([1.0]), alpha=0.5, beta=0.5)
        (array([1.25]), array([-1.]))
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
