"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.operators.optimizer import Optimizer, accept_all_names
from onnxtrain.operators.reference import evaluate
from onnxtrain.operators.schema import FRACTION, Attribute, OptimizerSchema, State

ALPHA, BETA, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01


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


SCHEMA = OptimizerSchema(
    name="AdamW",
    doc="One step of Adam with decoupled weight decay, with bias correction where T is above 0. The decay shrinks the "
    "variable by a factor that depends on the learning rate; it is not added to the gradient.",
    rule=rule,
    attributes=(
        Attribute(
            "alpha",
            "Weight of the old value in the average of the gradient.",
            ALPHA,
            sensible=FRACTION,
            familiar="betas[0]",
        ),
        Attribute(
            "beta",
            "Weight of the old value in the average of the squared gradient.",
            BETA,
            sensible=FRACTION,
            familiar="betas[1]",
        ),
        Attribute(
            "epsilon",
            "Added to the corrected root against division by zero.",
            EPSILON,
            familiar="eps",
        ),
        Attribute("weight_decay", "Shrinks the variable by the factor 1 - R * weight_decay.", WEIGHT_DECAY),
    ),
    states=(
        State("V", "The running average of the gradient."),
        State("H", "The running average of the squared gradient."),
    ),
    domain=ONNXTRAIN_DOMAIN,
    first_count=1,
)


def adamw(R: ArrayLike, T: ArrayLike, *inputs: ArrayLike, **attributes: Any) -> tuple[np.ndarray, ...]:
    """Run the operator AdamW on arrays.

    Args:
        R: Learning rate, one float32 or float64 number.
        T: Update count, one int64 number; at 0 or below there is no bias correction.
        *inputs: All X, then all G, all V and all H; float32 or float64, one type for each variable.
        **attributes: ``alpha`` (0.9), ``beta`` (0.999), ``epsilon`` (1e-8), ``weight_decay`` (0.01).

    Returns:
        All X_new, then all V_new and all H_new, each of the type and shape of its input.

    Raises:
        OperatorError: The operator does not accept the types, shapes, counts or attributes.

    Example:
        >>> import numpy as np
        >>> x, g, v, h = np.ones(1), np.array([3.0]), np.zeros(1), np.zeros(1)
        >>> adamw(0.5, 1, x, g, v, h, alpha=0.5, beta=0.75, epsilon=0.0, weight_decay=0.5)
        (array([0.25]), array([1.5]), array([2.25]))
    """
    return evaluate(SCHEMA, R, T, *inputs, **attributes)


@accept_all_names
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
    """

    schema: ClassVar[OptimizerSchema] = SCHEMA

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (ALPHA, BETA)
    eps: float = EPSILON
    weight_decay: float = WEIGHT_DECAY

    if TYPE_CHECKING:  # the names that the decorator adds

        def __init__(
            self,
            learning_rate: float = 1e-3,
            betas: tuple[float, float] = (ALPHA, BETA),
            eps: float = EPSILON,
            weight_decay: float = WEIGHT_DECAY,
            *,
            lr: float = ...,
            alpha: float = ...,
            beta: float = ...,
            epsilon: float = ...,
        ) -> None: ...
