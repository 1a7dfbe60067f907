"""Momentum: stochastic gradient descent along an accumulated gradient, standard or Nesterov's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.operators.optimizer import Optimizer, optimizer
from onnxtrain.operators.schema import FRACTION, MODE, PENALTY, Attribute, State
from onnxtrain.operators.sparsity import Sparsity


def rule(
    R: Wide, T: Wide, X: Tensor, G: Tensor, V: Tensor, *, alpha: Wide, beta: Wide, mode: str, norm_coefficient: Wide
) -> tuple[Any, ...]:
    """Update one variable; returns X_new and V_new."""
    G_regularized = norm_coefficient * X + G
    beta_adjusted = where(T > 0, beta, 1)
    V_new = alpha * V + beta_adjusted * G_regularized
    direction = G_regularized + alpha * V_new if mode == "nesterov" else V_new
    X_new = X - R * direction
    return X_new, V_new


@optimizer(
    "One step of gradient descent with momentum: along an accumulated gradient, or, in Nesterov's mode, "
    "along the gradient plus the momentum that follows from it.",
    rule,
    Attribute("alpha", "Weight of the old momentum.", sensible=FRACTION, familiar="momentum"),
    Attribute(
        "beta",
        "Weight of the gradient in the new momentum for T above 0; for others it is 1.",
        familiar="1 - dampening",
    ),
    MODE,
    PENALTY,
    states=(State("V", "The momentum."),),
    domain=TRAINING_DOMAIN,
    required=True,
)
@dataclass(frozen=True)
class Momentum(Optimizer):
    """Stochastic gradient descent with momentum, standard or Nesterov's; plain with ``alpha=0``.

    With learning rate R, update count T (0 in the first step), parameter X, its gradient G and the state V::

        G'    = norm_coefficient * X + G
        b     = beta for T > 0, else 1
        V_new = alpha * V + b * G'
        X_new = X - R * V_new                        mode "standard"
        X_new = X - R * (G' + alpha * V_new)         mode "nesterov"

    PyTorch: ``torch.optim.SGD(lr=learning_rate, momentum=alpha, dampening=1 - beta,
    weight_decay=norm_coefficient, nesterov=mode == "nesterov")`` takes the same steps; PyTorch has Nesterov's
    mode only for ``beta=1``.

    Args:
        learning_rate: R, 0 or more.
        alpha: In [0, 1).
        beta: 0 or more.
        mode: "standard" or "nesterov".
        norm_coefficient: Weight decay added to the gradient (L2 regularization), 0 or more.
        sparsity: Scaling of the updates that makes the model sparse, :class:`~onnxtrain.operators.sparsity.Sparsity`.

    Raises:
        OptionError: A setting is outside its range, or the mode is unknown.

    Source:
        I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in
        deep learning", ICML 2013; ai.onnx.preview.training::Momentum, version 1.

    Example:
        >>> import numpy as np
        >>> Momentum(learning_rate=0.05, mode="nesterov").node_attributes()
        {'alpha': 0.9, 'beta': 1.0, 'mode': 'nesterov', 'norm_coefficient': 0.0}
        >>> from onnxtrain.operators import momentum
        >>> x, g, v = np.ones(1), np.array([2.0]), np.array([4.0])
        >>> momentum(0.25, 1, x, g, v, alpha=0.5, beta=1.0, mode="standard", norm_coefficient=0.0)
        (array([0.]), array([4.]))
        >>> momentum(0.25, 1, x, g, v, alpha=0.5, beta=1.0, mode="nesterov", norm_coefficient=0.0)
        (array([0.]), array([4.]))
    """

    learning_rate: float = 0.01
    alpha: float = 0.9
    beta: float = 1.0
    mode: str = "standard"
    norm_coefficient: float = 0.0
    sparsity: Sparsity | None = None
