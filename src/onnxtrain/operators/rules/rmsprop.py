"""RMSprop: steps along the gradient, divided by the root of its averaged square."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.operators.arithmetic import Tensor, Wide
from onnxtrain.operators.optimizer import Optimizer, optimizer
from onnxtrain.operators.schema import BETA, FRACTION, SQUARES, Attribute, State


def rule(
    R: Wide,
    T: Wide,
    X: Tensor,
    G: Tensor,
    H: Tensor,
    *states: Tensor,
    alpha: Wide,
    epsilon: Wide,
    weight_decay: Wide,
    momentum: Wide,
) -> tuple[Any, ...]:
    """Update one variable; returns X_new, H_new and, with momentum, V_new."""
    G_regularized = weight_decay * X + G
    H_new = alpha * H + (1 - alpha) * G_regularized * G_regularized
    direction = G_regularized / (np.sqrt(H_new) + epsilon)
    if not states:
        return X - R * direction, H_new
    (V,) = states
    V_new = momentum * V + direction
    return X - R * V_new, H_new, V_new


@optimizer(
    "One step of RMSprop: along the gradient, divided by the root of the running average of its square; where "
    "momentum is above 0, along the accumulated directions.",
    rule,
    Attribute("alpha", BETA.doc, sensible=FRACTION),
    Attribute("epsilon", "Added to the root of H_new against division by zero.", familiar="eps"),
    Attribute("weight_decay", "Adds weight_decay * X to the gradient."),
    Attribute("momentum", "Weight of the old momentum; 0 for none, and no state V.", sensible=FRACTION),
    states=(SQUARES, State("V", "The momentum.", used=lambda attributes: float(attributes["momentum"]) > 0)),
    counted=False,
)
@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop: steps along the gradient, divided by the root of its averaged square.

    With learning rate R, parameter X, its gradient G and the states H and, where momentum is above 0, V::

        G'    = weight_decay * X + G
        H_new = alpha * H + (1 - alpha) * G' * G'
        V_new = momentum * V + G' / (sqrt(H_new) + eps)
        X_new = X - R * V_new

    PyTorch: ``torch.optim.RMSprop(lr=learning_rate, alpha=alpha, eps=eps, weight_decay=weight_decay,
    momentum=momentum)`` takes the same steps; ``centered`` is missing here.

    Args:
        learning_rate: R, 0 or more.
        alpha: In [0, 1).
        eps: 0 or more.
        weight_decay: Weight decay added to the gradient (L2 regularization), 0 or more.
        momentum: In [0, 1); with 0 there is no state V.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        T. Tieleman, G. Hinton, "Lecture 6.5: RMSprop", COURSERA 2012; onnxtrain::RMSprop, version 1.

    Example:
        >>> RMSprop(momentum=0.9).node_attributes()
        {'alpha': 0.99, 'epsilon': 1e-08, 'weight_decay': 0.0, 'momentum': 0.9}
        >>> from onnxtrain.operators import rmsprop
        >>> rmsprop(0.5, 0, np.ones(1), np.array([3.0]), np.array([0.0]), alpha=0.75, epsilon=0.0)
        (array([0.]), array([2.25]))
    """

    learning_rate: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
