"""LAMB: AdamW with layer-wise learning rates, for large batches."""

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
    scale = correction / where(T > 0, 1 - alpha**T, 1)
    step = scale * V_new / (np.sqrt(H_new) + epsilon * correction) + weight_decay * X
    weights = np.sqrt(np.sum(X.wide() * X.wide()))
    steps = np.sqrt(np.sum(step.wide() * step.wide()))
    trust = where(weights * steps > 0, weights / steps, 1)
    X_new = X - (R * trust) * step
    return X_new, V_new, H_new


@optimizer(
    "One step of LAMB: the step of Adam, with bias correction where T is above 0, plus the decay of the variable. "
    "The learning rate is multiplied by the norm of the variable over the norm of this sum; the ratio is 1 where one "
    "of them is zero.",
    rule,
    ALPHA,
    BETA,
    Attribute("epsilon", "Added to the corrected root against division by zero.", familiar="eps"),
    Attribute("weight_decay", "Share of the variable that is added to the step before scaling."),
    states=(AVERAGE, SQUARES),
    first_count=1,
)
@dataclass(frozen=True)
class LAMB(Optimizer):
    """LAMB: AdamW with layer-wise learning rates, for large batches.

    With learning rate R, update count T (1 in the first step), parameter X, its gradient G, the states V and H, and
    alpha, beta = betas; norms are Euclidean, over all elements of the tensor::

        V_new = alpha * V + (1 - alpha) * G
        H_new = beta * H + (1 - beta) * G * G
        U = V_new / (1 - alpha**T) / (sqrt(H_new / (1 - beta**T)) + eps) + weight_decay * X
        X_new = X - R * trust * U,  trust = ||X|| / ||U||, or 1 where either norm is zero

    PyTorch has no LAMB. The steps are those of algorithm 2 of the paper with phi(z) = z. ``timm.optim.Lamb`` scales
    parameters without decay only with ``always_adapt=True``, and clips gradients by their global norm, which is
    ``Trainer(clip_norm=1.0)`` here. Biases and norms usually have no decay:
    ``groups=[Group("*.bias|*norm*", weight_decay=0)]``.

    Args:
        learning_rate: R, 0 or more.
        betas: Both in [0, 1).
        eps: 0 or more.
        weight_decay: Share of the parameter that is added to the step before scaling, 0 or more.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020;
        onnxtrain::LAMB, version 1.

    Example:
        >>> LAMB(learning_rate=2e-3, weight_decay=0.1).node_attributes()
        {'alpha': 0.9, 'beta': 0.999, 'epsilon': 1e-06, 'weight_decay': 0.1}
        >>> from onnxtrain.operators import lamb
        >>> x, g, v, h = np.full(1, 4.0), np.array([3.0]), np.zeros(1), np.zeros(1)
        >>> lamb(0.5, 1, x, g, v, h, alpha=0.5, beta=0.75, epsilon=0.0, weight_decay=0.0)
        (array([2.]), array([1.5]), array([2.25]))
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01

    @property
    def elementwise(self) -> bool:
        """False: the norms are over the whole tensor."""
        return False
