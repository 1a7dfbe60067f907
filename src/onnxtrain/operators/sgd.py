"""SGD: stochastic gradient descent, plain or with momentum, as PyTorch has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from onnxtrain.errors import OptionError
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN
from onnxtrain.operators.aliases import accept_aliases
from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.reference import evaluate
from onnxtrain.operators.schema import FRACTION, Attribute, OptimizerSchema, State


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
    """The update of one variable; returns X_new and, with momentum, V_new."""
    G_regularized = weight_decay * X + G
    if not states:
        return (X - R * G_regularized,)
    (V,) = states
    weight = where(T > 0, 1 - dampening, 1)
    V_new = momentum * V + weight * G_regularized
    direction = G_regularized + momentum * V_new if mode == "nesterov" else V_new
    return X - R * direction, V_new


SCHEMA = OptimizerSchema(
    name="SGD",
    doc="One step of gradient descent: along the gradient, or, where momentum is above 0, along an accumulated one.",
    rule=rule,
    attributes=(
        Attribute("momentum", "Weight of the old momentum; 0 for none, and no state.", 0.0, sensible=FRACTION),
        Attribute("dampening", "What the gradient's weight in the momentum lacks to 1, for T above 0.", 0.0),
        Attribute("weight_decay", "Adds weight_decay * X to the gradient.", 0.0),
        Attribute(
            "mode", "Which form of momentum moves the variable.", "standard", kind=str, choices=("standard", "nesterov")
        ),
    ),
    states=(State("V", "The momentum.", used=lambda attributes: float(attributes["momentum"]) > 0),),
    domain=ONNXTRAIN_DOMAIN,
)


def sgd(R: ArrayLike, T: ArrayLike, *inputs: ArrayLike, **attributes: Any) -> tuple[np.ndarray, ...]:
    """Run the operator SGD on arrays.

    Args:
        R: Learning rate, one float32 or float64 number.
        T: Update count, one int64 number; at 0 or below, the gradient's weight is 1.
        *inputs: All X, then all G and, where momentum is above 0, all V; float32 or float64, one type for each
            variable.
        **attributes: ``momentum`` (0), ``dampening`` (0), ``weight_decay`` (0), ``mode`` ("standard").

    Returns:
        All X_new, then all V_new, each of the type and shape of its input.

    Raises:
        OperatorError: Types, shapes, counts or attributes are not as the operator needs them.

    Example:
        >>> import numpy as np
        >>> sgd(0.5, 0, np.ones(1), np.array([3.0]))
        (array([-0.5]),)
        >>> sgd(0.25, 1, np.ones(1), np.array([2.0]), np.array([4.0]), momentum=0.5)
        (array([0.]), array([4.]))
    """
    return evaluate(SCHEMA, R, T, *inputs, **attributes)


@accept_aliases
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

    PyTorch: ``torch.optim.SGD`` with the same arguments takes the same steps. As an attribute of the operator
    ``nesterov`` is ``mode``, "standard" or "nesterov". :class:`Momentum` is ONNX's operator for the same with momentum.

    Args:
        learning_rate: R, 0 or more.
        momentum: In [0, 1); with 0 there is no state.
        dampening: 0 or more.
        weight_decay: Weight decay that joins the gradient, 0 or more.
        nesterov: Nesterov's form of momentum.

    Raises:
        OptionError: A number is outside its range; or nesterov is asked for without momentum or with dampening.

    Source:
        I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in
        deep learning", ICML 2013; onnxtrain::SGD, version 1.

    Example:
        >>> SGD(learning_rate=0.1, momentum=0.9, nesterov=True).node_attributes()
        {'momentum': 0.9, 'dampening': 0.0, 'weight_decay': 0.0, 'mode': 'nesterov'}
        >>> SGD().states
        ()
    """

    schema: ClassVar[OptimizerSchema] = SCHEMA
    names: ClassVar[Mapping[str, str]] = {"mode": "nesterov"}

    learning_rate: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    if TYPE_CHECKING:  # the names of other tools, which the decorator takes

        def __init__(
            self,
            learning_rate: float = 1e-3,
            momentum: float = 0.0,
            dampening: float = 0.0,
            weight_decay: float = 0.0,
            nesterov: bool = False,
            *,
            lr: float = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.nesterov, bool):
            raise OptionError(f"SGD: nesterov is {self.nesterov!r}, but must be True or False.")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise OptionError(
                f"SGD: nesterov needs a momentum above 0 and no dampening, but momentum is {self.momentum} and "
                f"dampening is {self.dampening}."
            )

    @classmethod
    def from_attributes(cls, **given: Any) -> Self:
        """The settings that give the operator these attributes."""
        if "mode" in given and given["mode"] not in (modes := SCHEMA.attributes[-1].choices):
            raise OptionError(f"SGD: mode is {given['mode']!r}, but must be one of {', '.join(map(repr, modes))}.")
        return super().from_attributes(
            **{name: value == "nesterov" if name == "mode" else value for name, value in given.items()}
        )

    def _setting(self, attribute: str) -> tuple[str, Any]:
        if attribute == "mode":
            return "nesterov", "nesterov" if self.nesterov else "standard"
        return super()._setting(attribute)
