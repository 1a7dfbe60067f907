"""LAMB: AdamW with layer-wise learning rates, for large batches."""

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

ALPHA, BETA, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-6, 0.01


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


SCHEMA = OptimizerSchema(
    name="LAMB",
    doc="One step of LAMB: the step of Adam, with bias correction where T is above 0, plus the decay of the variable. "
    "The learning rate is multiplied by the norm of the variable over the norm of this sum; the ratio is 1 where one "
    "of them is zero.",
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
        Attribute("weight_decay", "Share of the variable that is added to the step before scaling.", WEIGHT_DECAY),
    ),
    states=(
        State("V", "The running average of the gradient."),
        State("H", "The running average of the squared gradient."),
    ),
    domain=ONNXTRAIN_DOMAIN,
    first_count=1,
)


def lamb(R: ArrayLike, T: ArrayLike, *inputs: ArrayLike, **attributes: Any) -> tuple[np.ndarray, ...]:
    """Run the operator LAMB on arrays.

    Args:
        R: Learning rate, one float32 or float64 number.
        T: Update count, one int64 number; at 0 or below there is no bias correction.
        *inputs: All X, then all G, all V and all H; float32 or float64, one type for each variable.
        **attributes: ``alpha`` (0.9), ``beta`` (0.999), ``epsilon`` (1e-6), ``weight_decay`` (0.01).

    Returns:
        All X_new, then all V_new and all H_new, each of the type and shape of its input.

    Raises:
        OperatorError: The operator does not accept the types, shapes, counts or attributes.

    Example:
        >>> import numpy as np
        >>> x, g, v, h = np.full(1, 4.0), np.array([3.0]), np.zeros(1), np.zeros(1)
        >>> lamb(0.5, 1, x, g, v, h, alpha=0.5, beta=0.75, epsilon=0.0, weight_decay=0.0)
        (array([2.]), array([1.5]), array([2.25]))
    """
    return evaluate(SCHEMA, R, T, *inputs, **attributes)


@accept_all_names
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

    @property
    def elementwise(self) -> bool:
        """False: the norms are over the whole tensor."""
        return False
