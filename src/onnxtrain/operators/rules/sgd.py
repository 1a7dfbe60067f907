"""SGD: stochastic gradient descent, plain or with momentum, as in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.operators.optimizer import Optimizer, optimizer
from onnxtrain.operators.schema import FRACTION, MODE, Attribute, State


def rule(
    R: Wide,
    T: Wide,
    X: Tensor,
    G: Tensor,
    *states: Tensor,
    momentum: Wide,
    dampening: Wide,
    weight_decay: Wide,
    mode: str,
) -> tuple[Any, ...]:
    """Update one variable; returns X_new and, with momentum, V_new."""
    G_regularized = weight_decay * X + G
    if not states:
        return (X - R * G_regularized,)
    (V,) = states
    weight = where(T > 0, 1 - dampening, 1)
    V_new = momentum * V + weight * G_regularized
    direction = G_regularized + momentum * V_new if mode == "nesterov" else V_new
    return X - R * direction, V_new


@optimizer(
    "One step of gradient descent: along the gradient, or, where momentum is above 0, along an accumulated one.",
    rule,
    Attribute("momentum", "Weight of the old momentum; 0 for none, and no state.", sensible=FRACTION),
    Attribute("dampening", "1 minus the gradient's weight in the momentum, for T above 0."),
    Attribute("weight_decay", "Adds weight_decay * X to the gradient."),
    MODE,
    states=(State("V", "The momentum.", used=lambda attributes: float(attributes["momentum"]) > 0),),
)
@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, plain or with momentum.

    With learning rate R, update count T (0 in the first step), parameter X, its gradient G and, where momentum is above
    0, the state V::

        G'    = weight_decay * X + G
        V_new = momentum * V + (1 - dampening) * G'        in the first step G'
        X_new = X - R * G'                                 without momentum
        X_new = X - R * V_new                              with momentum
        X_new = X - R * (G' + momentum * V_new)            with nesterov

    PyTorch: ``torch.optim.SGD`` with the same arguments takes the same steps. :class:`Momentum` is ONNX's own operator
    for gradient descent with momentum.

    Args:
        learning_rate: R, 0 or more.
        momentum: In [0, 1); with 0 there is no state.
        dampening: 0 or more.
        weight_decay: Weight decay added to the gradient (L2 regularization), 0 or more.
        nesterov: Use Nesterov's momentum.

    Raises:
        OptionError: A setting is outside its range, or nesterov is given without momentum or with dampening.

    Source:
        I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in
        deep learning", ICML 2013; onnxtrain::SGD, version 1.

    Example:
        >>> import numpy as np
        >>> SGD(learning_rate=0.1, momentum=0.9, nesterov=True).node_attributes()
        {'momentum': 0.9, 'dampening': 0.0, 'weight_decay': 0.0, 'mode': 'nesterov'}
        >>> SGD().states
        ()
        >>> from onnxtrain.operators import sgd
        >>> sgd(0.5, 0, np.ones(1), np.array([3.0]))
        (array([-0.5]),)
        >>> sgd(0.25, 1, np.ones(1), np.array([2.0]), np.array([4.0]), momentum=0.5)
        (array([0.]), array([4.]))
    """

    learning_rate: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise OptionError(
                f"SGD: nesterov needs a momentum above 0 and no dampening, but momentum is {self.momentum} and "
                f"dampening is {self.dampening}."
            )
