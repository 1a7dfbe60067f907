"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.operators.optimizer import Optimizer, optimizer
from onnxtrain.operators.schema import ALPHA, AVERAGE, BETA, SQUARES, Attribute


def rule(
    R: Wide,
    T: Wide,
    X: Tensor,
    G: Tensor,
    V: Tensor,
    H: Tensor,
    *,
    alpha: Wide,
    beta: Wide,
    epsilon: Wide,
    weight_decay: Wide,
) -> tuple[Any, ...]:
    """Update one variable; returns X_new, V_new and H_new."""
    V_new = alpha * V + (1 - alpha) * G
    H_new = beta * H + (1 - beta) * G * G
    correction = np.sqrt(where(T > 0, 1 - beta**T, 1))
    R_adjusted = R * correction / where(T > 0, 1 - alpha**T, 1)
    H_sqrt = np.sqrt(H_new) + epsilon * correction
    X_decayed = (1 - R * weight_decay) * X
    X_new = X_decayed - R_adjusted * V_new / H_sqrt
    return X_new, V_new, H_new


@optimizer(
    "One step of Adam with decoupled weight decay, with bias correction where T is above 0. The decay shrinks the "
    "variable by a factor that depends on the learning rate; it is not added to the gradient.",
    rule,
    ALPHA,
    BETA,
    Attribute("epsilon", "Added to the corrected root against division by zero.", familiar="eps"),
    Attribute("weight_decay", "Shrinks the variable by the factor 1 - R * weight_decay."),
    states=(AVERAGE, SQUARES),
    first_count=1,
)
@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW: Adam with decoupled weight decay, which shrinks the parameter itself.

    With learning rate R, update count T (1 in the first step), parameter X, its gradient G, the states V and H, and
    alpha, beta = betas (the operator multiplies the last fraction by sqrt(1 - beta**T) above and below)::

        V_new = alpha * V + (1 - alpha) * G
        H_new = beta * H + (1 - beta) * G * G
        X_new = (1 - R * weight_decay) * X
                - R / (1 - alpha**T) * V_new / (sqrt(H_new) / sqrt(1 - beta**T) + eps)

    PyTorch: ``torch.optim.AdamW(lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay)`` takes the same
    steps; ``maximize`` and ``amsgrad`` are missing here.

    Args:
        learning_rate: R, 0 or more.
        betas: Both in [0, 1).
        eps: 0 or more.
        weight_decay: Decay of the parameter, multiplied by the learning rate, 0 or more.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; onnxtrain::AdamW, version 1.

    Example:
        >>> AdamW(learning_rate=3e-4, weight_decay=0.1).node_attributes()
        {'alpha': 0.9, 'beta': 0.999, 'epsilon': 1e-08, 'weight_decay': 0.1}
        >>> AdamW(betas=(0.9, 1.0))
        Traceback (most recent call last):
            ...
        onnxtrain.errors.OptionError: AdamW: betas[1] is 1.0, but must be a finite number, 0 or more and below 1.
        >>> from onnxtrain.operators import adamw
        >>> x, g, v, h = np.ones(1), np.array([3.0]), np.zeros(1), np.zeros(1)
        >>> adamw(0.5, 1, x, g, v, h, alpha=0.5, beta=0.75, epsilon=0.0, weight_decay=0.5)
        (array([0.25]), array([1.5]), array([2.25]))
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
