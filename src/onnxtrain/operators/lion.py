"""Lion: steps of one size along the sign of an averaged gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.operators.arithmetic import Tensor, Wide
from onnxtrain.operators.optimizer import Optimizer, accept_all_names
from onnxtrain.operators.reference import evaluate
from onnxtrain.operators.schema import FRACTION, Attribute, OptimizerSchema, State


def rule(
    R: Wide,
    T: Wide,
    X: Tensor,
    G: Tensor,
    V: Tensor,
    *,
    alpha: Wide,
    beta: Wide,
    weight_decay: Wide,
) -> tuple[Any, ...]:
    """Update one variable; returns X_new and V_new."""
    direction = np.sign(alpha * V + (1 - alpha) * G)
    V_new = beta * V + (1 - beta) * G
    X_new = (1 - R * weight_decay) * X - R * direction
    return X_new, V_new


SCHEMA = OptimizerSchema(
    name="Lion",
    doc="One step of Lion: by the learning rate, along the sign of the gradient averaged with the running average. The "
    "decay shrinks the variable by a factor that depends on the learning rate.",
    rule=rule,
    attributes=(
        Attribute(
            "alpha", "Weight of the running average in the direction.", 0.9, sensible=FRACTION, familiar="betas[0]"
        ),
        Attribute(
            "beta",
            "Weight of the old value in the running average of the gradient.",
            0.99,
            sensible=FRACTION,
            familiar="betas[1]",
        ),
        Attribute("weight_decay", "Shrinks the variable by the factor 1 - R * weight_decay.", 0.0),
    ),
    states=(State("V", "The running average of the gradient."),),
    domain=ONNXTRAIN_DOMAIN,
    counted=False,
)


def lion(R: ArrayLike, T: ArrayLike, *inputs: ArrayLike, **attributes: Any) -> tuple[np.ndarray, ...]:
    """Run the operator Lion on arrays.

    Args:
        R: Learning rate, one float32 or float64 number.
        T: Update count, one int64 number; Lion ignores it.
        *inputs: All X, then all G and all V; float32 or float64, one type for each variable.
        **attributes: ``alpha`` (0.9), ``beta`` (0.99), ``weight_decay`` (0).

    Returns:
        All X_new, then all V_new, each of the type and shape of its input.

    Raises:
        OperatorError: The operator does not accept the types, shapes, counts or attributes.

    Example:
        >>> import numpy as np
        >>> lion(0.25, 0, np.ones(1), np.array([-3.0]), np.array([1.0]), alpha=0.5, beta=0.5)
        (array([1.25]), array([-1.]))
    """
    return evaluate(SCHEMA, R, T, *inputs, **attributes)


@accept_all_names
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
    """

    schema: ClassVar[OptimizerSchema] = SCHEMA

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    if TYPE_CHECKING:  # the names that the decorator adds

        def __init__(
            self,
            learning_rate: float = 1e-4,
            betas: tuple[float, float] = (0.9, 0.99),
            weight_decay: float = 0.0,
            *,
            lr: float = ...,
            alpha: float = ...,
            beta: float = ...,
        ) -> None: ...
