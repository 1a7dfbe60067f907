"""Adam: steps along the running average of the gradient, scaled by the root of the average of its square."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.operators.optimizer import Optimizer, optimizer
from onnxtrain.operators.schema import ALPHA, AVERAGE, BETA, FRACTION, PENALTY, SQUARES, Attribute
from onnxtrain.operators.sparsity import Sparsity


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
    norm_coefficient: Wide,
    norm_coefficient_post: Wide,
) -> tuple[Any, ...]:
    """Update one variable; returns X_final, V_new and H_new."""
    G_regularized = norm_coefficient * X + G
    V_new = alpha * V + (1 - alpha) * G_regularized
    H_new = beta * H + (1 - beta) * G_regularized * G_regularized
    H_sqrt = np.sqrt(H_new) + epsilon
    R_adjusted = where(T > 0, R * np.sqrt(1 - beta**T) / (1 - alpha**T), R)
    X_new = X - R_adjusted * V_new / H_sqrt
    X_final = (1 - norm_coefficient_post) * X_new
    return X_final, V_new, H_new


@optimizer(
    "One step of Adam: along the running average of the gradient, divided by the root of the running "
    "average of its square. For T above 0 the learning rate corrects the bias of averages that began at zero.",
    rule,
    ALPHA,
    BETA,
    Attribute("epsilon", "Added to the root of H_new against division by zero.", familiar="eps"),
    PENALTY,
    Attribute(
        "norm_coefficient_post",
        "Shrinks the updated variable by the factor 1 - norm_coefficient_post.",
        sensible=FRACTION,
    ),
    states=(AVERAGE, SQUARES),
    domain=TRAINING_DOMAIN,
    first_count=1,
)
@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam: steps along the running average of the gradient, scaled by the root of the average of its square.

    With learning rate R, update count T (1 in the first step), parameter X, its gradient G and the states
    V and H::

        G'    = norm_coefficient * X + G
        V_new = alpha * V + (1 - alpha) * G'
        H_new = beta * H + (1 - beta) * G' * G'
        R'    = R * sqrt(1 - beta**T) / (1 - alpha**T)     for T > 0, else R
        X_new = (1 - norm_coefficient_post) * (X - R' * V_new / (sqrt(H_new) + epsilon))

    PyTorch: ``torch.optim.Adam(lr=learning_rate, betas=(alpha, beta), weight_decay=norm_coefficient)`` differs in
    epsilon: ONNX adds it before the bias correction, PyTorch after it. A step with PyTorch's ``eps`` equals one here
    with ``epsilon = eps * sqrt(1 - beta**T)``: a constant epsilon weighs more in early steps here. The default is 1e-6,
    not 1e-8. ``norm_coefficient_post`` is not AdamW's ``weight_decay``: it scales the updated parameter, and the
    learning rate does not multiply it.

    Args:
        learning_rate: R, 0 or more.
        alpha: In [0, 1).
        beta: In [0, 1).
        epsilon: 0 or more.
        norm_coefficient: Weight decay added to the gradient (L2 regularization), 0 or more.
        norm_coefficient_post: Decay of the updated parameter, in [0, 1).
        sparsity: Scaling of the updates that makes the model sparse, :class:`~onnxtrain.operators.sparsity.Sparsity`.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015;
        ai.onnx.preview.training::Adam, version 1.

    Example:
        >>> Adam(learning_rate=3e-4).alpha
        0.9
        >>> Adam(alpha=1.0)
        Traceback (most recent call last):
            ...
        onnxtrain.errors.OptionError: Adam: alpha is 1.0, but must be a finite number, 0 or more and below 1.
        >>> from onnxtrain.operators import adam
        >>> x, g, v, h = np.ones(1), np.array([3.0]), np.zeros(1), np.zeros(1)
        >>> adam(0.5, 0, x, g, v, h, alpha=0.5, beta=0.75, epsilon=0.0)
        (array([0.5]), array([1.5]), array([2.25]))
    """

    learning_rate: float = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-6
    norm_coefficient: float = 0.0
    norm_coefficient_post: float = 0.0
    sparsity: Sparsity | None = None
