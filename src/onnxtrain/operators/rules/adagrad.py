"""Adagrad: the learning rate of every element shrinks with its accumulated squared gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.operators.arithmetic import Tensor, Wide, positive
from onnxtrain.operators.optimizer import Optimizer, optimizer
from onnxtrain.operators.schema import PENALTY, Attribute, State


def rule(
    R: Wide, T: Wide, X: Tensor, G: Tensor, H: Tensor, *, decay_factor: Wide, epsilon: Wide, norm_coefficient: Wide
) -> tuple[Any, ...]:
    """Update one variable; returns X_new and H_new."""
    r = R / positive(
        1 + T * decay_factor,
        "Adagrad: 1 + T * decay_factor is {:g}, but must be above 0, or the step would go uphill; "
        "give a larger T or decay_factor.",
    )
    G_regularized = norm_coefficient * X + G
    H_new = H + G_regularized * G_regularized
    H_adaptive = np.sqrt(H_new) + epsilon
    X_new = X - r * G_regularized / H_adaptive
    return X_new, H_new


@optimizer(
    "One step of Adagrad: a gradient step whose rate is divided, element by element, by the root of the "
    "sum of all squared gradients so far.",
    rule,
    Attribute(
        "decay_factor", "Decay of the learning rate: step T uses R / (1 + T * decay_factor).", familiar="lr_decay"
    ),
    Attribute("epsilon", "Added to the root of H_new against division by zero.", familiar="eps"),
    PENALTY,
    states=(State("H", "The sum of squared gradients."),),
    domain=TRAINING_DOMAIN,
)
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad: the learning rate of every element shrinks with its accumulated squared gradients.

    With learning rate R, update count T (0 in the first step), parameter X, its gradient G and the state H::

        r     = R / (1 + T * decay_factor)
        G'    = norm_coefficient * X + G
        H_new = H + G' * G'
        X_new = X - r * G' / (sqrt(H_new) + epsilon)

    PyTorch: ``torch.optim.Adagrad(lr=learning_rate, lr_decay=decay_factor, weight_decay=norm_coefficient,
    eps=epsilon)`` takes the same steps; only its default ``eps``, 1e-10, differs.

    Args:
        learning_rate: R, 0 or more.
        decay_factor: 0 or more.
        epsilon: 0 or more.
        norm_coefficient: Weight decay added to the gradient (L2 regularization), 0 or more.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        J. Duchi, E. Hazan, Y. Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization", JMLR 12, 2011; ai.onnx.preview.training::Adagrad, version 1.

    Example:
        >>> Adagrad(learning_rate=0.1).node_attributes()
        {'decay_factor': 0.0, 'epsilon': 1e-06, 'norm_coefficient': 0.0}
        >>> from onnxtrain.operators import adagrad
        >>> x, g, h = np.ones(2), np.array([3.0, -4.0]), np.zeros(2)
        >>> adagrad(0.1, 0, x, g, h, epsilon=0.0)
        (array([0.9, 1.1]), array([ 9., 16.]))
    """

    learning_rate: float = 0.01
    decay_factor: float = 0.0
    epsilon: float = 1e-6
    norm_coefficient: float = 0.0
